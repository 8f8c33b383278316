"""What the page is told of runs, steps, groups, episodes and tokens."""

from __future__ import annotations

import gzip
import json
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from astuner.contracts.types import Split
from astuner_record.episode_log import EpisodeLog
from tests.table import table

from ._runs import END, HOSTILE, OLDER, Client, credited, episode, good_run, ids, make_run, turn, viewing, write_log
from ._sliced import LAYOUTS, as_running, sliced_run

RUN = "math"


def names(answer) -> list[str]:
    return [one["episode_id"] for one in answer.ok["episodes"]]


def test_runs_are_listed_with_what_they_are_at(viewer: Client) -> None:
    (run,) = viewer.get("/api/runs").ok["runs"]
    assert run == {
        "id": RUN,
        "name": "math",
        "state": "ended",
        "backbone": "local",
        "model": "tiny-calculator",
        "step": 1,
        "total_steps": 7,
        "started": 100.0,
        "updated": 101.0,
        "episodes": 5,
        "reward": 0.5,
        "success": 0.25,
        "alarms": 0,
        "progress": None,
    }


def test_times_are_the_runs_own_and_not_those_of_its_files(odd) -> None:
    root, client = odd
    run = make_run(root / "copied", ended=True)  # the files are of now

    def times() -> tuple[float, float]:
        found = client.of("copied").ok
        return found["started"], found["updated"]

    assert times() == (100.0, 101.0)
    starts = [{"started": 90.5, "ended": 95.0}, {"started": 97.0, "ended": 140.25}, {"started": 150.0}]
    (run / "origin.json").write_text(json.dumps({"starts": starts}))
    assert times() == (90.5, 140.25)
    for broken in ("{", "[]", '{"starts": 5}', '{"starts": [5, {"started": "x", "ended": true}]}'):
        (run / "origin.json").write_text(broken)
        assert times() == (100.0, 101.0)
    (run / "metrics.jsonl").unlink()
    assert min(times()) > 1e9  # it wrote none, so those of the files are all there is


def test_a_run_says_what_it_is_made_of(viewer: Client, root: Path) -> None:
    run = viewer.of(RUN).ok
    assert run["config"].startswith("astuner:\n  backbone: local")
    assert run["summary"] == {"metrics": {}, "ledger": {}}
    assert (run["certificate"], run["alarms"], run["problems"]) == (None, [], [])
    assert run["files"] == {"resolved.yaml": True, "run.log": True}
    assert run["facets"] == {
        "stop_reason": [["completed", 4], ["model_failed", 1]],
        "split": [["train", 4], ["validation", 1]],
        "agent": [["critic", 5], ["oracle", 5], ["solver", 5]],
        "tool": [["search", 5]],
        "error": [["the engine is gone", 1]],
        "limit": [],
        "step": [0, 2],
        "reward": [0.0, 1.0],
    }


def test_progress_is_shown_only_while_the_run_that_wrote_it_runs(tmp_path: Path) -> None:
    run = make_run(tmp_path / "live")
    with viewing(tmp_path) as client:
        with as_running(run):
            (shown,) = (one["progress"] for one in client.get("/api/runs").ok["runs"])
            assert (shown["phase"], shown["step"], shown["done"], shown["total"]) == ("rollout", 7, 10, 64)
            assert shown["remaining_seconds"] == 840
            (run / "origin.json").write_text(json.dumps({"starts": [{"started": time.time() + 5}]}))  # started again
            assert client.of("live").ok["progress"] is None
            (run / "origin.json").unlink()
            (run / "progress.json").write_text('{"phase": ')
            assert client.of("live").ok["progress"] is None
        assert client.of("live").ok["state"] == "stopped"
        assert client.of("live").ok["progress"] is None


def test_a_debug_run_has_no_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path / "tried")
    (run / "resolved.yaml").write_text("astuner: {backbone: debug, trainer_common: {total_steps: 20}}\n")
    with viewing(tmp_path) as client:
        assert client.of("tried").ok["total_steps"] is None


