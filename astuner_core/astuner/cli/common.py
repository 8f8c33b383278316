"""What several commands need."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

from astuner.contracts.errors import ConfigError

if TYPE_CHECKING:
    from astuner.plugins.loader import PluginManager


def disabled_plugins(ctx: Any) -> tuple[str, ...]:
    """The names that ``-p no:NAME`` turns off; ``ctx`` is any command's `typer.Context`.

    :raises ConfigError: ``-p`` with something else.
    :raises UnknownName: no plugin or distribution has such a name.
    """
    names = []
    for text in ctx.find_root().params.get("plugin") or ():
        if not text.startswith("no:") or text == "no:":
            raise ConfigError(f"-p {text}: plugins are installed with pip and turned off with -p no:NAME")
        names.append(text.removeprefix("no:"))
    if names:
        from astuner.plugins import loader as plugins

        plugins.load_plugins(names).check_disabled(names)
    return tuple(names)


def load_plugins(ctx: Any) -> PluginManager:
    """The core's own and the installed plugins, without those that ``-p`` turns off."""
    from astuner.plugins import loader as plugins

    return plugins.load_plugins(disabled_plugins(ctx))


def check_overrides(overrides: Sequence[str]) -> None:
    """Refuse what is not ``key=value`` before anything is read."""
    wrong = [text for text in overrides if "=" not in text]
    if wrong:
        raise ConfigError(
            [f"command line: {text!r} is not key=value, e.g. astuner.rollout.num_repeat=8" for text in wrong]
        )


def write_json(data: Any) -> None:
    print(json.dumps(data, ensure_ascii=False, indent=2, default=str))


@contextmanager
def only_data_on_stdout(wanted: bool) -> Iterator[None]:
    """With ``--json``, whatever a run prints goes to stderr, so that stdout is one JSON document."""
    if not wanted:
        yield
        return
    with redirect_stdout(sys.stderr):
        yield
