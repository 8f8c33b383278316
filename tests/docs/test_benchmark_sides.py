"""Servers and clients of the HTTP benchmark: they have the scripted conversation, and a failure shows why."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]
TURNS = 3


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY))


def _module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name}")


def _conversations(side: Any) -> int:
    """Two agents talk to the side; how many calls it recorded."""
    episodes = side.ask("begin", episodes=2)
    talked = _module("clients").talk(episodes, turns=TURNS, first_number=1)
    assert len(talked.latencies) == 2 * TURNS
    assert side.ask("settle") is None
    assert side.cpu() > 0
    recorded: int = side.ask("end", calls=2 * TURNS)
    return recorded


def test_the_endpoint_has_the_conversation_with_either_engine(tmp_path: Path) -> None:
    start, tokenizer = _module("side").Side, _module("templates").tokenizer("qwen3")
    tokenizer.save_pretrained(tmp_path)
    replies = json.dumps(_module("episodes").replies(tokenizer, TURNS))
    stub = start(sys.executable, "benchmarks.upstream_side", str(TURNS), replies)
    try:
        assert _conversations(stub) == 2 * TURNS
        for upstream in ("", stub.started["url"]):
            side = start(sys.executable, "benchmarks.astuner_side", str(tmp_path), replies, upstream)
            try:
                assert [_conversations(side) for _ in range(2)] == [2 * TURNS] * 2
            finally:
                side.close()
    finally:
        stub.close()


def test_agents_refuse_another_conversation() -> None:
    stub = _module("side").Side(sys.executable, "benchmarks.upstream_side", str(TURNS), "[]")
    try:
        with pytest.raises(RuntimeError, match="turn 3 is not the scripted one"):
            _module("clients").talk(stub.ask("begin", episodes=1), turns=TURNS + 1, first_number=1)
    finally:
        stub.close()


def test_a_side_that_fails_shows_its_log() -> None:
    with pytest.raises(RuntimeError, match=r"ended with 1; its log:(.|\n)*JSONDecodeError"):
        _module("side").Side(sys.executable, "benchmarks.upstream_side", str(TURNS), "no JSON")


def test_a_peer_that_is_not_installed_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    overhead, peers = _module("call_overhead"), _module("peers")
    monkeypatch.setattr(peers, "REPOSITORY", tmp_path)
    notes: list[str] = []
    assert overhead._python_of(peers.VERIFIERS, notes) is None
    assert "verifiers was not measured" in notes[0]
    assert "python -m benchmarks.peers" in notes[0]
