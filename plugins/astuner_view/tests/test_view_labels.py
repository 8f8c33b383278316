"""What people say of episodes: written down, shown, asked for, and made training data of; and who may."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from astuner_record.episode_log import EpisodeLog, rewind
from astuner_record.episode_log.convert import Choice, write_episodes
from astuner_record.exam import FILE, add_label
from tests.table import table

from ._runs import Client, episode, good_run, make_run, viewing, write_log


@pytest.fixture
def labelled(tmp_path: Path, static: Path) -> Iterator[tuple[Path, Client]]:
    run = good_run(tmp_path / "root" / "math")
    with viewing(tmp_path / "root", static=static) as client:
        yield run, client


def names(client: Client, *where: str) -> list[str]:
    return [one["episode_id"] for one in client.of("math", "episodes", [("where", w) for w in where]).ok["episodes"]]


def test_a_label_is_written_shown_and_taken_back(labelled) -> None:
    run, client = labelled
    assert client.label("math", "g0-1", {"label": "bad", "why": "2 is no 4"}).ok == {"label": "bad", "why": "2 is no 4"}
    assert client.label("math", "g0-0", {"label": "good"}).ok == {"label": "good", "why": ""}
    assert names(client, "label=bad") == ["g0-1"]
    assert names(client, "label!=none") == ["g0-0", "g0-1"]
    assert names(client, "label=none", "step=1") == []
    assert names(client, "why~IS NO") == ["g0-1"]
    shown = client.of("math", "episodes/g0-1").ok
    assert (shown["label"], shown["why"]) == ("bad", "2 is no 4")
    assert client.label("math", "g0-1", {"label": "good", "why": "on second thought"}).status == 200
    assert client.label("math", "g0-0", {"label": ""}).ok == {"label": "", "why": ""}
    assert names(client, "label=good") == ["g0-1"]
    said = [json.loads(line) for line in (run / FILE).read_text().splitlines()]
    assert [(one["episode_id"], one["label"]) for one in said] == [
        ("g0-1", "bad"), ("g0-0", "good"), ("g0-1", "good"), ("g0-0", ""),
    ]  # fmt: skip


def test_an_episode_that_is_drawn_again_has_no_label(labelled) -> None:
    run, client = labelled
    client.label("math", "g1-0", {"label": "good"})
    rewind(run / "episodes", 1)
    write_log(run, [(2, episode("g1-0", 0.0))])
    assert names(client, "label!=none") == []
    assert "g1-0" in names(client)


@table(
    ("headers", "status"),
    [
        ({"content_type": "text/plain"}, 415),
        ({"content_type": "application/x-www-form-urlencoded"}, 415),
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"sec_fetch_site": "same-site"}, 403),  # another port of this machine
        ({"sec_fetch_site": "none"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://["}, 403),
        ({"origin": "http://127.0.0.1:1"}, 403),
        ({"host": "evil.example"}, 403),
    ],
)
def test_no_page_from_elsewhere_writes_a_label(
    root: Path, viewer: Client, headers: dict[str, str], status: int
) -> None:
    assert viewer.label("math", "g0-0", {"label": "good"}, **headers).status == status
    assert not (root / "math" / FILE).exists()


@table(
    ("run", "name", "said", "status"),
    [
        ("math", "g9-9", {"label": "good"}, 404),
        ("nothing", "g0-0", {"label": "good"}, 404),
        ("math", "..%2F..%2Fg0-0", {"label": "good"}, 404),
        ("math", "g0-0", {"label": "perfect"}, 400),
        ("math", "g0-0", {"label": ["good"]}, 400),
        ("math", "g0-0", {}, 400),
        ("math", "g0-0", [], 400),
        ("math", "g0-0", {"label": "good", "why": 5}, 400),
        ("math", "g0-0", {"label": "good", "why": "x" * 4001}, 400),
        ("math", "g0-0", {"label": "good", "why": "x" * 100_000}, 413),
        ("math", "g0-0", {"label": "good", "why": "\ud800"}, 400),
    ],
)
def test_what_is_no_label_is_refused(root: Path, viewer: Client, run: str, name: str, said: Any, status: int) -> None:
    assert viewer.label(run, name, said).status == status
    assert not (root / "math" / FILE).exists()


def test_the_page_itself_may_and_with_a_token_who_brings_it(labelled, static: Path) -> None:
    run, client = labelled
    own = {"origin": f"http://127.0.0.1:{client.port}", "sec_fetch_site": "same-origin"}
    assert client.label("math", "g0-0", {"label": "good"}, **own).status == 200
    with viewing(run.parent, token="0123456789abcdef", static=static) as guarded:
        assert guarded.label("math", "g0-0", {"label": "bad"}).status == 401
        assert guarded.label("math", "g0-0", {"label": "bad"}, authorization="Bearer 0123456789abcdef").status == 200
    assert names(client, "label=bad") == ["g0-0"]


def test_a_link_or_a_pipe_in_the_files_place_is_left_alone(labelled, tmp_path: Path) -> None:
    run, client = labelled
    secret = tmp_path / "secret"
    secret.write_text("")
    (run / FILE).symlink_to(secret)
    answer = client.label("math", "g0-0", {"label": "good"})
    assert (answer.status, "Could not write labels.jsonl of this run" in answer.error) == (409, True)
    assert secret.read_text() == ""
    assert "labels.jsonl was ignored, because it is not a plain file" in client.of("math").ok["problems"]
    (run / FILE).unlink()
    os.mkfifo(run / FILE)
    assert client.label("math", "g0-0", {"label": "good"}).status == 409
    assert len(names(client)) == 5


def test_lines_that_are_no_labels_are_passed_over(labelled) -> None:
    run, client = labelled
    with EpisodeLog(run) as log:
        first, second = (log.find(name).id for name in ("g0-0", "g0-1"))
    lines: list[Any] = [
        [], 5, None, {"id": first}, {"id": str(first), "label": "good", "why": ""},
        {"id": 1 << 80, "label": "good", "why": ""}, {"id": True, "label": "good", "why": ""},
        {"id": first, "label": "best", "why": ""}, {"id": first, "label": "good", "why": {}},
        {"id": second, "label": "bad", "why": "half \ud83d"},
    ]  # fmt: skip
    (run / FILE).write_text("no json\n" + "[" * 100_000 + "\n" + "".join(json.dumps(line) + "\n" for line in lines))
    assert names(client, "label!=none") == ["g0-1"]
    assert client.of("math", "episodes/g0-1").ok["why"] == "half ?"


def test_labels_become_what_judges_trainers_and_gates_read(tmp_path: Path) -> None:
    rubrics = pytest.importorskip("astuner_rubrics.labels")
    run = make_run(tmp_path / "run")
    write_log(run, [(1, episode("g0-0", 1.0)), (1, episode("g0-1", 0.0)), (1, episode("h0-0", 1.0))])
    with EpisodeLog(run) as log:
        rows = {listed.episode_id: listed.id for listed in log.list()}
    add_label(run, rows["g0-0"], "g0-0", "bad", "the judge was fooled")
    add_label(run, rows["g0-1"], "g0-1", "good", "")

    def exported(to: str, *where: str) -> list[dict[str, Any]]:
        out = tmp_path / f"{to}.jsonl"
        write_episodes(run, to, out, Choice(where=where), force=True)
        return [json.loads(line) for line in out.read_text().splitlines()]

    judged = exported("labels")
    assert [(one["score"], one.get("why"), one["reference"]) for one in judged] == [
        (0, "the judge was fooled", "4"),
        (1, None, "4"),
    ]
    labels = rubrics.read_labels(tmp_path / "labels.jsonl")  # as `astuner judge check` does
    assert [(s.question, s.worth, s.reference) for s in labels.samples] == [
        ("What is g0?", (0.0,), "4"),
        ("What is g0?", (1.0,), "4"),
    ]
    assert {row["episode_id"] for row in exported("sft")} == {"g0-0", "h0-0"}
    assert {row["episode_id"] for row in exported("sft", "label=good")} == {"g0-1"}  # whatever the judge said
    assert {row["episode_id"] for row in exported("tokens", "label=good")} == {"g0-1"}
    (task,) = exported("tasks", "label!=none")  # both are attempts at it
    assert (task["task_id"], task["main_query"], task["metadata"]) == ("task-g0", "What is g0?", {"answer": 4})
