"""`astuner promote`: what is let through, refused, kept and gone back to; and what a killed one leaves."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

import astuner_local
from astuner import Config, RunDir, load_config
from astuner.cli import main
from astuner.contracts.errors import CheckpointError, ConfigError, RunError
from astuner_local.trainer.checkpoint import prune
from astuner_models.promoted import Promotions
from astuner_models.serving import find_checkpoint
from astuner_objectives.manifest import problem, write_manifest
from astuner_promote import card, gate, keeping
from astuner_promote.gate import Comparison, Judgement
from astuner_promote.keeping import Candidate, back, now_is, promote
from astuner_record.paired import PairedDifference
from astuner_record.statistics import Interval
from tests.table import table

TINY = Path(astuner_local.__file__).parent / "tiny" / "model"
EXAMPLE = Path(__file__).parents[3] / "examples" / "math_agent"
GOOD = Comparison(
    experiment="e.yaml",
    tasks=40,
    left_out=0,
    serving=0.1,
    candidate=0.6,
    interval=Interval(0.3, 0.7),
    p=0.001,
    failed_serving=0,
    failed_candidate=0,
)


def model(folder: Path, noise: float = 0.0) -> Path:
    """The tiny model, other weights with noise."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(TINY, folder)
    if noise:
        torch.manual_seed(round(noise * 1000))
        tensors = load_file(folder / "model.safetensors")
        noisy = {n: t + noise * t.std() * torch.randn(t.shape) if t.dim() > 1 else t for n, t in tensors.items()}
        save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def checkpoint(config: Config, step: int, noise: float) -> Path:
    folder = model(RunDir(config.run_dir).checkpoints / f"step-{step:06d}", noise)
    (folder / "resume").mkdir()
    (folder / "resume" / "state.json").write_text("{}")
    write_manifest(folder)
    return folder


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """An experiment with two checkpoints, whose model before training is worse."""
    monkeypatch.chdir(tmp_path)
    text = (EXAMPLE / "math_agent.yaml").read_text().replace("path: tiny-calculator", "path: weak")
    text = text.replace("file_path: data", f"file_path: {EXAMPLE}/data")
    Path("e.yaml").write_text(text.replace("workflow.py->", f"{EXAMPLE}/workflow.py->"))
    model(Path("weak"), 2.0)
    loaded = load_config("e.yaml", backbone="local")
    checkpoint(loaded, 10, 0.001)
    checkpoint(loaded, 20, 0.002)
    return loaded


def let_through(config: Config, name: str) -> Path:
    folder = find_checkpoint(config, name)
    assert folder is not None
    return promote(config, Candidate.of(config, folder), Promotions.read(config.run_dir), "# a card\n", {})


def typed(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*words])
    return int(ended.value.code or 0)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[Judgement], None]:
    def give(judged: Judgement) -> None:
        monkeypatch.setattr(gate.Gate, "judge", lambda self, serving, candidate: judged)

    return give


# -------------------------------------------------------------------------------------------------- what serves


def test_what_is_promoted_serves_and_the_way_back_is_step_by_step(config: Config) -> None:
    assert Promotions.read(config.run_dir) is None
    with pytest.raises(CheckpointError, match=r"nothing was promoted in .*--checkpoint best"):
        find_checkpoint(config, "promoted")
    first, second = let_through(config, "step-000010"), let_through(config, "step-000020")
    assert (
        find_checkpoint(config, "promoted")
        == second
        == config.run_dir.absolute().parent / ("e.promoted/0002/step-000020")
    )
    assert problem(first) == problem(second) == ""
    assert not (second / "resume").exists()
    assert (second / "README.md").read_text() == "# a card\n"
    assert back(config, Promotions.read(config.run_dir)) == first == find_checkpoint(config, "promoted")
    assert back(config, Promotions.read(config.run_dir)) is None
    assert find_checkpoint(config, "promoted") is None
    with pytest.raises(ConfigError, match="no previous model: the base model serves"):
        back(config, Promotions.read(config.run_dir))
    third = let_through(config, "step-000010")
    assert third.parent.name == "0003"
    now = Promotions.read(config.run_dir)
    assert now is not None
    assert [(change["by"], change["to"]) for change in now.changes] == [
        ("promote", "0001"),
        ("promote", "0002"),
        ("back", "0001"),
        ("back", None),
        ("promote", "0003"),
    ]
    assert now.entries["0003"]["before"] is None


