"""What happens around each model call of a fork: where it stops, and what the person is shown and asked.

`watch` puts itself between a workflow and its model, whichever way the workflow asks.  The first half runs on the
caller's stack, so that `up` in a debugger leads to the workflow; also where the workflow is a plain function in a
thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from astuner.contracts.messages import ChatReply
from astuner.rollout.model_tuner import ModelTuner
from astuner_record.replay.recording import Recording

BY_HAND = "stopped by hand"
QUESTION = "[Enter] next  [b] breakpoint  [c] go on  [q] quit > "


class Talk(Protocol):
    """How to speak with a person."""

    def say(self, text: str) -> None:
        """Show a line."""

    def ask(self, question: str) -> str:
        """What the person types.

        :raises EOFError: nobody is there any more.
        """


class Terminal:
    """The person at this terminal."""

    def say(self, text: str) -> None:
        print(text, flush=True)

    def ask(self, question: str) -> str:
        return input(question)


@dataclass(kw_only=True)
class Stepping:
    """What the person wants to see of one fork."""

    recording: Recording
    step: bool = False
    """Show every model call, and ask before it."""
    break_at: int | None = None
    """The turn before which `breakpoint()` is called."""
    talk: Talk = field(default_factory=Terminal)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """One question at a time; agents may ask in threads of their own."""
    _seen: dict[str, int] = field(default_factory=dict)
    """Agent -> how many messages its last request had."""

    def watch(self, tuner: ModelTuner) -> None:
        """Be told of every model call of an episode."""
        chat: Callable[..., Coroutine[Any, Any, ChatReply]] = tuner.chat

        def watched(
            messages: Sequence[Mapping[str, Any]], tools: Any = None, **options: Any
        ) -> Coroutine[Any, Any, ChatReply]:
            agent = str(options.get("agent_name") or tuner.agent_name)
            self._before(agent, messages)
            return self._answered(agent, len(messages), chat(messages, tools, **options))

        setattr(tuner, "chat", watched)  # noqa: B010  # mypy takes no assignment to a method

    def _before(self, agent: str, messages: Sequence[Mapping[str, Any]]) -> None:
        turn = self.recording.next_turn
        stop = turn == self.break_at
        if self.step and not self.recording.stopped:
            with self._lock:
                stop = self._show_and_ask(agent, turn, messages) or stop
        if stop:
            self.break_at = None
            self.talk.say(f"before turn {turn} of {agent}: type up until you are in the workflow, and c to go on")
            breakpoint()  # what was asked for; PYTHONBREAKPOINT chooses another debugger

    def _show_and_ask(self, agent: str, turn: int, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the person wants a breakpoint."""
        expected = self.recording.expected(agent)
        answers = f"recorded turn {expected} answers" if expected is not None else "the model answers"
        self.talk.say(f"── turn {turn} of {agent}: {answers}")
        for message in messages[self._seen.get(agent, 0) :]:
            if message.get("role") != "assistant" or agent not in self._seen:
                self.talk.say(f"   {message.get('role', '?'):<9} {content_of(message)}")
        while True:
            try:
                typed = self.talk.ask(QUESTION).strip().lower()
            except EOFError:
                typed = "q"
            if typed in ("", "n"):
                return False
            if typed == "b":
                return True
            if typed == "c":
                self.step = False
                return False
            if typed == "q":
                self.recording.stop(BY_HAND)
                return False

    async def _answered(self, agent: str, messages: int, call: Coroutine[Any, Any, ChatReply]) -> ChatReply:
        reply = await call
        self._seen[agent] = messages
        self.recording.next_turn = max(self.recording.next_turn, reply.turn_index + 1)
        if self.step:
            recorded = self.recording.sources.get(agent)
            by = f"recorded turn {recorded}" if recorded is not None else "new"
            self.talk.say(f" ▶ {agent:<9} {content_of(reply.message)}   [{by}, {reply.completion_tokens} tokens]")
        return reply


def content_of(message: Mapping[str, Any]) -> str:
    """A message in one paragraph: its text, and its tool calls."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = " ".join(str(part.get("text", f"<{part.get('type')}>")) for part in content)
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return " ".join([content, *(f"{call['name']}({call['arguments']})" for call in calls)]).strip()
