"""The scripted model: an engine that says what a scenario tells it, and a codec that keeps what it was asked.

An engine sees token ids only; what the scripted one says depends on the tools of the request, which the codec heard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from astuner.chat.codec import ChatCodec, Conversation, EncodedPrompt
from astuner.contracts.backbone import InferenceEngine
from astuner.contracts.chat_family import Tools
from astuner.contracts.errors import TurnLimitReached
from astuner.contracts.messages import Message, mapping_of, normalise
from astuner.contracts.types import Generation, SamplingParams
from astuner_record.token_check.scenarios import Scenario
from astuner_record.token_check.writing import write_move

LOGPROB = -0.5
CONTEXT = 1 << 24
"""Tokens; the check is not about lengths."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request as it came, what the codec made of it, and the reply."""

    messages: tuple[Mapping[str, Any], ...]
    """All of them, normalised."""
    tools: tuple[Mapping[str, Any], ...]
    encoded: EncodedPrompt
    turn: int
    reply: Mapping[str, Any]
    text: str
    """The whole reply, as the model wrote it."""


@dataclass
class Ear:
    """Hears what is asked, in the order of the answers."""

    asked: list[Asked] = field(default_factory=list)
    offered: dict[tuple[int, ...], Tools] = field(default_factory=dict)
    """Prompt -> the tools of the request that it was made of."""


class ListeningCodec(ChatCodec):
    """The codec of an experiment, unchanged but for an ear at every conversation."""

    def __init__(self, codec: ChatCodec, ear: Ear) -> None:
        vars(self).update(vars(codec))
        self._ear = ear

    def conversation(self) -> Conversation:
        return ListeningConversation(self, self._ear)


class ListeningConversation(Conversation):
    """Tells what it is asked and what is answered."""

    def __init__(self, codec: ChatCodec, ear: Ear) -> None:
        super().__init__(codec)
        self._ear = ear
        self._requests: dict[int, tuple[EncodedPrompt, list[dict[str, Any]], list[Mapping[str, Any]]]] = {}
        """By the identity of the prompt, which is kept with it so that no other takes it over."""

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        callable_tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> EncodedPrompt:
        encoded = super().encode(messages, tools, callable_tools=callable_tools)
        offered = [] if self._codec.disable_tool_calls else list(deepcopy(tools or ()))
        self._ear.offered[tuple(encoded.prompt_ids)] = encoded.callable_tools
        self._requests[id(encoded)] = encoded, [normalise(mapping_of(m)) for m in messages], offered
        return encoded

    def accept(
        self,
        encoded: EncodedPrompt,
        generation: Generation,
        turn_index: int,
        **how: Any,
    ) -> dict[str, Any]:
        message = super().accept(encoded, generation, turn_index, **how)
        _, messages, tools = self._requests.pop(id(encoded))
        ends = self._codec.stop_token_ids
        text = self._codec.template.decode([token for token in generation.response_ids if token not in ends])
        self._ear.asked.append(
            Asked(
                messages=tuple(messages), tools=tuple(tools), encoded=encoded, turn=turn_index, reply=message, text=text
            )
        )
        return message


class ScriptedEngine(InferenceEngine):
    """Says what ``scenario`` tells it, to every agent of an episode."""

    max_model_len = CONTEXT

    def __init__(self, codec: ChatCodec, ear: Ear, scenario: Scenario, *, most: int) -> None:
        """:param most: replies in all; the next one ends the episode as truncated."""
        self._codec, self._ear, self._scenario, self._most = codec, ear, scenario, most
        self._said: Counter[str] = Counter()
        self.notes: dict[str, None] = {}
        """What could not be said as the scenario wants it, each once."""

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, session: str = "") -> Generation:
        """:raises TurnLimitReached: everything was said that the check allows."""
        if self._said.total() >= self._most:
            raise TurnLimitReached(f"the check ends after {self._most} replies")
        number = self._said[session]
        self._said[session] += 1
        tools = self._ear.offered[tuple(prompt_ids)]
        written = write_move(self._codec.template, self._scenario.move(number), tools, number, prompt_ids)
        if written.note:
            self.notes[written.note] = None
        return Generation(
            prompt_ids=tuple(prompt_ids),
            response_ids=written.ids,
            logprobs=(LOGPROB,) * len(written.ids),
            finish_reason=written.finish_reason,
            policy_version=0,
        )
