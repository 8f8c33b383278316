"""Requests to token ids, token ids to replies.

History is never tokenised again.  A request's messages lead to the last turn it continues (`history`); the prompt
is that turn's recorded prompt and response ids, followed by the ids of what the chat template writes for the
messages behind it (`template`).  So a turn costs what is new in it, and its prompt begins exactly with what the
engine saw and made before.  A request that continues no turn is rendered as a whole and says why (`branches`).

Invariant: if ``continues`` is k, ``prompt_ids`` begins with turn k's prompt ids and response ids.  An end-of-turn
token that the model did not write is part of the prompt, never of a response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from astuner.chat.branches import branch_reason
from astuner.chat.errors import UnsupportedRequest
from astuner.chat.history import History, Place, Said
from astuner.chat.messages import Message, normalise
from astuner.chat.reply import assistant_message
from astuner.chat.template import ChatTemplate
from astuner.errors import ConfigError
from astuner.types import Generation


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
    """What was overlooked to continue a turn; empty unless `merge_level` is ``text``."""
    place: Place = field(repr=False, compare=False)
    """Where the reply belongs; for `Conversation.accept`."""
    reads_tools: bool = field(default=False, repr=False)
    """Whether tool calls are read from the reply."""


class ChatCodec:
    """One per tokenizer and chat template; shared by all episodes and threads."""

    def __init__(self, tokenizer: Any, *, chat_template: str | None = None, disable_tool_calls: bool = False) -> None:
        """Probe the chat template.

        :param tokenizer: a Hugging Face tokenizer.
        :param chat_template: the Jinja text to use instead of the tokenizer's own.
        :param disable_tool_calls: offer no tools and read no tool calls, whatever is asked for.
        :raises astuner.errors.ConfigError: there is no chat template, or it is of no family that ASTuner reads.
        """
        self.template = ChatTemplate(tokenizer, chat_template)
        self.disable_tool_calls = disable_tool_calls
        ends = (self.template.end_of_turn_id, self.template.eos_token_id)
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

    def encode(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, *, read_tools: bool = True
    ) -> EncodedPrompt:
        """The token ids that ask the model to answer ``messages``.

        :param tools: OpenAI-style tool descriptions.
        :param read_tools: False reads no tool calls from the reply (``tool_choice="none"``); the prompt is the same.
        :raises UnsupportedRequest: a message cannot be rendered.
        :raises astuner.errors.ConfigError: tools are given, and the chat template has no place for them.
        """
        if not messages:
            raise UnsupportedRequest("'messages' is empty; send at least one message")
        template = self._codec.template
        offered = [] if self._codec.disable_tool_calls else list(tools or ())
        if offered and not template.renders_tools:
            raise ConfigError(
                f"the agent offers {len(offered)} tools, but the chat template does not show tools, or writes calls in "
                f"another way than {template.format.name}; set astuner.model.chat_template to a Jinja file that does, "
                f"or astuner.rollout.disable_tool_calls: true"
            )
        root = self._history.root(offered)
        place = self._history.find(root, messages)
        said = place.said
        if said is not None and template.incremental:
            new = tuple(normalise(m) for m in messages[place.new_from :])
            recorded = said.generation
            ended = bool(recorded.response_ids) and recorded.response_ids[-1] == template.end_of_turn_id
            return EncodedPrompt(
                prompt_ids=[
                    *recorded.prompt_ids,
                    *recorded.response_ids,
                    *template.continuation_ids(new, ended=ended),
                ],
                continues=said.turn,
                request=new,
                place=place,
                reads_tools=bool(offered) and read_tools,
            )
        whole = tuple(normalise(m) for m in messages)
        return EncodedPrompt(
            prompt_ids=template.whole_ids(whole, offered),
            continues=None,
            branch_reason="template_not_incremental" if said else branch_reason(self._history, root, place, messages),
            request=whole,
            tools=tuple(offered),
            place=place,
            reads_tools=bool(offered) and read_tools,
        )

    def accept(
        self,
        encoded: EncodedPrompt,
        generation: Generation,
        turn_index: int,
        *,
        stop: str | None = None,
        structured_tool: str = "",
    ) -> dict[str, Any]:
        """Record the reply to ``encoded`` and return it as an OpenAI-style assistant message.

        ``content`` is always a string; ``reasoning_content``, ``tool_calls`` and ``unparsed_tool_calls`` (the raw
        texts of calls that cannot be read, which also stay in the content) are there only when not empty.
        Tool-call ids are unique in the episode.

        :param generation: what the engine made of ``encoded.prompt_ids``.
        :param turn_index: unique in the episode.
        :param stop: the caller's stop string in the generation's text; the message ends before it.
        :param structured_tool: a call of this tool stands for an answer: its arguments become the content.
        """
        template = self._codec.template
        spoken = generation.response_ids
        if spoken and spoken[-1] in self._codec.stop_token_ids:
            spoken = spoken[:-1]
        text = template.decode(spoken)
        if stop is not None:
            text = text.partition(stop)[0]
        message = assistant_message(
            text,
            template.format,
            id_prefix=f"call_{turn_index}_",
            tools=encoded.reads_tools,
            reasoning=template.reasons,
            thinking=template.thinking,
        )
        if structured_tool:
            message = _answer_of(message, structured_tool)
        self._history.add(encoded.place, Said(turn_index, generation, message), text=text)
        return message


def _answer_of(message: dict[str, Any], tool: str) -> dict[str, Any]:
    """``message`` with the arguments of its first call of ``tool`` as its content, instead of all calls."""
    for call in message.get("tool_calls", ()):
        if call["function"]["name"] == tool:
            kept = {name: value for name, value in message.items() if name != "tool_calls"}
            return {**kept, "content": call["function"]["arguments"]}
    return message