def test_the_verdict_and_the_fields_of_tasks_are_those_of_the_run(tmp_path: Path) -> None:
    sliced_run(tmp_path / "sliced")
    with viewing(tmp_path) as client:
        found = client.of("sliced", "verdict").ok
        assert found["verdict"]["word"] == "may be chance"
        steps = {name: found["held_out"][name]["step"] for name in ("before", "after", "best")}
        assert (steps["before"], steps["after"]) == (0, 12)
        assert steps["best"] in (8, 12)
        assert {row["value"] for row in found["slices"] if row["field"] == "layout"} == set(LAYOUTS)
        layouts = dict(client.of("sliced", "fields").ok["fields"])["layout"]
        assert {value for value, _ in layouts} == set(LAYOUTS)
        for condition in ("layout=two columns", "layout=two_columns"):
            listed = client.of("sliced", "episodes", {"where": condition}).ok
            assert listed["total"] == dict(layouts)["two columns"]
        facets = client.of("sliced").ok["facets"]
        assert (facets["error"], facets["limit"]) == ([], [["the answer reached # tokens", 12]])
        (tmp_path / "sliced" / "alarms.jsonl").unlink()
        (tmp_path / "sliced" / "alarms.jsonl").symlink_to("/etc/passwd")
        assert client.of("sliced", "verdict").ok == {}


def test_steps_and_groups_are_summed_up(viewer: Client) -> None:
    steps = viewer.of(RUN, "steps", {"split": "train"}).ok["steps"]
    assert [(s["step"], s["episodes"], s["groups"], s["scored"], s["failed"]) for s in steps] == [
        (1, 2, 1, 2, 0),
        (2, 2, 1, 1, 1),
    ]
    assert (steps[0]["reward_mean"], steps[0]["reward_min"], steps[0]["reward_max"]) == (0.5, 0.0, 1.0)
    assert (steps[0]["success"], steps[0]["seconds_max"], steps[0]["tokens"]) == (0.5, 1.5, 2 * (6 + 2 + 4 + 3))
    assert [s["step"] for s in viewer.of(RUN, "steps", {"split": "validation"}).ok["steps"]] == [0]
    found = viewer.of(RUN, "groups", {"where": "split=train"}).ok
    assert found["total"] == 2
    assert found["groups"][0] == {
        "group_id": "g0",
        "task_id": "task-g0",
        "query": "What is g0?",
        "step": 1,
        "split": "train",
        "episodes": 2,
        "scored": 2,
        "reward_mean": 0.5,
        "reward_std": 0.5,
        "success": 0.5,
    }
    assert found["groups"][1]["reward_std"] == 0.0
    second = viewer.of(RUN, "groups", {"offset": 1, "limit": 1}).ok
    assert (second["total"], [g["group_id"] for g in second["groups"]]) == (3, ["g0"])


def test_episodes_are_filtered_sorted_and_found_again(viewer: Client) -> None:
    everything = viewer.of(RUN, "episodes").ok
    assert (everything["total"], everything["offset"]) == (5, 0)
    assert names(viewer.of(RUN, "episodes", [("where", "reward>=0.5"), ("where", "split=train")])) == ["g0-0", "g1-0"]
    best = {"order": "reward", "desc": "1", "where": "split=train"}
    order = names(viewer.of(RUN, "episodes", best))
    assert order == ["g0-0", "g1-0", "g0-1", "g1-1"]
    for place, name in enumerate(order):
        assert viewer.of(RUN, "position", {**best, "episode": name}).ok == {"index": place}
    assert viewer.of(RUN, "position", {**best, "episode": "v0-0"}).ok == {"index": None}
    assert names(viewer.of(RUN, "episodes", {**best, "offset": 1, "limit": 2})) == ["g1-0", "g0-1"]
    assert names(viewer.of(RUN, "episodes", {"where": "text~pears", "limit": 1})) == ["v0-0"]


def test_a_list_is_in_the_same_order_whatever_the_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "same")
    write_log(run, [(1, episode(f"g{i // 4}-{i % 4}", 0.5)) for i in range(40)])  # batches, and one reward
    with EpisodeLog(run) as log:
        for order in ("written", "reward"):
            for descending in (False, True):
                whole = [e.episode_id for e in log.list(order=order, descending=descending)]
                pages = [
                    e.episode_id
                    for at in range(0, 40, 7)
                    for e in log.list(order=order, descending=descending, limit=7, offset=at)
                ]
                assert pages == whole
                places = [log.position(name, order=order, descending=descending) for name in whole]
                assert places == list(range(40))


