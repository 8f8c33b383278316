"""The helper models of an experiment or a command, by name; and what a run uses of them.

Invariant: within a process all who name a helper of an experiment have the same one, so that its `concurrency` holds.
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
"""Name of a helper, name of a key -> how a person writes that key."""


class HelperModels(HelperModelsPart):
    """Helpers by name, each made when it is first asked for; picklable, and each process has its own.

    :param scope: what budgets and usage are counted for: a run folder, or a command's output folder.
    :param spelling: how messages spell a key.
    """

    kind: type[Helper] = Helper  # or of what watches the helpers of a command

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
        """Those of an experiment, counted for its run folder.

        :param part: what is counted apart from the run itself, such as the making of its tasks.
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
        """The one that a command was given by options such as ``--base-url``; messages name the options."""
        return cls({name: section}, scope=Path(scope).absolute(), spelling=_as_option)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._sections)

    def get(self, name: str, *, where: str) -> Helper:
        """
        :param where: the key that names it, for the message.
        :raises astuner.contracts.errors.ConfigError: there is none of this name, or its key is not in the environment.
        """
        if name not in self._sections:
            there = f"there are {', '.join(self.names)}" if self.names else "astuner.helper_models is empty"
            raise ConfigError(f"{where}: there is no helper model {name!r}, {there}{did_you_mean(name, self.names)}")
        with self._lock:
            if name not in self._helpers:
                self._helpers[name] = self.kind(name, self._sections[name], scope=self.scope, spelling=self._spelling)
            return self._helpers[name]

    def usage(self) -> dict[str, Usage]:
        """What this scope used of each, over all processes of this machine; blocks for a moment."""
        ledger = Ledger(database())
        return {name: ledger.usage(self.scope, name) for name in self.names}

    def begin(self) -> None:
        """Count this scope from 0: a run that starts over."""
        if self.names:
            Ledger(database()).begin(self.scope)


class HelperMeter(Subscriber):
    """What a run uses, for its metrics and its summary; counts from when it is made."""

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
        """What was used since the last call, by metric; of all processes of this machine that work for the run."""
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
        """What the whole run used, by helper; only of those that were asked."""
        used = {name: usage for name, usage in self._helpers.usage().items() if usage.calls or usage.cached}
        if not used:
            return None
        return Summary(
            lines={f"helper model {name}": str(usage) for name, usage in used.items()},
            facts={"helper_models": {name: asdict(usage) for name, usage in used.items()}},
        )


_shared_lock = threading.Lock()
_shared: weakref.WeakValueDictionary[Any, HelperModels] = weakref.WeakValueDictionary()


def _as_key(name: str, key: str) -> str:
    return f"astuner.helper_models.{name}.{key}"


def _as_option(name: str, key: str) -> str:
    return f"--{key.replace('_', '-')}"
