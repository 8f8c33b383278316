"""Provide the helper models of an experiment or a command by name, and report their usage.

Invariant: within a process, everything that names a helper model of an experiment shares one instance, so that its
`concurrency` applies.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astuner import debug_folder
from astuner.contracts.errors import ConfigError, did_you_mean
from astuner.contracts.events import Event, RunContext, Subscriber, Summary
from astuner.contracts.parts import HelperModelsPart
from astuner_helpers.helper import Helper
from astuner_helpers.ledger import Ledger, database
from astuner_helpers.reply import Usage
from astuner_helpers.settings import HelperModel, HelperModelKeys

if TYPE_CHECKING:
    from astuner import Config

Spelling = Callable[[str, str], str]
"""Map the name of a helper model and the name of a key to the key as users write it."""


class HelperModels(HelperModelsPart):
    """Helper models by name, each created on first use. Picklable; every process creates its own.

    :param scope: What budgets and usage are counted for: a run folder or a command's output folder.
    :param spelling: How messages spell a key.
    """

    kind: type[Helper] = Helper  # a subclass may monitor the helper models of a command

    def __init__(
        self, sections: Mapping[str, HelperModel], *, scope: str | Path, spelling: Spelling | None = None
    ) -> None:
        self._sections, self._spelling = dict(sections), spelling or _as_key
        self.scope = str(scope)
        self._lock = threading.Lock()
        self._helpers: dict[str, Helper] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        made = functools.partial(HelperModels, scope=self.scope, spelling=self._spelling)
        return made, (self._sections,)

    @classmethod
    def of(cls, config: Config, *, part: str = "") -> HelperModels:
        """Return the helper models of an experiment, counted for its run folder.

        :param part: Name of work that is counted separately from the run, such as task generation.
        """
        folder = config.run_dir.absolute()
        folder = debug_folder(folder) if config.astuner.backbone == "debug" else folder
        sections = config.keys_of(HelperModelKeys).helper_models
        key = (os.getpid(), database().path, str(folder), part, repr(sections))
        with _shared_lock:
            found = _shared.get(key)
            if found is None:
                found = _shared[key] = cls(sections, scope=f"{folder}#{part}" if part else folder)
            return found

    @classmethod
    def one(cls, section: HelperModel, *, scope: str | Path, name: str = "helper") -> HelperModels:
        """Return the helper model given by command options such as ``--base-url``. Messages name the options."""
        return cls({name: section}, scope=Path(scope).absolute(), spelling=_as_option)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._sections)

    def get(self, name: str, *, where: str) -> Helper:
        """Return a helper model.

        :param where: The config key that names it, for messages.
        :raises astuner.contracts.errors.ConfigError: The name is unknown, or its API key is not in the environment.
        """
        if name not in self._sections:
            there = f"available: {', '.join(self.names)}" if self.names else "astuner.helper_models is empty"
            raise ConfigError(f"{where}: unknown helper model {name!r}; {there}{did_you_mean(name, self.names)}")
        with self._lock:
            if name not in self._helpers:
                self._helpers[name] = self.kind(name, self._sections[name], scope=self.scope, spelling=self._spelling)
            return self._helpers[name]

    def usage(self) -> dict[str, Usage]:
        """Return the usage of each helper model in this scope, over all processes of this machine. Blocks briefly."""
        ledger = Ledger(database())
        return {name: ledger.usage(self.scope, name) for name in self.names}

    def begin(self) -> None:
        """Reset the counts of this scope, for a run that starts over."""
        if self.names:
            Ledger(database()).begin(self.scope)


class HelperMeter(Subscriber):
    """Report the helper model usage of a run in its metrics and its summary."""

    direct = True

    def __init__(self, helpers: HelperModels) -> None:
        self._helpers = helpers
        self._last = helpers.usage()

    @classmethod
    def for_run(cls, context: RunContext) -> Sequence[Subscriber]:
        helpers = HelperModels.of(context.config)
        return [cls(helpers)] if helpers.names else []

    def wants(self, event: Event) -> bool:
        return False

    def numbers(self) -> dict[str, float]:
        """Return the usage since the last call by metric, over all processes of this machine that belong to the run."""
        now, used = self._helpers.usage(), {}
        for name, usage in now.items():
            before = self._last.get(name, Usage())
            used[f"helper/{name}/calls"] = float(usage.calls - before.calls)
            used[f"helper/{name}/cached"] = float(usage.cached - before.cached)
            used[f"helper/{name}/tokens"] = float(usage.tokens - before.tokens)
            used[f"helper/{name}/cost"] = usage.cost - before.cost
        self._last = now
        return used

    def summary(self) -> Summary | None:
        """Return the usage of the complete run for each helper model that was used."""
        used = {name: usage for name, usage in self._helpers.usage().items() if usage.calls or usage.cached}
        if not used:
            return None
        return Summary(
            lines={f"Helper model {name}": str(usage) for name, usage in used.items()},
            facts={"helper_models": {name: asdict(usage) for name, usage in used.items()}},
        )


_shared_lock = threading.Lock()
_shared: weakref.WeakValueDictionary[Any, HelperModels] = weakref.WeakValueDictionary()


def _as_key(name: str, key: str) -> str:
    return f"astuner.helper_models.{name}.{key}"


def _as_option(name: str, key: str) -> str:
    return f"--{key.replace('_', '-')}"
