"""Other spellings of a command line, turned into the one that the commands define.

``astuner --conf X --backbone Y --with-ray`` (as the first documents of ASTuner write it) is
``astuner run X --backbone Y --with ray``; ``-p no:NAME`` may stand anywhere.  Nothing else is guessed.
"""

from __future__ import annotations

from collections.abc import Sequence

from astuner.contracts.errors import ConfigError

_GONE = {
    "--kill": "it ended every process whose name matched, other people's too; "
    "end what your own runs started with: astuner kill --all (or --run-dir DIR)",
}
_ROOT_OPTIONS = {"-h", "--help", "--version"}


def normalise(arguments: Sequence[str]) -> list[str]:
    """The arguments in today's spelling.

    :raises ConfigError: an option that no longer exists, or ``--backbone`` and the like without an experiment file.
    """
    plugins, rest = _take_plugin_switches(arguments)
    if rest and rest[0].startswith("--") and rest[0] not in _ROOT_OPTIONS:
        rest = ["run", *_conf_first(rest)]
    if rest and rest[0] in ("run", "eval", "chat"):
        rest = [rest[0], *_services(rest[1:])]
    return plugins + rest


def _take_plugin_switches(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    switches: list[str] = []
    rest: list[str] = []
    i = 0
    while i < len(arguments):
        if arguments[i] == "-p" and i + 1 < len(arguments) and arguments[i + 1].startswith("no:"):
            switches += arguments[i : i + 2]
            i += 2
        else:
            rest.append(arguments[i])
            i += 1
    return switches, rest


def _conf_first(arguments: Sequence[str]) -> list[str]:
    conf, rest, i = None, [], 0
    while i < len(arguments):
        name, given, value = arguments[i].partition("=")
        if name in _GONE:
            raise ConfigError(f"{name} is gone: {_GONE[name]}")
        if name == "--conf":
            if not given:
                i += 1
                value = arguments[i] if i < len(arguments) else ""
            conf = value
        else:
            rest.append(arguments[i])
        i += 1
    if not conf:
        raise ConfigError(f"{arguments[0]} needs an experiment file; write: astuner run FILE {' '.join(rest)}")
    return [conf, *rest]


def _services(arguments: Sequence[str]) -> list[str]:
    """``--with-NAME`` -> ``--with NAME``."""
    translated = []
    for text in arguments:
        if text.startswith("--with-") and len(text) > len("--with-"):
            translated += ["--with", text.removeprefix("--with-")]
        else:
            translated.append(text)
    return translated
