"""Requests to token ids, token ids to replies.

History is never tokenised again.  A request's messages lead to the last turn it continues (`history`); the prompt
is that turn's recorded prompt and response ids, followed by the ids of what the chat template writes for the
messages behind it (`template`).  So a turn costs what is new in it, and its prompt begins exactly with what the
engine saw and made before.  A request that continues no turn is rendered as a whole and says why (`branches`).

Invariant: if ``continues`` is k, ``prompt_ids`` begins with turn k's prompt ids and response ids.  An end-of-turn
token that the model did not write is part of the prompt, never of a response.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from astuner.chat.history import Context, History, Place, Said, branch_reason
from astuner.chat.reply import assistant_message
from astuner.chat.template import LONG, ChatTemplate, Encoded
from astuner.chat.tool_names import ToolNames
from astuner.contracts.errors import ConfigError, UnsupportedRequest
from astuner.contracts.messages import Message, mapping_of, normalise, packed, refused_message, role_of
from astuner.contracts.parts import LooserHistoryPart
from astuner.contracts.types import Generation, gravest
from astuner.plugins import registry
from astuner.plugins.loader import PluginManager, load_plugins
from astuner.support.threads import in_daemon_thread


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """A request as token ids, with its place among the turns of its agent."""

    prompt_ids: list[int]
    continues: int | None
    """The recorded turn whose prompt and response ids ``prompt_ids`` begins with; None starts a branch."""
    branch_reason: str = ""
    """One of `BRANCH_REASONS`; empty for a first turn or a continuation."""
    request: tuple[Message, ...] = ()
    """The messages that are new since the turn continued (all of them on a branch), normalised."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The tools offered; empty when they are those of the turn continued."""
    approximation: str = ""
    """What was overlooked to continue a turn, one of `APPROXIMATIONS`, or to continue one before it, whose
    tokens the prompt holds as well; empty when the prompt says what the request says."""
    control_texts: int = 0
    """Texts that were kept from being control tokens: messages of ``request`` and ``tools`` that hold a name, and names
    that a text would have completed."""
    place: Place = field(repr=False, compare=False)
    """Where the reply belongs; for `Conversation.accept`."""
    context: Context = field(default=Context(), repr=False, compare=False)
    """What the reply answers; for `Conversation.accept`."""
    callable_tools: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    """The tools whose calls are read from the reply."""
    heard: tuple[list[Message], list[Mapping[str, Any]]] | None = field(default=None, repr=False, compare=False)
    """The whole request and its tools, where later ones may be matched by text."""


