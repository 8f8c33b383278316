"""What is wrong with an experiment beyond its keys: found one thing after the other, and told all at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from astuner.config.loaded import Config
from astuner.contracts.errors import AstunerError, ConfigError, problems_of

T = TypeVar("T")


class Mistakes:
    """Asks one thing after the other, and keeps what is refused, with the place in the experiment that leads there."""

    def __init__(self, config: Config, told: Sequence[str] = ()) -> None:
        """:param told: mistakes that are known already."""
        self._config = config
        self._places = {f"{place}: " for place in (*config.origins.values(), config.path)}
        self.told = list(told)
        self._left_out = False
        self._errors: list[AstunerError] = [ConfigError(list(told))] if told else []

    def ask(self, key: str, question: Callable[[], T], *, needs: Sequence[str] = ()) -> T | None:
        """What ``question`` gives; None where it raises an `AstunerError`, or what it is about is known to be wrong.

        :param key: of the experiment, to blame for what is refused; empty: whoever refuses says it.
        :param needs: other keys and sections that it is about.
        """
        about = tuple(f"{name}." for name in (key, *needs) if name)
        if any(f"{wrong}.".startswith(about) for wrong in self._config.wrong):
            self._left_out = True
            return None
        try:
            return question()
        except AstunerError as e:
            self.keep(key, e)
            return None

    def keep(self, key: str, error: AstunerError) -> None:
        """Keep what was refused; as `ask` does."""
        self._errors.append(error)
        self.told += [text for text in self._placed(key, error) if text not in self.told]

    def raise_all(self) -> None:
        """:raises AstunerError: the one that was raised, with its place.
        :raises ConfigError: all of them, where there are several; none, where something could not even be asked.
        """
        if len(self._errors) == 1 and not isinstance(self._errors[0], ConfigError):
            self._errors[0].args = (self.told[0], *self._errors[0].args[1:])
            raise self._errors[0]
        if self._errors or self._left_out:
            raise ConfigError(self.told)

    def _placed(self, key: str, error: AstunerError) -> list[str]:
        texts = problems_of(error)
        if not key:
            return list(texts)
        return [text if text.startswith(tuple(self._places)) else self._place(key, text) for text in texts]

    def _place(self, key: str, text: str) -> str:
        """``text`` behind the place of ``key``; of a section, the place of the key in it whose value ``text`` names."""
        within = [name for name in self._config.written if name.startswith(f"{key}.")]
        values = {name: value for name, value, _ in self._config.items() if name in within}
        texts = {name: value for name, value in values.items() if isinstance(value, str) and len(value) > 2}
        named = [name for name, value in texts.items() if value in text or os.path.expanduser(value) in text]
        key = max(named, key=lambda name: len(values[name]), default=key)
        about = "" if key in text else f"{key}: "
        return f"{self._config.place(key)}: {about}{text}"
