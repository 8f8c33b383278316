"""Every error ASTuner raises on purpose; each message says what, where and what to type next.

Packages have a few of their own below these: `BudgetSpent`, a `ConfigError`, and `HelperFailed` in `astuner_helpers`;
`SandboxFailed`, an `EnvironmentFailed`, in `astuner_sandbox`, and `ZygoteFailed`, `ForkFailed` and `NotConfined` in its
`isolation`.  The command line prints an ``AstunerError`` as one paragraph without a traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from astuner.contracts.interrupt import let_the_person_stop
from astuner.contracts.secrets import without_secrets

if TYPE_CHECKING:
    from astuner.contracts.types import Turn


class AstunerError(Exception):
    """Base of all errors ASTuner raises on purpose; no secret is in its message."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*(without_secrets(arg) if isinstance(arg, str) else arg for arg in args))

    next_step: str = ""
    """What to type next, which ends the message; set where the command of the run is known."""

    def __str__(self) -> str:
        text = Exception.__str__(self)
        return f"{text.removesuffix('.')}; {self.next_step}" if self.next_step else text


class ConfigError(AstunerError):
    """The experiment file or an override is wrong; `problems` lists every mistake, in file order."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        given = (problems,) if isinstance(problems, str) else problems
        self.problems: tuple[str, ...] = tuple(map(without_secrets, given))
        super().__init__("\n".join(self.problems))


def problems_of(error: AstunerError) -> tuple[str, ...]:
    """The mistakes that an error tells of, one by one."""
    return error.problems if isinstance(error, ConfigError) else (str(error),)


class DataError(AstunerError):
    """A task cannot be read; the message names file and line."""


class PluginError(AstunerError):
    """A plugin cannot be loaded, or two of them claim the same thing."""


class UnknownName(PluginError, LookupError):
    """Nothing is registered under this name."""


class AmbiguousName(PluginError, LookupError):
    """Two plugins register the same name."""


class MissingDependency(PluginError, ImportError):
    """A provider needs a package that is not installed."""

    __str__ = PluginError.__str__  # ImportError's own goes by what it was made with, not by the args it has by now


class RunError(AstunerError):
    """The run cannot go on; what was finished is saved."""


class CheckpointError(RunError):
    """A checkpoint cannot be written, or the one on disk cannot be read."""


class Interrupted(RunError):
    """The person asked to stop; what was finished is saved."""


class EpisodeError(AstunerError):
    """One episode ended early. Caught in `astuner.rollout.runner` only."""


class PromptTooLong(EpisodeError):
    """A task's first prompt does not fit; says nothing about the policy, so it is never a reward."""


class ContextOverflow(EpisodeError):
    """The conversation no longer fits into the model's context; the episode is judged as it stands."""


class TurnLimitReached(EpisodeError):
    """An agent has used its `rollout.multi_turn.max_steps` model calls; the episode is judged as it stands."""


class EpisodeAborted(EpisodeError):
    """A check on the model's output stopped the episode, or it is over already.

    `turn` is the reply that the check fired on, if one did.
    """

    def __init__(self, message: str, *, turn: Turn | None = None) -> None:
        super().__init__(message)
        self.turn = turn


class ModelFailed(EpisodeError):
    """The inference engine failed; says nothing about the policy, so it is never a reward."""


class EnvironmentFailed(EpisodeError):
    """The environment failed; says nothing about the policy, so it is never a reward."""


class JudgeFailed(EpisodeError):
    """The judge raised, took too long, or returned no finite reward; or a check on the model's output broke."""


class UnsupportedRequest(EpisodeError, ValueError):
    """A request to the model holds something that is not turned into tokens; the message names the field."""


LONGEST_TEXT = 10_000
"""Characters of what user code says or returned that are told; behind them it says how many there are."""


def safe_text(value: Any, spell: Callable[[Any], str] = str) -> str:
    """``str(value)``, short enough to be told, as is a sentence around it; making it may raise anything."""
    try:
        text = without_secrets(str.__str__(spell(value)))
    except BaseException as e:
        let_the_person_stop(e)
        return f"<{type(value).__name__}, whose text cannot be made: {type(e).__name__}>"
    return text if len(text) <= 2 * LONGEST_TEXT else f"{text[:LONGEST_TEXT]}… ({len(text):,} characters)"


shown = partial(safe_text, spell=repr)


def told(error: BaseException) -> str:
    """``Kind: message`` of what user code raised, as `safe_text`, in one line that can be printed."""
    lines = f"{type(error).__name__}: {safe_text(error)}".splitlines()
    said = "; ".join(line.strip() for line in lines if line.strip())
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in said).removesuffix(":")


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """``"; did you mean X?"``, the end of a message; ``otherwise`` where nothing known is close."""
    close = difflib.get_close_matches(word, [name for name in known if not name.startswith("_")], n=1)
    return f"; did you mean {close[0]}?" if close else otherwise