class ChatCodec:
    """One per tokenizer and chat template; shared by all episodes and threads."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        disable_tool_calls: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        merge_level: Literal["exact", "text"] = "exact",
        end_token_ids: Sequence[int] = (),
        plugins: PluginManager | None = None,
    ) -> None:
        """Probe the chat template.

        :param tokenizer: a Hugging Face tokenizer.
        :param chat_template: the Jinja text to use instead of the tokenizer's own.
        :param disable_tool_calls: offer no tools and read no tool calls, whatever is asked for.
        :param chat_template_kwargs: variables for the chat template, e.g. ``{"enable_thinking": False}``.
        :param merge_level: ``text`` lets a request that continues nothing exactly continue a turn whose messages read
            the same; what was overlooked is reported.
        :param end_token_ids: End tokens of the model, in addition to those of the template and the tokenizer. They end
            a reply and are not part of its text.
        :param plugins: those whose chat families are known; None: whatever is installed here.
        :raises astuner.contracts.errors.ConfigError: there is no chat template, it is of no family that ASTuner reads,
            or it has no such variables.
        :raises astuner.contracts.errors.MissingDependency: nothing that is on brings the merge level ``text``.
        """
        self.template = ChatTemplate(
            tokenizer, chat_template, chat_template_kwargs=chat_template_kwargs, plugins=plugins
        )
        self.tool_names = ToolNames(self.template)
        self.disable_tool_calls = disable_tool_calls
        self.merge_level = merge_level
        self.looser: type[LooserHistoryPart] | None = None
        if merge_level == "text":
            wanted = "astuner.rollout.merge_level: text"
            self.looser = registry.find_part(plugins or load_plugins(), "looser_history", wanted_by=wanted)
        ends = (*self.template.stop_token_ids, self.template.eos_token_id, *end_token_ids)
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(i for i in ends if i is not None))
        """End-of-turn tokens, for `SamplingParams.stop_token_ids`."""

    def conversation(self) -> Conversation:
        """The state of one agent in one episode."""
        return Conversation(self)


class Conversation:
    """What one agent has said in one episode. Not for several threads at once."""

    def __init__(self, codec: ChatCodec) -> None:
        self._codec = codec
        self._history = History()
        self._relaxed = codec.looser() if codec.looser else None

    def encode(self, messages: Sequence[Message], tools: Any = None, *, callable_tools: Any = None) -> EncodedPrompt:
        """`encode_within`, of whatever length, for who has no event loop."""
        try:
            self.encode_within(None, messages, tools, callable_tools=callable_tools).send(None)
        except StopIteration as e:
            encoded: EncodedPrompt = e.value
            return encoded
        raise AssertionError("without a limit it waits for nothing")

    async def encode_within(
        self,
        most: int | None,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        callable_tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> EncodedPrompt:
        """The token ids that ask the model to answer ``messages``. A thread makes them of what is long.

        :param most: the engine's context. None: anything is encoded, and here.
        :param tools: OpenAI-style tool descriptions.
        :param callable_tools: those whose calls are read from the reply; all by default, none with
            ``tool_choice="none"``. The prompt is the same.
        :raises astuner.contracts.errors.ContextOverflow: something long has more tokens, as its beginning shows.
        :raises UnsupportedRequest: a message cannot be rendered, or a tool's name cannot be read from a reply.
        :raises astuner.contracts.errors.ConfigError: tools are given, and the chat template has no place for them.
        """
        if not messages:
            raise UnsupportedRequest("'messages' is empty; send at least one message")
        try:
            return await self._encoded(most, messages, tools, callable_tools)
        except (UnsupportedRequest, TypeError, AttributeError) as e:  # the latter two: a message of another shape
            refusal = refused_message(messages)
            if refusal is None:
                raise
            raise refusal from e

    async def _encoded(
        self,
        most: int | None,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        callable_tools: Sequence[Mapping[str, Any]] | None,
    ) -> EncodedPrompt:
        """`encode_within`, whose errors do not state which message they are about."""
        messages = [*messages] if {*map(type, messages)} == {dict} else [mapping_of(m) for m in messages]
        template = self._codec.template
        offered = [] if self._codec.disable_tool_calls else [mapping_of(t) for t in tools or ()]
        if offered and not template.renders_tools:
            raise ConfigError(
                f"the agent offers {len(offered)} tools, but the chat template ({template.format.name}) does not show "
                "them, or writes calls in a way that ASTuner does not read; write chat_template: hermes (for ChatML) "
                "or a Jinja file that does as astuner.model.chat_template, or astuner.rollout.disable_tool_calls: true"
            )
        root, offered = self._history.root(offered)
        place = self._history.find(root, messages)
        said, new_from, overlooked = place.said, place.new_from, ""
        if self._relaxed and any(role_of(m) == "assistant" for m in messages[new_from:]):
            await self._aside(most, [normalise(m) for m in messages[new_from:]], lambda: None)
            found = self._relaxed.find(messages, offered)
            if found is not None and found.new_from > new_from:
                said, new_from, overlooked = found
        readable = tuple(offered if callable_tools is None or not offered else map(mapping_of, callable_tools))
        self._codec.tool_names.check(readable)
        heard = (messages, offered) if self._relaxed else None
        encoded = partial(EncodedPrompt, place=place, callable_tools=readable, heard=heard)
        if said is not None:
            new = tuple(normalise(m) for m in messages[new_from:])
            context = self._context(said, new)
            system = role_of(messages[0]) == "system"
            added = await self._aside(most, new, lambda: self._continuation(said, context, system=system))
            if added is not None:
                return encoded(
                    prompt_ids=[*said.generation.prompt_ids, *said.generation.response_ids, *added.ids],
                    continues=said.turn,
                    approximation=gravest([overlooked, said.approximation]),
                    request=new,
                    control_texts=template.count_control(added, new),
                    tools=tuple(offered) if overlooked == "tools" else (),
                    context=context,
                )
        whole = tuple(normalise(m) for m in messages)
        asked = await self._aside(most, (*whole, *offered), lambda: template.whole(whole, offered))
        return encoded(
            prompt_ids=asked.ids,
            continues=None,
            branch_reason="template_not_incremental" if said else branch_reason(self._history, root, place, messages),
            request=whole,
            control_texts=template.count_control(asked, whole, offered),
            tools=tuple(offered),
            context=Context(None, whole, offered, template.outlines.extend(template.outlines.begin(offered), whole)),
        )

    def _context(self, said: Said, new: Sequence[Message]) -> Context:
        """Return the conversation in which ``new`` (normalised) follow a recorded reply."""
        before = said.context
        structure = self._codec.template.outlines.extend(before.structure, [said.message, *new])
        return Context(said, new, before.tools, structure)

    async def _aside(self, most: int | None, messages: Sequence[Message], work: Callable[[], Any]) -> Any:
        """What ``work`` makes of ``messages`` (normalised) and tools; of long ones in a thread, if they may fit."""
        if most is None:
            return work()
        long = any(len(m.get("content", "")) > LONG for m in messages)
        if not long and (plain := packed(messages)) is not None and len(plain) <= LONG:
            return work()
        return await in_daemon_thread(self._codec.template.if_it_fits, most, messages, work)

    def _continuation(self, said: Said, context: Context, *, system: bool) -> Encoded | None:
        """Return what the template writes after a recorded reply in ``context``; None if that starts a branch."""
        template, spoken = self._codec.template, said.generation.response_ids
        if not template.continues(context.request, system=system, tools=bool(context.tools)):
            return None
        return template.follow(said.context, said.message, context, last=spoken[-1] if spoken else None)

    def accept(
        self,
        encoded: EncodedPrompt,
        generation: Generation,
        turn_index: int,
        *,
        stop: str | None = None,
        structured_tool: str = "",
        no_other_call: bool = False,
    ) -> dict[str, Any]:
        """Record the reply to ``encoded`` and return it as an OpenAI-style assistant message.

        ``content`` is always a string; ``reasoning_content``, ``tool_calls`` and ``unparsed_tool_calls`` (the raw
        texts of calls that cannot be read, which also stay in the content or the reasoning) are there only when not
        empty. Tool-call ids are unique in the episode.

        :param generation: what the engine made of ``encoded.prompt_ids``.
        :param turn_index: unique in the episode.
        :param stop: the caller's stop string in the generation's text; the message ends before it.
        :param structured_tool: a call of this tool stands for an answer: its arguments become the content.
        :param no_other_call: calls of other tools are text.
        """
        template = self._codec.template
        spoken = generation.response_ids
        if spoken and spoken[-1] in self._codec.stop_token_ids:
            spoken = spoken[:-1]
        text = template.decode(spoken)
        if stop is not None:
            text = text.partition(stop)[0]
        reply = template.read(text, encoded.callable_tools, prompt_ids=encoded.prompt_ids)
        message = assistant_message(reply, id_prefix=f"call_{turn_index}_")
        if structured_tool:
            message = _answer_of(message, structured_tool)
            if no_other_call and message.get("tool_calls"):
                reply = template.read(text, (), prompt_ids=encoded.prompt_ids)
                message = assistant_message(reply, id_prefix=f"call_{turn_index}_")
        said = Said(turn_index, generation, message, encoded.approximation, encoded.context)
        self._history.add(encoded.place, said, text=text)
        if self._relaxed and encoded.heard:
            self._relaxed.add(*encoded.heard, said, text=text)
        return message


def _answer_of(message: dict[str, Any], tool: str) -> dict[str, Any]:
    """``message`` with the arguments of its first call of ``tool`` as its content, instead of all calls."""
    for call in message.get("tool_calls", ()):
        if call["function"]["name"] == tool:
            kept = {name: value for name, value in message.items() if name != "tool_calls"}
            return {**kept, "content": call["function"]["arguments"]}
    return message
