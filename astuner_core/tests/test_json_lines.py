"""A file of rows can be read whatever became of whoever wrote it, or says which line cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from astuner.contracts.errors import DataError
from astuner.support.json_lines import append_jsonl, read_jsonl


def test_what_was_cut_off_is_left_out_and_what_is_damaged_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert read_jsonl(path) == []
    append_jsonl(path, {"text": "half \ud800 and \u2028", "number": float("nan")})
    with path.open("a") as file:
        file.write('{"step": 7, "rew')
    assert read_jsonl(path) == [{"text": "half \ud800 and \u2028", "number": None}]
    with path.open("a") as file:
        file.write("\n[1]\n")
    with pytest.raises(DataError, match=r"rows\.jsonl:2: not JSON .*; remove the line"):
        read_jsonl(path)
    path.write_text("[1]\n")
    with pytest.raises(DataError, match=r"rows\.jsonl:1: expected a JSON object, got list"):
        read_jsonl(path)
