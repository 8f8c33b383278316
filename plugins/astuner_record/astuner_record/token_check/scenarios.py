"""What the scripted model says: a few ways in which models answer, each a short list of replies.

A scenario is about the model's side only: whatever the agent does with the replies is the agent's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from astuner_record.token_check.arguments import AWKWARD, PLAIN

THOUGHT = "Let me think: 2 + 2 is 4."
ANSWER = "The answer is \\boxed{4}."


@dataclass(frozen=True, kw_only=True)
class Move:
    """One reply."""

    text: str = ""
    calls: int = 0
    """How many of the offered tools it calls."""
    arguments: str = PLAIN
    """What the text arguments of the calls say."""
    spelling: str = "compact"
    """How the arguments are written, of `arguments.SPELLINGS`, in families that write them as JSON."""
    thought: str = ""
    """Its reasoning, in families that mark it."""
    end: Literal["stop", "cut", "broken"] = "stop"
    """``cut``: a length limit ends it in the middle; ``broken``: its last call cannot be read."""


DONE = Move(text=ANSWER)
"""What is said once a scenario is over, as often as it is asked."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Replies of one agent, in order; then `DONE`."""

    name: str
    summary: str
    moves: tuple[Move, ...]

    @property
    def needs_tools(self) -> bool:
        return any(move.calls for move in self.moves)

    @property
    def needs_reasoning(self) -> bool:
        return any(move.thought for move in self.moves)

    def move(self, number: int) -> Move:
        """The ``number``-th reply, from 0."""
        return self.moves[number] if number < len(self.moves) else DONE


def _all(*scenarios: Scenario) -> dict[str, Scenario]:
    return {scenario.name: scenario for scenario in scenarios}


SCENARIOS = _all(
    Scenario(name="text", summary="a plain answer", moves=(DONE,)),
    Scenario(name="whitespace", summary="an answer with white space around it", moves=(Move(text=f"\n  {ANSWER} \n"),)),
    Scenario(name="empty", summary="an answer without a word", moves=(Move(),)),
    Scenario(name="tool-call", summary="a call, its arguments as compact JSON", moves=(Move(calls=1),)),
    Scenario(
        name="tool-call-spaced",
        summary="a call, its arguments as JSON with line breaks",
        moves=(Move(calls=1, spelling="spaced"),),
    ),
    Scenario(
        name="tool-call-unicode",
        summary="a call with characters of all kinds",
        moves=(Move(calls=1, arguments=AWKWARD),),
    ),
    Scenario(
        name="tool-call-escaped",
        summary="the same call, everything but ASCII escaped",
        moves=(Move(calls=1, arguments=AWKWARD, spelling="escaped"),),
    ),
    Scenario(name="parallel-calls", summary="two calls in one reply", moves=(Move(calls=2),)),
    Scenario(name="text-and-call", summary="text beside a call", moves=(Move(text="Let me compute.", calls=1),)),
    Scenario(
        name="thinking",
        summary="a thought before a call and before the answer",
        moves=(Move(thought=THOUGHT, calls=1), Move(thought=THOUGHT, text=ANSWER)),
    ),
    Scenario(name="truncated", summary="an answer cut off by a length limit", moves=(Move(text=ANSWER, end="cut"),)),
    Scenario(name="truncated-call", summary="a call cut off by a length limit", moves=(Move(calls=1, end="cut"),)),
    Scenario(name="unreadable-call", summary="a call that is no valid call", moves=(Move(calls=1, end="broken"),)),
    Scenario(
        name="several-turns",
        summary="four calls, one after the other, with text and without",
        moves=(Move(calls=1), Move(text="Once more.", calls=1), Move(calls=1, spelling="spaced"), Move(calls=1)),
    ),
)
"""Every scenario by its name."""
