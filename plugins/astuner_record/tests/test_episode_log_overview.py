"""What a log says of steps, groups and values, and where an episode is in a list."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from astuner.contracts.errors import DataError
from astuner.contracts.types import Episode, FinishReason, Generation, JudgeOutput, Split, StopReason, Turn
from astuner_record.episode_log import EpisodeLog, EpisodeLogWriter, store
from astuner_testing.fakes import workflow_task


def episode(name: str, reward: float | None, *, split: Split = Split.TRAIN, said: str = "x", **more: object) -> Episode:
    said_ids = {"response_ids": (3,) * 4, "logprobs": (-1.0,) * 4}
    generation = Generation(prompt_ids=(1, 2), **said_ids, finish_reason=FinishReason.STOP, policy_version=0)
    message = {"role": "assistant", "content": said}
    settings: dict[str, object] = {
        "workflow_task": replace(workflow_task(split=split), episode_id=name, group_id=name.partition("-")[0]),
        "turns": (Turn(index=0, agent="solver", generation=generation, continues=None, message=message),),
        "output": None,
        "verdict": None if reward is None else JudgeOutput(reward=reward),
        "stop_reason": StopReason.WORKFLOW_FAILED if reward is None else StopReason.COMPLETED,
        "seconds": 2.0,
    }
    return Episode(**settings | more)  # type: ignore[arg-type]


def logged(folder: Path, *episodes: tuple[int, Episode]) -> EpisodeLog:
    writer = EpisodeLogWriter(folder / "episodes")
    for step, one in episodes:
        writer.episode(step, one)
    writer.close()
    return EpisodeLog(folder)


def test_steps_and_groups_are_of_what_has_a_verdict(tmp_path: Path) -> None:
    with logged(
        tmp_path,
        (0, episode("v-0", 1.0, split=Split.VALIDATION)),
        (3, episode("a-0", 0.0)),
        (3, episode("a-1", 1.0)),
        (3, episode("a-2", None)),
        (3, episode("b-0", None, stop_reason=StopReason.CANCELLED)),
        (4, episode("c-0", 0.1)),
        (4, episode("c-1", 0.1)),
        (4, episode("c-2", 0.1)),
    ) as log:
        third, fourth = log.steps()
        assert [third[name] for name in ("step", "episodes", "groups", "scored", "failed")] == [3, 4, 2, 2, 1]
        assert [third[name] for name in ("reward_mean", "reward_min", "reward_max", "success")] == [0.5, 0.0, 1.0, 0.5]
        assert (third["tokens"], third["seconds_max"]) == (16, 2.0)
        assert fourth["success"] == 0.0
        assert [s["step"] for s in log.steps("validation")] == [0]
        groups = {g["group_id"]: g for g in log.groups(["split=train"])}
        assert list(groups) == ["a", "b", "c"]
        assert [groups["a"][name] for name in ("reward_mean", "reward_std", "scored")] == [0.5, 0.5, 2]
        assert [groups["b"][name] for name in ("reward_mean", "reward_std", "success")] == [None, None, None]
        assert groups["c"]["reward_std"] == 0.0  # exactly: this group teaches nothing
        assert log.count_groups() == 4
        assert [g["group_id"] for g in log.groups(["split=train"], limit=1, offset=1)] == ["b"]


def test_values_are_counted(tmp_path: Path) -> None:
    failed = [episode(f"a-{i}", None, error=f"no space\nline {i}") for i in range(3)]
    with logged(tmp_path, *((1, one) for one in failed), (7, episode("a-3", -2.5))) as log:
        facets = log.facets()
        assert facets["stop_reason"] == (("workflow_failed", 3), ("completed", 1))
        assert facets["error"] == (("no space", 3),)
        assert (facets["agent"], facets["tool"]) == ((("solver", 4),), ())
        assert (facets["step"], facets["reward"]) == ((1, 7), (-2.5, -2.5))


def test_a_place_in_a_list_is_that_of_the_list(tmp_path: Path) -> None:
    rewards = [0.5, None, 0.5, 1.0, 0.0, 0.5, None]
    with logged(tmp_path, *((i // 3, episode(f"g-{i}", reward)) for i, reward in enumerate(rewards))) as log:
        for order in ("written", "reward", "step", "time"):
            for descending in (False, True):
                for where in ([], ["reward>=0.5"], ["reward=none"]):
                    names = [e.episode_id for e in log.list(where, order=order, descending=descending)]
                    for name in (f"g-{i}" for i in range(7)):
                        place = log.position(name, where, order=order, descending=descending)
                        assert place == (names.index(name) if name in names else None)
        assert log.position("nobody") is None
        with pytest.raises(ValueError, match="order must be one of"):
            log.position("g-0", order="reward; DROP TABLE episodes")


def test_half_a_character_does_not_end_the_log(tmp_path: Path) -> None:
    half = "apple \ud83d"  # what a model says is cut off in the middle of a character: UTF-8 and SQLite cannot hold it
    call = {"role": "assistant", "content": half, "tool_calls": [{"function": {"name": half, "arguments": half}}]}
    one = episode("g-0", 1.0, said=half)
    turns = (one.turns[0], replace(one.turns[0], index=1, message=call))
    with logged(tmp_path, (1, replace(one, turns=turns)), (1, episode("g-1", 1.0))) as log:
        assert log.count() == 2
        assert [e.episode_id for e in log.list(["text~apple"])] == ["g-0"]
        assert log.read("g-0").episode.turns[0].message["content"] == half


def test_a_log_that_is_large_leaves_its_readers_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once more waited for the lists than a reader should enter, only a little does: who compares runs reads many."""
    monkeypatch.setattr(store, "_UNLISTED", 20_000)
    monkeypatch.setattr(store, "_AT_ONCE", 1_000)

    def listed(count: int) -> int:
        folder = tmp_path / str(count)
        writer = EpisodeLogWriter(folder / "episodes")
        for i in range(count):
            writer.episode(1, episode(f"g{i}-0", 1.0))
        writer.close()
        with closing(store.connect_to_read(folder / "episodes")) as db:
            return int(db.execute("SELECT count(*) FROM main.episodes").fetchone()[0])

    assert listed(10) == 0
    assert listed(100) > 90


def test_episodes_are_counted_once_without_listing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In both lists, in none, and written again: in the database's lists, and in those that only the reader has."""
    writer = EpisodeLogWriter(tmp_path / "episodes")
    for name in ("a-0", "b-0", "c-0"):
        writer.episode(1, episode(name, 0.0))
    with closing(store.connect(tmp_path / "episodes")) as db:
        store.list_some(db)
    for name in ("b-0", "d-0", "d-0", "e-0"):
        writer.episode(2, episode(name, 1.0))
    writer.close()
    with EpisodeLog(tmp_path, check=False) as log:
        with monkeypatch.context() as nothing_is_listed:
            nothing_is_listed.setattr("astuner_record.episode_log.reader.list_all", lambda db: pytest.fail("listed"))
            assert log.count() == 5
        assert (log.count(["reward>=0"]), log.count()) == (5, 5)
        assert sorted((one.episode_id, one.step) for one in log.list()) == [
            *(("a-0", 1), ("b-0", 2), ("c-0", 1), ("d-0", 2), ("e-0", 2)),
        ]


def test_a_task_is_that_of_the_whole_episode(tmp_path: Path) -> None:
    with logged(tmp_path, (1, episode("a-0", 1.0))) as log:
        (listed,) = log.list()
        row = log.read(listed).row
        assert log.task(listed) == (row["query"], json.loads(row["task"]))
        with pytest.raises(DataError, match="replaced by a resumed run"):
            log.task(replace(listed, id=1))