def test_an_episode_is_told_turn_by_turn(viewer: Client) -> None:
    found = viewer.of(RUN, "episodes/g0-0").ok
    assert (found["reward"], found["reward_source"], found["failure"]) == (1.0, "judge", None)
    assert found["task"]["metadata"] == {"answer": 4}
    assert found["output"]["metadata"] == {"final": 4}
    assert [(t["index"], t["agent"], t["external"], t["continues"]) for t in found["turns"]] == [
        (0, "solver", False, None),
        (1, "solver", False, 0),
        (2, "oracle", True, None),
        (3, "critic", False, None),
        (4, "solver", False, 0),
    ]
    assert found["turns"][2]["model"] == "big"
    assert found["turns"][1]["reply"]["tool_calls"][0]["function"]["name"] == "search"
    assert found["turns"][1]["request"] == [{"role": "user", "content": "question 1"}]
    assert [(s["sample"], s["turns"], s["advantage"], s["trained_tokens"]) for s in found["samples"]] == [
        (0, [0, 1], 0.5, 8),
        (1, [0, 4], 0.5, 3),
    ]


def test_a_failed_episode_says_why_and_what_to_do(viewer: Client) -> None:
    failure = viewer.of(RUN, "episodes/g1-1").ok["failure"]
    assert "engine failed" in failure["what"]
    assert failure["why"].startswith("the engine is gone")
    assert "astuner doctor" in failure["advice"]


def test_each_token_is_trained_at_most_once_and_has_its_text(viewer: Client) -> None:
    found = viewer.of(RUN, "episodes/g0-0/tokens").ok
    assert (found["has_text"], found["note"]) == (True, "")
    turns = {t["index"]: t for t in found["turns"]}
    assert sorted(turns) == [0, 1, 3, 4]
    first = turns[0]["response"]
    assert first["ids"] == [*ids("an é"), END]
    assert first["texts"] == ["a", "n", " ", "", "é", "<|end|>"]
    assert first["logprobs"] == [0.0, -0.25, -0.5, -0.75, -1.0, -1.25]
    assert turns[1]["prompt"] == {"ids": list(ids("more")), "texts": list("more")}  # only what is new
    assert {i: t["response"]["trained"] for i, t in turns.items()} == {0: [1] * 6, 1: [1] * 2, 3: [0] * 4, 4: [1] * 3}
    assert {i: (t["sample"], t["advantage"]) for i, t in turns.items()} == {
        0: (0, 0.5),
        1: (0, 0.5),
        3: (None, None),
        4: (1, 0.5),
    }
    assert first["trainer_logprobs"] is None


def test_without_credit_nothing_is_trained(viewer: Client) -> None:
    found = viewer.of(RUN, "episodes/g1-0/tokens").ok
    assert not any(sum(t["response"]["trained"]) for t in found["turns"])
    assert "was not credited" in found["note"]


@table(
    ("path", "query", "status", "says"),
    [
        ("nothing", {}, 404, "Run not found"),
        ("math/episodes/g9-9", {}, 404, "no episode 'g9-9'"),
        ("math/episodes/g9-9/tokens", {}, 404, "no episode 'g9-9'"),
        ("..%2F..%2Fmath", {}, 404, ""),
        ("math/episodes", {"where": "reward>>1"}, 400, "reward>>1"),
        ("math/episodes", {"where": "colour=red"}, 400, "'colour' is not a known field"),
        ("math/groups", {"where": "text~"}, 400, "words to search for"),
        ("math/episodes", {"limit": "1001"}, 400, "at most 1000"),
        ("math/episodes", {"limit": "-1"}, 400, "limit must be a number"),
        ("math/episodes", {"offset": "9" * 30}, 400, "offset must be a number"),
        ("math/episodes", {"order": "episode_id; DROP TABLE episodes"}, 400, "order must be one of"),
        ("math/episodes", {"desc": "yes"}, 400, "desc must be 0 or 1"),
        ("math/files/index.sqlite", {}, 404, "This file is not served"),
        ("math/files/..%2Fmath%2Frun.log", {}, 404, ""),
        ("math/files/report.html", {}, 404, "report.html does not exist"),
        ("math/elsewhere", {}, 404, "Address not found"),
    ],
)
def test_what_is_asked_wrongly_is_said_in_a_sentence(viewer: Client, path, query, status, says) -> None:
    answer = viewer.get(f"/api/runs/{path}", query)
    assert answer.status == status
    assert says in answer.error


