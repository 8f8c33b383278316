"""The checks of an experiment: from names to one question, asked of every reply.

Names are resolved as a judge's is: a registered name, ``plugin/name``, or ``module->function`` of the user's own.
Invariant: a check either answers or the episode ends as `JudgeFailed`; a broken check is never taken for silence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from astuner.contracts.errors import AmbiguousName, ConfigError, JudgeFailed, PluginError, UnknownName
from astuner.contracts.output_check import Check, OutputView
from astuner.plugins import registry
from astuner.plugins.loader import load_plugins

if TYPE_CHECKING:
    from astuner.config import Config

KIND = "output check"
KEY = "astuner.rollout.compute_madness_checklist"


class OutputChecks:
    """The checks that an experiment asks for, in order."""

    def __init__(self, names: Sequence[str], resolve: Callable[[str], Any] | None = None) -> None:
        """:param names: as `rollout.compute_madness_checklist` lists them.
        :param resolve: from a name to what it stands for; by default what is installed, without files of the user's.
        :raises ConfigError: a name that stands for nothing; says what is close.
        :raises astuner.contracts.errors.PluginError: what it stands for cannot be imported, or is not a check.
        """
        self._checks = [(name, _check(name, resolve or _installed)) for name in names]

    @classmethod
    def build(cls, config: Config) -> OutputChecks:
        """The checks of ``config``, the user's own code relative to the experiment file; raises as the constructor.

        Those that are on by default are left out where the package that brings them is not.
        """

        def resolve(name: str) -> Any:
            return config.resolve(KIND, name)

        names = config.astuner.rollout.compute_madness_checklist
        if KEY not in config.written:
            offered = {name for _, name, _ in config.plugins.offers(KIND)}
            names = [name for name in names if name in offered]
        return cls(names, resolve)

    def check(
        self,
        message: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        cut_off: bool = False,
    ) -> str | None:
        """The first complaint about ``message``, or None.

        :param message: an OpenAI-style assistant message.
        :param tools: OpenAI-style descriptions of the tools that were offered for it; None when that is not known.
        :param cut_off: something else than the model ended the reply: the limit of tokens, or the caller's stop string.
        :raises astuner.contracts.errors.JudgeFailed: a check raised, or returned something else than text or None.
        """
        view = OutputView(message, tools, cut_off)
        for name, check in self._checks:
            try:
                complaint = check(view)
            except Exception as e:  # a stranger's check may raise anything; the episode ends, and says why
                raise JudgeFailed(f"the output check {name!r} raised {type(e).__name__}: {e}") from e
            if complaint is not None and not isinstance(complaint, str):
                raise JudgeFailed(f"the output check {name!r} returned {complaint!r}; it must be a text or None")
            if complaint:
                return complaint
        return None


def _check(name: str, resolve: Callable[[str], Any]) -> Check:
    try:
        found = resolve(name)
    except (UnknownName, AmbiguousName) as e:
        raise ConfigError(f"{KEY}: {e}") from e
    if not callable(found) or isinstance(found, type) or inspect.iscoroutinefunction(found):
        raise PluginError(
            f"{KEY}: {name!r} is {found!r}; a check is a plain function of one OutputView that returns a text or None"
        )
    check: Check = found
    return check


def _installed(name: str) -> Any:
    return registry.resolve(load_plugins(), KIND, name)
