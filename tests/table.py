"""A table of cases is one test: every row is run, and every row that fails is reported, by pytest's subtests."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest


def table(names: str | Sequence[str], rows: Iterable[Any], ids: Callable[[Any], object] | None = None) -> Any:
    """As ``pytest.mark.parametrize``, in one test, for rows that are quick.

    Each row has a ``tmp_path`` and a ``monkeypatch`` of its own, and where a fixture set ``ASTUNER_HOME``, a folder of
    that: a row's server may get the port, and so the cached answers, of another's.  Other fixtures are shared.

    :param names: the arguments that a row fills: ``"text, want"`` or a sequence of names.
    :param rows: a tuple per row, or the value itself where there is one name. None at all is a mistake.
    :param ids: what to call a value in the report; the value itself unless told.
    """
    columns = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    cases = [_values(row, len(columns)) for row in rows]
    if not cases:
        raise ValueError(f"the table of {', '.join(columns)} has no rows, and would test nothing")

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        asked = inspect.signature(function).parameters
        fixtures = [p.replace(default=inspect.Parameter.empty) for name, p in asked.items() if name not in columns]

        @functools.wraps(function)
        def test(**given: Any) -> None:
            subtests = given["subtests"] if "subtests" in asked else given.pop("subtests")
            for number, case in enumerate(cases):
                shown = {name: ids(value) if ids else value for name, value in zip(columns, case, strict=True)}
                with subtests.test(f"row {number}", **shown), pytest.MonkeyPatch.context() as monkeypatch:
                    own = dict(given)
                    if "tmp_path" in own:
                        own["tmp_path"] = _folder(given["tmp_path"] / f"row{number}")
                    if "monkeypatch" in own:
                        own["monkeypatch"] = monkeypatch
                    if home := os.environ.get("ASTUNER_HOME"):
                        monkeypatch.setenv("ASTUNER_HOME", os.path.join(home, f"row{number}"))
                    if "capsys" in own:
                        own["capsys"].readouterr()
                    if "caplog" in own:
                        own["caplog"].clear()
                    function(**own, **dict(zip(columns, case, strict=True)))

        wanted = [inspect.Parameter("subtests", inspect.Parameter.KEYWORD_ONLY)] if "subtests" not in asked else []
        by_name = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in fixtures]
        test.__signature__ = inspect.Signature([*wanted, *by_name])  # type: ignore[attr-defined]
        del test.__wrapped__  # pytest would read the fixtures from the function beneath
        return test

    return decorate


def _values(row: Any, columns: int) -> tuple[Any, ...]:
    values = row.values if hasattr(row, "marks") else row if columns > 1 else (row,)  # pytest.param(…) is such a row
    if len(values) != columns:
        raise ValueError(f"a row of {columns} columns has {len(values)} values: {row!r}")
    return tuple(values)


def _folder(path: Path) -> Path:
    path.mkdir()
    return path