def test_conditions_can_hold_anything(viewer: Client) -> None:
    for value in ("' OR 1=1 --", '"', "NEAR(", "*", HOSTILE, "a" * 5000, "\u0000"):
        assert viewer.of(RUN, "episodes", {"where": f"query={value}"}).ok["total"] == 0
        assert viewer.of(RUN, "episodes", {"where": f"text~x {value}"}).ok["total"] == 0


@pytest.fixture
def odd(tmp_path: Path, static: Path) -> Iterator[tuple[Path, Client]]:
    with viewing(tmp_path, static=static) as client:
        yield tmp_path, client


def test_a_run_without_a_log_shows_its_metrics_and_says_why(odd) -> None:
    root, client = odd
    make_run(root / "bare")
    run = client.of("bare").ok
    assert (run["episodes"], run["state"]) == (0, "stopped")
    assert run["problems"] == []
    assert run["facets"]["stop_reason"] == []
    assert [row["step"] for row in client.of("bare", "metrics").ok["rows"]] == [0, 1]
    assert client.of("bare", "episodes").ok == {"total": 0, "offset": 0, "episodes": []}
    assert client.of("bare", "groups").ok == {"total": 0, "groups": []}
    assert client.of("bare", "steps").ok == {"steps": []}
    answer = client.of("bare", "episodes/g0-0")
    assert (answer.status, "has no episode log" in answer.error) == (404, True)


def test_a_log_that_comes_later_is_seen(odd) -> None:
    root, client = odd
    run = make_run(root / "late")
    assert client.of("late", "episodes").ok["total"] == 0
    write_log(run, [(1, episode("g0-0"))])
    assert names(client.of("late", "episodes")) == ["g0-0"]
    write_log(run, [(2, episode("g1-0"))])
    assert names(client.of("late", "episodes")) == ["g0-0", "g1-0"]


def test_another_run_under_the_same_name_is_noticed(odd) -> None:
    root, client = odd
    write_log(make_run(root / "again"), [(1, episode("g0-0")), (1, episode("g0-1"))])
    assert client.of("again", "episodes").ok["total"] == 2
    (root / "again").rename(root / "again.20260101-000000")
    write_log(make_run(root / "again"), [(1, episode("g5-0"))])
    assert names(client.of("again", "episodes")) == ["g5-0"]
    assert client.of("again.20260101-000000", "episodes").ok["total"] == 2


def test_a_torn_file_is_read_up_to_there(odd) -> None:
    root, client = odd
    run = make_run(root / "torn")
    shutil.copytree(OLDER, run / "episodes", dirs_exist_ok=True)  # an earlier ASTuner's, whose end is torn off
    last = run / "episodes" / "tokens-000003.arrows"
    last.write_bytes(last.read_bytes()[:-40])
    (run / "metrics.jsonl").write_text('{"step": 1, "time": 1.0}\nno json\n{"step": 2, "ti')
    found = client.of("torn").ok
    assert names(client.of("torn", "episodes")) == ["g-0", "h-0", "k-0", "k-1", "k-2"]
    assert (found["step"], found["episodes"]) == (1, 5)
    assert any("metrics.jsonl: 1 invalid lines" in problem for problem in found["problems"])
    assert len(found["problems"]) == 2


def test_a_log_that_is_no_log_is_a_problem_and_not_an_error(odd) -> None:
    root, client = odd
    run = make_run(root / "garbage")
    (run / "episodes" / "episodes.sqlite").write_bytes(b"\x00" * 1000)
    write_log(make_run(root / "newer"), [(1, episode("g0-0"))])
    (run / "resolved.yaml").write_text("a: [")
    (run / "certificate.json").write_text("{")
    found = client.of("garbage").ok
    assert found["episodes"] == 0
    assert {p.partition(" ")[0] for p in found["problems"]} >= {"resolved.yaml", "certificate.json"}
    assert {run["id"] for run in client.get("/api/runs").ok["runs"]} == {"garbage", "newer"}


