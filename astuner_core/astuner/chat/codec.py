"""Convert requests to token IDs, and token IDs to replies.

History is never tokenized again. The messages of a request lead to the last turn that it continues (`history`). The
prompt consists of that turn's recorded prompt and response IDs, followed by the IDs of the text that the chat template
writes for later messages (`template`). The cost of a turn depends only on its new part, and its prompt starts exactly
with the tokens that the engine saw and generated before. A request that continues no turn is rendered completely and
has a branch reason.

Invariant: if ``continues`` is k, ``prompt_ids`` starts with turn k's prompt IDs and response IDs. An end-of-turn token
that the model did not write is part of the prompt, never of a response.
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
    """A request as token IDs, with its place among the turns of its agent."""

    prompt_ids: list[int]
    continues: int | None
    """The recorded turn whose prompt and response IDs ``prompt_ids`` starts with; None for a new branch."""
    branch_reason: str = ""
    """One of `BRANCH_REASONS`; empty for a first turn or a continuation."""
    request: tuple[Message, ...] = ()
    """Messages added since the continued turn (all messages on a branch), normalized."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Offered tools; empty if they equal the tools of the continued turn."""
    approximation: str = ""
    """Difference that was ignored to continue a turn, one of `APPROXIMATIONS`, on the complete path of continued
    turns. Empty if the prompt matches the request exactly."""
    control_texts: int = 0
    """Number of texts that were prevented from becoming control tokens: messages and tools that contain a name of one,
    and names that a text would have completed."""
    place: Place = field(repr=False, compare=False)
    """Position of the reply in the history, for `Conversation.accept`."""
    context: Context = field(default=Context(), repr=False, compare=False)
    """The conversation up to the reply, for `Conversation.accept`."""
    callable_tools: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    """Tools whose calls are parsed in the reply."""
    heard: tuple[list[Message], list[Mapping[str, Any]]] | None = field(default=None, repr=False, compare=False)
    """The complete request and its tools, if later ones may be matched by text."""


class ChatCodec:
    """Codec of one tokenizer and chat template; shared by all episodes and threads."""

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

        :param tokenizer: Hugging Face tokenizer.
        :param chat_template: Jinja text that replaces the tokenizer's template.
        :param disable_tool_calls: Offer no tools and parse no tool calls.
        :param chat_template_kwargs: Variables of the chat template, for example ``{"enable_thinking": False}``.
        :param merge_level: ``text`` lets a request that continues nothing exactly continue a turn with equal messages;
            the ignored difference is reported.
        :param end_token_ids: End tokens of the model, in addition to the tokens of template and tokenizer. They end
            a reply and are not part of its text.
        :param plugins: Plugins with chat families; None for the installed ones.
        :raises astuner.contracts.errors.ConfigError: There is no chat template, its family is not supported, or it has
            no such variables.
        :raises astuner.contracts.errors.MissingDependency: No active plugin provides the merge level ``text``.
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
        """Return the state of one agent in one episode."""
        return Conversation(self)


class Conversation:
    """The recorded replies of one agent in one episode. Not thread-safe."""

    def __init__(self, codec: ChatCodec) -> None:
        self._codec = codec
        self._history = History()
        self._relaxed = codec.looser() if codec.looser else None

    def encode(self, messages: Sequence[Message], tools: Any = None, *, callable_tools: Any = None) -> EncodedPrompt:
        """Call `encode_within` without a length limit and without an event loop."""
        try:
            self.encode_within(None, messages, tools, callable_tools=callable_tools).send(None)
        except StopIteration as e:
            encoded: EncodedPrompt = e.value
            return encoded
        raise AssertionError("without a limit it never awaits")

    async def encode_within(
        self,
        most: int | None,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        callable_tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> EncodedPrompt:
        """Return the token IDs that ask the model to answer ``messages``. Long texts are encoded in a thread.

        :param most: Context length of the engine. None: encode any length, in this thread.
        :param tools: OpenAI-style tool descriptions.
        :param callable_tools: Tools whose calls are parsed in the reply; all by default, none with
            ``tool_choice="none"``. The prompt is the same.
        :raises astuner.contracts.errors.ContextOverflow: The start of a long text already has more tokens.
        :raises UnsupportedRequest: A message cannot be rendered, or a tool's name cannot be parsed in a reply.
        :raises astuner.contracts.errors.ConfigError: The request has tools, but the chat template does not support
            them.
        """
        if not messages:
            raise UnsupportedRequest("'messages' is empty; send at least one message")
        try:
            return await self._encoded(most, messages, tools, callable_tools)
        except (UnsupportedRequest, TypeError, AttributeError) as e:  # the last two: a message of another form
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
        """Implement `encode_within`; errors do not name the message."""
        messages = [*messages] if {*map(type, messages)} == {dict} else [mapping_of(m) for m in messages]
        template = self._codec.template
        offered = [] if self._codec.disable_tool_calls else [mapping_of(t) for t in tools or ()]
        if offered and not template.renders_tools:
            raise ConfigError(
                f"the agent offers {len(offered)} tools, but the chat template ({template.format.name}) does not show "
                "them, or writes calls in a format that ASTuner cannot parse. Set astuner.model.chat_template to "
                "hermes (for ChatML) or a Jinja file with tool calls, or set astuner.rollout.disable_tool_calls: true"
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
        """Return the conversation in which ``new`` (normalized) follows a recorded reply."""
        before = said.context
        structure = self._codec.template.outlines.extend(before.structure, [said.message, *new])
        return Context(said, new, before.tools, structure)

    async def _aside(self, most: int | None, messages: Sequence[Message], work: Callable[[], Any]) -> Any:
        """Run ``work`` on ``messages`` (normalized) and tools; for long texts in a thread, after a length check."""
        if most is None:
            return work()
        long = any(len(m.get("content", "")) > LONG for m in messages)
        if not long and (plain := packed(messages)) is not None and len(plain) <= LONG:
            return work()
        return await in_daemon_thread(self._codec.template.if_it_fits, most, messages, work)

    def _continuation(self, said: Said, context: Context, *, system: bool) -> Encoded | None:
        """Return the template's text after a recorded reply in ``context``; None if it starts a branch."""
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

        ``content`` is always a string. ``reasoning_content``, ``tool_calls`` and ``unparsed_tool_calls`` are present
        only if they are not empty. ``unparsed_tool_calls`` has the raw texts of calls that cannot be parsed, which also
        remain in the content or the reasoning. Tool-call IDs are unique in the episode.

        :param generation: The engine's generation for ``encoded.prompt_ids``.
        :param turn_index: Index that is unique in the episode.
        :param stop: The caller's stop string in the generation's text; the message ends before it.
        :param structured_tool: Name of a tool whose call is an answer: its arguments become the content.
        :param no_other_call: Treat calls of other tools as text.
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
    """Return ``message`` with the arguments of its first call of ``tool`` as content, without tool calls."""
    for call in message.get("tool_calls", ()):
        if call["function"]["name"] == tool:
            kept = {name: value for name, value in message.items() if name != "tool_calls"}
            return {**kept, "content": call["function"]["arguments"]}
    return message