def test_it_stays_when_the_run_deletes_its_checkpoints_and_when_the_next_run_begins(config: Config) -> None:
    kept, run = let_through(config, "step-000010"), RunDir(config.run_dir)
    weights = kept / "model.safetensors"
    assert weights.samefile(run.checkpoints / "step-000010" / "model.safetensors"), "no space is taken"
    prune(run.checkpoints, 1)
    assert [folder.name for folder in run.models] == ["step-000020"]
    run.start()
    assert run.models == []
    assert problem(kept) == ""
    assert find_checkpoint(config, "promoted") == kept


def test_going_back_to_what_is_damaged_is_refused(config: Config) -> None:
    first, second = let_through(config, "step-000010"), let_through(config, "step-000020")
    (first / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"0001.step-000010 is damaged: config.json has"):
        back(config, Promotions.read(config.run_dir))
    assert find_checkpoint(config, "promoted") == second


@table(
    "text",
    [
        "",
        "[]",
        '{"format": 1, "serving": "0009", "entries": {}, "changes": []}',
        '{"format": 1, "serving": null, "entries": {"../x": {"name": "m", "before": null}}, "changes": []}',
        '{"format": 1, "serving": null, "entries": {"0001": {"name": "../m", "before": null}}, "changes": []}',
    ],
)
def test_a_damaged_file_is_named(text: str, tmp_path: Path) -> None:
    folder = tmp_path / "e.promoted"
    folder.mkdir(exist_ok=True)
    (folder / "promoted.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"promoted.json is damaged: .* Move it away"):
        Promotions.read(tmp_path / "e")


def test_a_newer_file_is_not_guessed_at(tmp_path: Path) -> None:
    (tmp_path / "e.promoted").mkdir()
    (tmp_path / "e.promoted" / "promoted.json").write_text('{"format": 2}')
    with pytest.raises(CheckpointError, match="has the format 2, this version reads up to 1: upgrade"):
        Promotions.read(tmp_path / "e")


class Killed(BaseException):
    """No code of ours runs after it."""


@contextmanager
def dying(monkeypatch: pytest.MonkeyPatch, at: tuple[Any, str], calls: int) -> Iterator[None]:
    """The process is killed at the n-th call: nothing is tidied up."""
    real, left = getattr(*at), [calls]

    def dies(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise Killed
        return real(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(*at, dies)
        patched.setattr(shutil, "rmtree", lambda *arguments, **options: None)
        patched.setattr(Path, "unlink", lambda *arguments, **options: None)
        yield


@table(
    ("at", "calls"),
    [
        ((os, "link"), 1),
        ((os, "link"), 3),
        ((keeping, "write_manifest"), 1),
        ((keeping, "_flush"), 4),
        ((Path, "rename"), 1),
        ((os, "fsync"), 9),  # of the file that names what serves
        ((Path, "replace"), 1),
    ],
)
def test_a_promotion_that_is_killed_leaves_what_served(
    at: tuple[Any, str], calls: int, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(config.run_dir.with_name("e.promoted"), ignore_errors=True)
    first = let_through(config, "step-000010")
    before = Promotions.read(config.run_dir)
    with dying(monkeypatch, at, calls), pytest.raises(Killed):
        let_through(config, "step-000020")
    assert Promotions.read(config.run_dir) == before
    assert find_checkpoint(config, "promoted") == first
    second = let_through(config, "step-000020")
    assert find_checkpoint(config, "promoted") == second
    assert problem(second) == ""
    assert sorted(path.name for path in second.parents[1].iterdir()) == [".lock", "0001", "0002", "promoted.json"]


def test_who_was_overtaken_while_it_measured_changes_nothing(config: Config) -> None:
    folder = find_checkpoint(config, "step-000010")
    assert folder is not None
    candidate, before = Candidate.of(config, folder), Promotions.read(config.run_dir)
    other = let_through(config, "step-000020")
    with pytest.raises(RunError, match="another process promoted"):
        promote(config, candidate, before, "", {})
    assert find_checkpoint(config, "promoted") == other


# -------------------------------------------------------------------------------------------------- candidates


def test_a_candidate_that_is_damaged_or_of_another_model_is_refused(config: Config) -> None:
    weights = RunDir(config.run_dir).checkpoints / "step-000010" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=r"step-000010 is damaged: model.safetensors has .*--checkpoint NAME"):
        Candidate.of(config, weights.parent)
    (weights.parent / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"step-000010 is incomplete: model.safetensors is damaged"):
        Candidate.of(config, weights.parent)
    weights.write_bytes(whole)
    settings = json.loads((weights.parent / "config.json").read_text())
    (weights.parent / "config.json").write_text(json.dumps({**settings, "hidden_size": 128}))
    with pytest.raises(ConfigError, match=r"hidden_size is 128, but 64 in .*astuner.model.path"):
        Candidate.of(config, weights.parent)


def test_a_candidate_that_serves_already_is_named(config: Config) -> None:
    let_through(config, "step-000010")
    copy = shutil.copytree(RunDir(config.run_dir).checkpoints / "step-000010", "copy")
    with pytest.raises(ConfigError, match=r"copy is already serving \(promoted as 0001\)"):
        now_is(config, Promotions.read(config.run_dir), Candidate.of(config, Path(copy)))
    with pytest.raises(ConfigError, match=r"weak is already serving \(the base model\)"):
        now_is(config, None, Candidate.of(config, Path("weak")))


def test_a_link_out_of_the_checkpoint_is_not_followed(config: Config) -> None:
    folder = RunDir(config.run_dir).checkpoints / "step-000010"
    Path("id_rsa").write_text("a key")
    (folder / "vocab.txt").symlink_to(Path("id_rsa").resolve())
    with pytest.raises(CheckpointError, match=r"vocab\.txt links to a file outside"):
        let_through(config, "step-000010")
    assert Promotions.read(config.run_dir) is None


# --------------------------------------------------------------------------------------------------- the command


def test_a_refused_one_is_exit_code_4_with_every_reason(
    config: Config, measured: Callable[[Judgement], None], capsys: pytest.CaptureFixture[str]
) -> None:
    refused = Comparison(**{**vars(GOOD), "reason": "no better"})
    worse = Comparison(**{**vars(GOOD), "reason": "a regression"})
    check = gate.Checked(check="nonsense", most=0.0, complaints=2, episodes=40, first="v1-0: garbled")
    measured(Judgement(held_out=refused, also=[worse], checks=[check]))
    assert typed("promote", "e.yaml", "--backbone", "local") == 4
    said = capsys.readouterr().out
    assert "Rejected:\n  - no better\n  - a regression\n  - --check nonsense: failed 2 of 40" in said
    assert not config.run_dir.with_name("e.promoted").exists()


def test_success_is_stated_beside_a_reward_in_text_json_and_card(
    config: Config, measured: Callable[[Judgement], None], capsys: pytest.CaptureFixture[str]
) -> None:
    success = PairedDifference(
        before=0.184, after=0.15, mean=-0.034, interval=Interval(-0.2, 0.1), p=0.6, test="McNemar's exact test",
        tasks=40, changed={"became right": 1, "became wrong": 2},
    )  # fmt: skip
    by_reward = {"by": "reward", "success": success, "note": "success says little here"}
    measured(Judgement(held_out=Comparison(**{**vars(GOOD), **by_reward}), also=[], checks=[]))
    command = ("promote", "e.yaml", "--backbone", "local", "--checkpoint", "step-000010")
    assert typed(*command, "--dry-run") == 0
    said = capsys.readouterr().out
    assert "success on the same tasks fell from 18.4 % to 15.0 %" in said
    assert "success says little here" in said
    assert typed(*command, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["by"], told["held_out"]["success_fell"]) == ("reward", True)
    assert (told["held_out"]["success"]["before"], told["held_out"]["success"]["after"]) == (0.184, 0.15)
    assert "went from 18.4 % to 15.0 %" in (Path(told["model"]) / "README.md").read_text()


def test_a_trial_changes_nothing_and_the_real_one_has_a_card_and_a_history(
    config: Config, measured: Callable[[Judgement], None], capsys: pytest.CaptureFixture[str]
) -> None:
    measured(Judgement(held_out=GOOD, also=[], checks=[]))
    Path("weak/LICENSE").write_text("Do what you like.")
    Path("weak/README.md").write_text("---\nlicense: apache-2.0\n---\n# Weak\n")
    run = RunDir(config.run_dir)
    resolved = yaml.safe_load(config.dump_yaml())
    resolved["astuner"]["trainer_common"]["total_steps"] = 77
    run.resolved.write_text(yaml.safe_dump(resolved))
    run.metrics.write_text(
        '{"step": 20, "val/success": 0.5, "val/success_ci_low": 0.4, "val/success_ci_high": 0.6}\n'
        '{"step": 10, "val/success": 0.25, "val/success_ci_low": 0.1, "val/success_ci_high": 0.5}\n'
    )
    command = ("promote", "e.yaml", "--backbone", "local", "--checkpoint", "step-000010")
    assert typed(*command, "--dry-run") == 0
    assert "Would be promoted" in capsys.readouterr().out
    assert typed("promote", "e.yaml", "--list") == 0
    assert "No checkpoint was promoted yet" in capsys.readouterr().out
    assert typed(*command, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    kept = Path(told["model"])
    assert told["promoted"]
    assert told["held_out"]["interval"] == {"low": 0.3, "high": 0.7}
    assert kept == find_checkpoint(config, "promoted")
    card = (kept / "README.md").read_text()
    head = yaml.safe_load(card.split("---\n")[1])
    assert (head["base_model"], head["license"]) == ("weak", "apache-2.0")
    assert "| e.yaml | 40 | 0.100 | 0.600 | +0.500 | [+0.300, +0.700] | above 0 | 0.001 |" in card
    assert "| steps | 10 of 77 |" in card
    assert "| success in the run's validation | 0.250 [0.100, 0.500] |" in card
    assert "total_steps: 77" in card
    assert "apache-2.0. The base model's LICENSE is in this folder." in card
    assert (kept / "LICENSE").read_text() == "Do what you like."
    assert str(Path.cwd()) not in card, "no folders of the machine"
    assert problem(kept) == ""
    run.metrics.write_text("no row\n")
    run.resolved.write_text("astuner: [")
    run.origin.write_text("{}")
    assert typed(*command[:-1], "step-000020") == 0, "what it cannot read of a run, it does without"
    card = (config.run_dir.with_name("e.promoted") / "0002" / "step-000020" / "README.md").read_text()
    assert "| steps | 20 of 180 |" in card
    assert "the checkpoint is not in a run folder" in card
    assert typed("promote", "e.yaml", "--back") == 0
    capsys.readouterr()
    assert typed("promote", "e.yaml", "--list", "--json") == 0
    history = json.loads(capsys.readouterr().out)
    assert history["serving"] == "0001"
    assert history["entries"]["0001"]["folder"] == str(kept)
    assert typed("promote", "e.yaml", "--back") == 0
    assert "the base model serves again" in capsys.readouterr().out
    assert typed("promote", "e.yaml", "--list") == 0
    assert "0.100 -> 0.600 [+0.300, +0.700]" in capsys.readouterr().out


OTHER = "astuner: {model: {path: tiny-calculator}, task_reader: {type: jsonl, jsonl: {training: {file_path: held}}}}"


@table(
    ("options", "code", "says"),
    [
        (["--checkpoint", "base"], 2, "--checkpoint base is the base model"),
        (["--checkpoint", "step-000099"], 1, "step-000099 is not a model folder"),
        (
            ["--tasks", "5"],
            2,
            "5 validation tasks are too few",
        ),
        (["--also", "none.yaml"], 2, "none.yaml: the task reader returns no validation tasks"),
        (["--check", "nonsens"], 2, "--check nonsens is neither an output check nor a judge"),
        (["--check", "nonsense=2"], 2, "NAME=SHARE"),
        (["--by", "luck"], 2, "--by luck is invalid. Use success or reward"),
        (["--back", "--list"], 2, "Remove --list and --dry-run"),
        (
            ["--back"],
            2,
            "no previous model: nothing was promoted",
        ),
        (
            ["--also", "other.yaml"],
            2,
            "its model is tiny-calculator, but the candidate was trained from weak. Set astuner.model.path",
        ),
    ],
)
def test_what_is_asked_wrongly_is_said_before_anything_is_played(
    options: list[str], code: int, says: str, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("held").write_text("".join(json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n" for _ in range(8)))
    Path("other.yaml").write_text(OTHER)
    Path("none.yaml").write_text(OTHER.replace("tiny-calculator", "weak"))
    capsys.readouterr()
    assert typed("promote", "e.yaml", "--backbone", "local", *options) == code
    assert says in capsys.readouterr().err


def test_tasks_that_are_trained_on_are_no_measure(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before anything is played; where the experiment allows it, they are not called held out."""
    file = f"file_path={EXAMPLE}/data/train.jsonl"
    same = [f"astuner.task_reader.jsonl.{split}.{file}" for split in ("training", "validation")]
    folder = find_checkpoint(config, "step-000010")
    assert folder is not None
    with pytest.raises(ConfigError, match=r"40 of 40 tasks .* or set astuner\.data\.leakage=allow"):
        gate.Gate(config=load_config("e.yaml", same, backbone="local"), checks={}, tasks=40).judge(None, folder)
    monkeypatch.setattr(gate.Gate, "_play", lambda self, config, tasks, folder: [])
    monkeypatch.setattr(gate, "compare", lambda *a, **k: GOOD)
    allowed = load_config("e.yaml", [*same, "astuner.data.leakage=allow"], backbone="local")
    judged = gate.Gate(config=allowed, checks={}, tasks=40).judge(None, folder)
    assert (judged.reasons, judged.tasks) == ([], "validation")
    figures = card._figures(gate.Gate(config=allowed, checks={}), judged, "base")
    assert "Overlap with training tasks: Validation is not held out" in "\n".join(figures)
    apart = gate.Gate(config=config, checks={}, tasks=40).judge(None, folder)
    assert apart.tasks == "held out"


@pytest.mark.slow
def test_both_models_play_and_the_better_one_is_let_through(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    """The tiny model finds about a quarter of the answers, and none with these weights before training."""
    other = Path("e.yaml").read_text().replace("temperature: 1.0            # validate", "temperature: 0  # validate")
    Path("other.yaml").write_text(other)
    command = ("promote", "e.yaml", "--backbone", "local", "--tasks", "40", "--check", "nonsense=0.2")
    assert typed(*command, "--also", "other.yaml", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["reasons"], told["serving"]) == ([], "base")
    assert told["held_out"]["interval"]["low"] > 0
    assert [one["experiment"] for one in told["also"]] == ["other.yaml"]
    assert told["checks"][0]["episodes"] == 80
    assert typed(*command, "--checkpoint", "step-000010", "--json") == 4, "almost the same weights"
    again = json.loads(capsys.readouterr().out)
    assert again["serving"] == told["model"]
    assert again["held_out"]["serving"] == told["held_out"]["candidate"], "the same seeds give the same figures"
    assert "(--margin)" in again["reasons"][0]
