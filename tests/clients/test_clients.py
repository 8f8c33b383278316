"""The manifests are whole, the table says what was found, and three clients of the matrix run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.clients.harness import CACHE, FOUND, IN_CI, Client, clients, differs, missing, run
from tests.clients.table import PAGE, rewritten

CLIENTS = clients()
RAN = json.loads(FOUND.read_text(encoding="utf-8"))
each = pytest.mark.parametrize("client", CLIENTS.values(), ids=list(CLIENTS))


@each
def test_a_manifest_says_what_the_model_says_and_pins_what_it_installs(client: Client) -> None:
    assert len(client.turns) == 3
    assert all(len(texts) <= turns for texts, turns in zip(client.script().values(), client.turns, strict=True))
    assert all("42" in texts[-1] for texts in client.script().values()), "the last text is made wrong at times"
    assert all(re.fullmatch(r"[\w.-]+(\[[\w,-]+\])?==[\w.]+", package) for package in client.install)
    assert bool(client.branches) == bool(client.cure)


def test_the_page_has_the_table_of_what_was_found() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == rewritten(page), "type: python -m tests.clients NAME… --table"
    assert set(RAN) <= set(CLIENTS)


def test_the_matrix_is_as_large_as_it_should_be_and_nothing_in_it_is_unexplained() -> None:
    done = {name: found for name, found in RAN.items() if "turns" in found}
    assert len(done) >= 14
    assert len({CLIENTS[name].language for name in done}) >= 3
    assert [name for name, found in done.items() if differs(CLIENTS[name], found)] == []


def test_a_result_that_is_not_as_the_manifest_says_is_told() -> None:
    client = CLIENTS["openai"]
    as_said = {"turns": [[n] for n in client.turns], "branches": {}}
    assert differs(client, as_said) == ""
    assert "turns [[4], [3], [3]]" in differs(client, {**as_said, "turns": [[4], [3], [3]]})
    assert "tools_changed" in differs(client, {**as_said, "branches": {"tools_changed": 1}})
    with pytest.raises(ValueError, match="surprise"):
        Client(**{**client.model_dump(), "surprise": 1})


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", IN_CI)
def test_a_client_trains_and_every_token_is_trained_once(name: str, tmp_path: Any) -> None:
    client = CLIENTS[name]
    if why := missing(client):
        pytest.skip(why)
    if not Path(CACHE, name, ".done").exists():
        pytest.skip(f"{CACHE / name} is not there; `make .venv-clients/.done` builds it")
    result = run(client, tmp_path / "run")
    assert differs(client, result) == ""
    assert result["exact"] == result["later"] > 0
