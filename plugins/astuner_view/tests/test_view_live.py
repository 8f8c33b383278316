"""A run that goes on: rows as they come, a file that was rewound, alarms, and the end."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from astuner import RunDir
from astuner.support.json_lines import append_jsonl
from astuner_record.episode_log import rewind
from astuner_view.book import read_since
from tests.table import table

from ._runs import Client, add_metrics, episode, make_run, viewing, write_log


@pytest.fixture
def live(tmp_path: Path, static: Path) -> Iterator[tuple[Path, Client]]:
    run = make_run(tmp_path / "live")
    with viewing(tmp_path, static=static) as client:
        yield run, client


def until(events, name: str):
    """The data of the next event of that name."""
    return next(data for found, data in events if found == name)


def steps(page) -> list[int]:
    return [row["step"] for row in page["rows"]]


def test_metrics_go_on_from_a_cursor(live) -> None:
    run, client = live
    first = client.of("live", "metrics").ok
    assert (steps(first), first["reset"]) == ([0, 1], True)
    nothing = client.of("live", "metrics", {"cursor": first["cursor"]}).ok
    assert (nothing["rows"], nothing["reset"], nothing["cursor"]) == ([], False, first["cursor"])
    add_metrics(run, {"step": 2})
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3')  # half a row
    more = client.of("live", "metrics", {"cursor": first["cursor"]}).ok
    assert (steps(more), more["reset"]) == ([2], False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write("}\n")
    assert steps(client.of("live", "metrics", {"cursor": more["cursor"]}).ok) == [3]


@table("cursor", ["nonsense", "-1", "a-99999999999999999999-b", "1-2-3", "--", "é-٣-1", "0" * 5000])
def test_a_cursor_of_nowhere_begins_anew(live, cursor: str) -> None:
    page = live[1].of("live", "metrics", {"cursor": cursor}).ok
    assert (steps(page), page["reset"]) == ([0, 1], True)


def test_a_rewound_file_is_given_whole(live) -> None:
    run, client = live
    add_metrics(run, {"step": 2})
    cursor = client.of("live", "metrics").ok["cursor"]
    RunDir(run).rewind(1)
    page = client.of("live", "metrics", {"cursor": cursor}).ok
    assert (steps(page), page["reset"]) == ([0, 1], True)
    add_metrics(run, {"step": 2})  # as long as it was
    again = client.of("live", "metrics", {"cursor": cursor}).ok
    assert (steps(again), again["reset"]) == ([0, 1, 2], True)
    assert client.of("live").ok["step"] == 2


def test_a_file_that_was_written_over_in_place_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    cursor = read_since(path).cursor
    path.write_text('{"step": 7}\n{"step": 8}\n')
    tail = read_since(path, cursor)
    assert (tail.reset, steps({"rows": tail.rows})) == (True, [7, 8])


def test_what_happens_is_told_as_it_happens(live) -> None:
    run, client = live
    with client.live("live") as events:
        first = until(events, "metrics")
        assert (steps(first), first["reset"]) == ([0, 1], True)
        assert until(events, "status") == {
            "state": "stopped",
            "step": 1,
            "episodes": 0,
            "alarms": 0,
            "updated": 101.0,
            "progress": None,
        }
        add_metrics(run, {"step": 2, "reward/mean": 1.0})
        more = until(events, "metrics")
        assert (steps(more), more["reset"]) == ([2], False)
        write_log(run, [(2, episode("g0-0"))])
        assert until(events, "status")["step"] == 2
        while until(events, "status")["episodes"] != 1:
            pass
        alarm = {"step": 2, "rule": "length", "severity": "warning", "message": "<b>", "advice": "look"}
        append_jsonl(run / "alarms.jsonl", alarm)  # the first, so that the file is new
        assert until(events, "alarm") == alarm
        append_jsonl(run / "alarms.jsonl", {**alarm, "step": 3})
        assert until(events, "alarm")["step"] == 3
        RunDir(run).rewind(1)
        again = until(events, "metrics")
        assert (steps(again), again["reset"]) == ([0, 1], True)
        (run / "summary.json").write_text("{}")
        assert until(events, "end") == {}
        assert list(events) == []


def test_episodes_that_a_resumed_run_forgot_are_gone(live) -> None:
    run, client = live
    write_log(run, [(1, episode("g0-0")), (2, episode("g1-0")), (2, episode("g1-1"))])
    assert client.of("live", "episodes").ok["total"] == 3
    assert client.of("live", "episodes/g1-1").status == 200
    rewind(run / "episodes", 1)
    assert [e["episode_id"] for e in client.of("live", "episodes").ok["episodes"]] == ["g0-0"]
    assert client.of("live", "episodes/g1-1").status == 404
    assert client.of("live", "episodes/g0-0").ok["reward"] == 1.0
    write_log(run, [(2, episode("g1-0", 0.0))])
    assert client.of("live", "episodes/g1-0").ok["reward"] == 0.0
    assert client.of("live").ok["problems"] == []


def test_a_listener_goes_on_where_it_was(live) -> None:
    run, client = live
    cursor = client.of("live", "metrics").ok["cursor"]
    add_metrics(run, {"step": 2})
    with client.live("live", cursor) as events:
        page = until(events, "metrics")
        assert (steps(page), page["reset"]) == ([2], False)
    answer = client.get("/api/runs/live", last_event_id="x")
    assert answer.status == 200


def test_the_viewer_stops_while_somebody_listens(tmp_path: Path, static: Path) -> None:
    make_run(tmp_path / "live")
    with viewing(tmp_path, static=static) as client, client.live("live") as events:
        until(events, "status")
        # `viewing` waits for the server's thread


def test_a_run_is_running_while_its_process_holds_the_lock(live) -> None:
    run, client = live
    with RunDir(run).locked():
        assert client.of("live").ok["state"] == "running"
    assert client.of("live").ok["state"] == "stopped"  # this process is still there, and its lock file says so
    lock = run.with_name(".live.lock")
    assert lock.read_text() == str(os.getpid())
    lock.write_text("no number")
    assert client.of("live").ok["state"] == "stopped"


def test_to_look_never_takes_the_lock(live) -> None:
    run, client = live
    lock = run.with_name(".live.lock")
    lock.write_text(str(os.getpid()))
    with lock.open() as file:  # open, as a run has it before it takes it
        assert client.of("live").ok["state"] == "running"
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_alarms_are_in_the_page_of_a_run(live) -> None:
    run, client = live
    alarm = {"step": 1, "time": 2.0, "rule": "entropy", "severity": "error", "message": "m", "advice": "a"}
    (run / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")
    found = client.of("live").ok
    assert found["alarms"] == [alarm]
    (listed,) = client.get("/api/runs").ok["runs"]
    assert listed["alarms"] == 1