def test_runs_have_ids_whatever_they_are_called(odd) -> None:
    root, client = odd
    for name in ("plain", "with space", "<script>alert(1)<", "deep/er", "ü.debug", ".hidden", "a%2fb", "~"):
        make_run(root / name)
    runs = {run["name"]: run["id"] for run in client.get("/api/runs").ok["runs"]}
    assert set(runs) == {"plain", "with space", "<script>alert(1)<", "deep/er", "ü.debug", "a%2fb", "~"}
    assert runs["plain"] == "plain"
    assert len(set(runs.values())) == 7
    for name, identity in runs.items():
        assert "/" not in identity
        assert client.of(identity).ok["name"] == name


def test_hostile_text_is_data(odd) -> None:
    root, client = odd
    run = make_run(root / "hostile")
    said = {"role": "assistant", "content": HOSTILE + "\ud800"}  # half a character, which UTF-8 cannot hold
    bad = episode("g0-0", turns=(turn(0, [1], [2], message=said, agent=HOSTILE, request=({"role": HOSTILE},)),))
    write_log(run, [(1, bad)])
    answer = client.of("hostile", "episodes/g0-0")
    assert answer.ok["turns"][0]["reply"] == said
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_numbers_that_json_does_not_have_are_null(odd) -> None:
    root, client = odd
    one = turn(0, [1], [2, 3, 4])
    odd_numbers = replace(one.generation, logprobs=(math.nan, -math.inf, -0.5))
    write_log(make_run(root / "nan"), [(1, episode("g0-0", turns=(replace(one, generation=odd_numbers),)))])
    (only,) = client.of("nan", "episodes/g0-0/tokens").ok["turns"]
    assert only["response"]["logprobs"] == [None, None, -0.5]


def test_trainer_logprobs_stand_at_their_tokens(tmp_path: Path, static: Path) -> None:
    from astuner_view.episodes import credited_paths, trained_turns

    run = make_run(tmp_path / "ratio")
    one = episode("g0-0")
    write_log(run, [(1, one)], {1: credited(one)})
    with EpisodeLog(run) as log:
        logged = log.read("g0-0")
    numbered = [
        replace(c, trainer_logprobs=tuple(float(100 * c.sample + i) for i in range(c.trained_tokens)))
        for c in logged.credit
    ]
    found = trained_turns(credited_paths(replace(logged, credit=tuple(numbered))))
    assert {index: t["trainer_logprobs"] for index, t in found.items()} == {
        0: (0.0, 1.0, 2.0, 3.0, 4.0, 5.0),
        1: (6.0, 7.0),
        4: (100.0, 101.0, 102.0),
    }


def test_large_answers_are_compressed(odd) -> None:
    root, client = odd
    write_log(make_run(root / "large"), [(1, episode(f"g{i}-0")) for i in range(100)])
    packed = client.get("/api/runs/large/episodes", accept_encoding="gzip")
    assert packed.headers["content-encoding"] == "gzip"
    plain = client.get("/api/runs/large/episodes")
    assert json.loads(gzip.decompress(packed.raw)) == plain.ok
    assert len(packed.raw) < len(plain.raw) / 4


def test_many_runs_can_be_looked_at(odd, monkeypatch: pytest.MonkeyPatch) -> None:
    root, client = odd
    monkeypatch.setattr("astuner_view.app.OPEN_LOGS", 2)
    for i in range(5):
        write_log(make_run(root / f"run{i}"), [(1, episode(f"g{i}-0"))])
    for _ in range(2):
        for i in range(5):
            assert names(client.of(f"run{i}", "episodes")) == [f"g{i}-0"]


def test_validations_are_a_split_of_their_own(tmp_path: Path) -> None:
    run = good_run(tmp_path / "splits")
    with EpisodeLog(run) as log:
        assert [s["step"] for s in log.steps(Split.VALIDATION.value)] == [0]
        assert log.steps("nothing") == []
