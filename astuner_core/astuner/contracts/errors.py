"""Errors that ASTuner raises. Each message describes the problem, its place and the next step.

Some packages define subclasses: `BudgetSpent` (a `ConfigError`) and `HelperFailed` in `astuner_helpers`;
`SandboxFailed` (an `EnvironmentFailed`) in `astuner_sandbox`; `ZygoteFailed`, `ForkFailed` and `NotConfined` in its
`isolation`. The command line prints an ``AstunerError`` without a traceback.
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
    """Base class of ASTuner's errors. Secrets are removed from its message."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*(without_secrets(arg) if isinstance(arg, str) else arg for arg in args))

    next_step: str = ""
    """Command to run next, appended to the message; set if the command of the run is known."""

    def __str__(self) -> str:
        text = Exception.__str__(self)
        return f"{text.removesuffix('.')}; {self.next_step}" if self.next_step else text

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython prints: the message without a traceback, like the command line."""
        return [f"{type(self).__name__}: {self}"]


class ConfigError(AstunerError):
    """The experiment file or an override is invalid; `problems` lists all errors in file order."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        given = (problems,) if isinstance(problems, str) else problems
        self.problems: tuple[str, ...] = tuple(map(without_secrets, given))
        super().__init__("\n".join(self.problems))


def problems_of(error: AstunerError) -> tuple[str, ...]:
    """Return the messages of an error: all of a `ConfigError`, otherwise one."""
    return error.problems if isinstance(error, ConfigError) else (str(error),)


class DataError(AstunerError):
    """A task cannot be read; the message contains the file and line."""


class PluginError(AstunerError):
    """A plugin cannot be loaded, or plugins conflict."""


class UnknownName(PluginError, LookupError):
    """A name is not registered."""


class AmbiguousName(PluginError, LookupError):
    """Several plugins register the same name."""


class MissingDependency(PluginError, ImportError):
    """A provider needs a package that is not installed."""

    __str__ = PluginError.__str__  # ImportError's __str__ ignores later changes of args


class RunError(AstunerError):
    """The run cannot continue; finished work is saved."""


class CheckpointError(RunError):
    """A checkpoint cannot be written or read."""


class Interrupted(RunError):
    """The user stopped the run; finished work is saved."""


class EpisodeError(AstunerError):
    """An episode ended early. Only `astuner.rollout.runner` catches it."""


class PromptTooLong(EpisodeError):
    """A task's first prompt does not fit. The policy did not cause it, so the episode has no reward."""


class ContextOverflow(EpisodeError):
    """The conversation exceeds the model's context; the episode is judged in its current state."""


class TurnLimitReached(EpisodeError):
    """An agent reached `rollout.multi_turn.max_steps` model calls; the episode is judged in its current state."""


class EpisodeAborted(EpisodeError):
    """A check of the model's output ended the episode, or the episode is already over.

    `turn` is the reply that failed the check, if any.
    """

    def __init__(self, message: str, *, turn: Turn | None = None) -> None:
        super().__init__(message)
        self.turn = turn


class ModelFailed(EpisodeError):
    """The inference engine failed. The policy did not cause it, so the episode has no reward."""


class EnvironmentFailed(EpisodeError):
    """The environment failed. The policy did not cause it, so the episode has no reward."""


class JudgeFailed(EpisodeError):
    """The judge raised, timed out or returned no finite reward; or an output check raised."""


class UnsupportedRequest(EpisodeError, ValueError):
    """A request to the model contains something unsupported; the message names the field."""


LONGEST_TEXT = 10_000
"""Maximum characters of user code's messages and values to print, followed by the full length."""


def safe_text(value: Any, spell: Callable[[Any], str] = str) -> str:
    """Return ``str(value)``, shortened and without secrets, even if the conversion raises."""
    try:
        text = without_secrets(str.__str__(spell(value)))
    except BaseException as e:
        let_the_person_stop(e)
        return f"<{type(value).__name__}, whose text cannot be made: {type(e).__name__}>"
    return text if len(text) <= 2 * LONGEST_TEXT else f"{text[:LONGEST_TEXT]}… ({len(text):,} characters)"


shown = partial(safe_text, spell=repr)


def told(error: BaseException) -> str:
    """Return ``Kind: message`` of an exception as one printable line; see `safe_text`."""
    lines = f"{type(error).__name__}: {safe_text(error)}".splitlines()
    said = "; ".join(line.strip() for line in lines if line.strip())
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in said).removesuffix(":")


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the end of a message, ``"; did you mean X?"``, or ``otherwise`` if no known name is similar."""
    close = difflib.get_close_matches(word, [name for name in known if not name.startswith("_")], n=1)
    return f"; did you mean {close[0]}?" if close else otherwise
