"""`astuner run` on the real tiny model with the real AgentScope agent: it trains, saves, stops and goes on."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from astuner import evaluate, run
from astuner.cli import main
from astuner.contracts.errors import AstunerError, CheckpointError, Interrupted, RunError
from astuner.runs.launch import RunResult
from astuner.runs.run import TrainingRun
from astuner.testing import check_metrics
from astuner_local.trainer.checkpoint import is_complete

from .conftest import EXAMPLE

Overrides = Callable[..., list[str]]


def train(overrides: list[str], **options: Any) -> RunResult:
    return run(EXAMPLE, overrides, backbone="local", **options)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_everything_a_person_needs(short: Overrides, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result = train(short())
    folder = tmp_path / "run"
    check_metrics(rows(folder), backbone="local")
    steps = [row for row in rows(folder) if "reward/mean" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(row["kl/mismatch_max"] <= 1e-3 for row in steps if "kl/mismatch_max" in row)
    assert any("kl/mismatch_max" in row for row in steps)
    assert [row["step"] for row in rows(folder) if "val/success" in row] == [0, 3]
    checkpoint = folder / "checkpoints" / "step-000003"
    (resume,) = (folder / "resume").iterdir()
    plan = (folder / "run.log").read_text()
    said = re.search(r"Disk +([\d.]+) MiB per checkpoint .*? and ([\d.]+) MiB to resume", plan)
    assert said, plan
    for planned, there in zip(said.groups(), (checkpoint, resume), strict=True):
        size = sum(f.stat().st_size for f in there.rglob("*") if f.is_file()) / 2**20
        assert float(planned) == pytest.approx(size, rel=0.2)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1 + 1?"}], add_generation_prompt=True, return_tensors="pt"
    )
    assert model(**prompt).logits.isfinite().all()
    assert (folder / "reward_curve.png").read_bytes().startswith(b"\x89PNG")
    episodes = [json.loads(line) for line in (folder / "episodes" / "step_000001.jsonl").read_text().splitlines()]
    assert len(episodes) == 16
    assert episodes[0]["turns"][0]["new_messages"][0]["role"] == "system"
    assert "before" in result.summary()
    assert "after" in result.summary()
    summary = json.loads((folder / "summary.json").read_text())
    endings = ("completed", "truncated", "check_aborted", "context_overflow")
    assert sum(summary["ledger"].get(k, 0) for k in endings) == 3 * 16
    assert sum(summary["ledger"].get(f"validation/{k}", 0) for k in endings) == 2 * 16

    evaluation = evaluate(EXAMPLE, short(), backbone="local", tasks=8)
    assert evaluation.tasks == 8
    assert evaluation.ci_low <= evaluation.success <= evaluation.ci_high


def test_a_probe_predicts_the_time_and_a_run_reports_phases_as_json(
    short: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", str(EXAMPLE), *short("astuner.trainer_common.total_steps=4"), "--backbone", "local", "--json"]
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--probe"])
    estimate = json.loads(capsys.readouterr().out)["estimate"]
    assert 0 < estimate["seconds_low"] < estimate["seconds"] < estimate["seconds_high"]
    assert estimate["cost"] == 0
    assert [row["step"] for row in rows(tmp_path / "run.probe") if "reward/mean" in row] == [1, 2, 3]
    assert not (tmp_path / "run.probe" / "checkpoints").exists()
    assert not (tmp_path / "run").exists()

    with pytest.raises(SystemExit, match="0"):
        main(command)
    events = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith('{"event"')]
    assert [e["step"] for e in events if e["event"] == "step"] == [1, 2, 3, 4]
    assert [e["step"] for e in events if e["event"] == "validation"] == [0, 4]
    progress = [e for e in events if e["event"] == "progress"]
    assert {e["phase"] for e in progress} == {"starting", "rollout", "update", "validation", "saving"}
    assert all(e["remaining_seconds"] >= 1 for e in progress), "the probe gives an estimate from the start"
    ended = json.loads((tmp_path / "run" / "progress.json").read_text())
    assert (ended["phase"], ended["step"], ended["remaining_seconds"]) == ("finished", 4, 0)
    assert ended["elapsed_seconds"] >= progress[-1]["elapsed_seconds"]


def test_a_probe_needs_a_backbone_that_trains(short: Overrides, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run", str(EXAMPLE), *short(), "--backbone", "debug", "--probe"])
    assert "does not train" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("trainer_common.algorithm.loss=dapo", "trainer_common.algorithm.max_draws=2"),
        ("trainer_common.algorithm.loss=dr_grpo",),
        ("trainer_common.algorithm.loss=gspo", "trainer_common.mini_batch_num=2"),
        ("trainer_common.algorithm.loss=cispo", "trainer_common.algorithm.rollout_is=token-truncate"),
        ("trainer_common.algorithm.loss=rloo", "trainer_common.use_kl_loss=true"),
        ("trainer_common.algorithm.loss=reinforce_plus_plus", "trainer_common.algorithm.use_kl_in_reward=true"),
        ("model.lora.rank=4", "trainer_common.use_kl_loss=true", "trainer_common.optim.optimizer=adamw"),
        (
            "model.dtype=bfloat16",
            "trainer_common.activation_checkpointing=true",
            "trainer_common.micro_batch_tokens=256",
        ),
        ("rollout.oversample=1.5", "trainer_common.entropy_coeff=0.01"),
    ],
    ids=lambda s: s[0].rpartition(".")[2],
)
def test_every_way_of_training_runs(short: Overrides, tmp_path: Path, settings: tuple[str, ...]) -> None:
    # Each needs a batch with something to learn from in three steps; 8 x 8 has one for this model and seed.
    sizes = ("astuner.data.train_batch_size=8", "astuner.rollout.num_repeat=8", "astuner.data.max_validation_tasks=4")
    train(short(*sizes, *(f"astuner.{s}" for s in settings)))
    steps = [row for row in rows(tmp_path / "run") if "reward/mean" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert any(row.get("grad_norm", 0) > 0 for row in steps)
    assert (tmp_path / "run" / "checkpoints" / "step-000003" / "model.safetensors").exists()


@pytest.mark.slow
def test_the_same_seed_starts_from_the_same_draws_and_a_rerun_keeps_the_first(short: Overrides, tmp_path: Path) -> None:
    train(short("astuner.trainer_common.total_steps=1"))
    first = (tmp_path / "run" / "episodes" / "step_000001.jsonl").read_text()
    train(short("astuner.trainer_common.total_steps=1"), resume="never")
    second = (tmp_path / "run" / "episodes" / "step_000001.jsonl").read_text()
    queries = [[json.loads(line)["query"] for line in text.splitlines()] for text in (first, second)]
    assert queries[0] == queries[1]
    assert len([p for p in tmp_path.iterdir() if p.name.startswith("run.")]) == 1


@pytest.mark.slow
def test_a_finished_run_goes_on_when_it_is_given_more_steps(short: Overrides, tmp_path: Path) -> None:
    train(short("astuner.trainer_common.total_steps=2"))
    (tmp_path / "run" / ".report.html.1.tmp").write_text("half a file, of a process that was killed")
    train(short("astuner.trainer_common.total_steps=4"), resume="must")
    assert list((tmp_path / "run").glob(".*.tmp")) == []
    steps = [row["step"] for row in rows(tmp_path / "run") if "reward/mean" in row]
    assert steps == [1, 2, 3, 4]
    ledger = json.loads((tmp_path / "run" / "summary.json").read_text())["ledger"]
    validated = sum(n for name, n in ledger.items() if name.startswith("validation/"))
    assert validated == 3 * 16, "what was validated after the state was saved counts too"


@pytest.mark.slow
def test_a_disk_that_is_full_when_the_books_are_closed_is_told_in_one_line(
    short: Overrides, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = TrainingRun.close

    def close(self: TrainingRun) -> None:
        whole(self)
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(TrainingRun, "close", close)
    with pytest.raises(RunError, match=r"[Ff]ree (disk )?space"):
        train(short("astuner.trainer_common.total_steps=1", "astuner.data.max_validation_tasks=1"))


def test_there_must_be_something_to_resume(short: Overrides, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="nothing to resume"):
        train(short(), resume="must")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.log").write_text("killed before anything was saved")
    with pytest.raises(RunError, match=r"nothing was saved yet.* --no-resume"):
        train(short(), resume="must")
    (tmp_path / "run" / "resolved.yaml").write_text("a: [")
    with pytest.raises(RunError, match=r"(?s)resolved.yaml is damaged: .* --resume .*--no-resume"):
        train(short())


def flip_a_bit(file: Path) -> None:
    damaged = bytearray(file.read_bytes())
    damaged[-100] ^= 1
    file.write_bytes(damaged)


def test_a_run_goes_on_from_the_newest_state_that_is_whole_or_says_that_there_is_none(
    short: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    save = "astuner.trainer_common.save_freq=1"
    quick = ("astuner.trainer_common.val_before_train=false", "astuner.data.max_validation_tasks=2")

    def steps() -> list[int]:
        return [row["step"] for row in rows(folder) if "reward/mean" in row]

    train(short(save, *quick))
    flip_a_bit(folder / "resume" / "step-000003" / "model.safetensors")
    (folder / "checkpoints" / "step-000003" / "resume" / "trainer.safetensors").unlink()
    train(short(save, *quick, "astuner.trainer_common.total_steps=4"), resume="must")
    said = capsys.readouterr().err
    assert "resume/step-000003 cannot be used: model.safetensors was changed or damaged" in said
    assert "checkpoints/step-000003 cannot be used: resume/trainer.safetensors is missing" in said
    assert "from checkpoints/step-000002" in said
    assert steps() == [1, 2, 3, 4]
    whole = [(path.name, is_complete(path)) for path in sorted((folder / "checkpoints").iterdir())]
    assert whole[-2:] == [("step-000003", True), ("step-000004", True)], "the damaged one was written anew"
    assert [path.name for path in (folder / "resume").iterdir()] == ["step-000004"]

    flip_a_bit(folder / "resume" / "step-000004" / "model.safetensors")
    with pytest.raises(SystemExit, match="0"):
        main(["doctor", str(folder)])
    said = capsys.readouterr().out
    assert re.search(r"warn  resume/step-000004 +cannot be used: model.safetensors was changed", said)
    assert re.search(r"ok    resume +from checkpoints/step-000004\n +type: astuner run .* --resume\n", said)
    for state in folder.glob("checkpoints/*"):
        flip_a_bit(state / "model.safetensors")
    for insists in ("must", "auto"):
        (folder / "summary.json").unlink(missing_ok=True)
        with pytest.raises(RunError, match=r"nothing to resume .*step-000004 cannot be used: .*--no-resume"):
            train(short(save, *quick, "astuner.trainer_common.total_steps=5"), resume=insists)
    assert steps() == [1, 2, 3, 4]
    assert not list(tmp_path.glob("run.*")), "nothing was moved away"
    with pytest.raises(SystemExit, match="1"):
        main(["doctor", str(folder)])
    assert re.search(r"fail  resume +no state is intact.*\n +type: .* --no-resume\n", capsys.readouterr().out)


@pytest.mark.slow
def test_a_learning_rate_of_zero_changes_no_weight(short: Overrides, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from astuner_local.plugin import locate_model

    train(short("astuner.trainer_common.optim.lr=0", "astuner.data.train_batch_size=8", "astuner.rollout.num_repeat=8"))
    before = load_file(Path(str(locate_model("tiny-calculator"))) / "model.safetensors")
    after = load_file(tmp_path / "run" / "checkpoints" / "step-000003" / "model.safetensors")
    assert all((after[name] == tensor).all() for name, tensor in before.items())


def start(overrides: list[str], *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "astuner", "run", str(EXAMPLE), "--backbone", "local", *options, *overrides]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        if (folder / "metrics.jsonl").exists() and f'"step": {step}' in (folder / "metrics.jsonl").read_text():
            return
        time.sleep(0.02)
    pytest.fail(f"step {step} was not reached: {process.communicate()[0]}")


@pytest.mark.parametrize("kills", [(2,), pytest.param((2, 9), marks=pytest.mark.slow)], ids=["once", "twice"])
def test_kill_9_at_any_moment_repeats_at_most_the_unfinished_step(
    short: Overrides, tmp_path: Path, kills: tuple[int, ...]
) -> None:
    overrides, folder = short("astuner.trainer_common.total_steps=40"), tmp_path / "run"
    steps_in_all = kills[-1] + 5  # the next step may be over before the process is
    for reached in kills:
        process = start(overrides)
        wait_for_step(folder, reached, process)
        time.sleep(random.random() * 0.3)  # anywhere in a step: rollout, update, or saving
        process.kill()
        process.communicate()
        finished = [row["step"] for row in rows_so_far(folder) if "reward/mean" in row]
        assert finished == list(range(1, finished[-1] + 1))
    process = start([*overrides, f"astuner.trainer_common.total_steps={steps_in_all}"], "--resume")
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 0, output
    resumed_from = int(output.split("from resume/step-")[1][:6])
    assert resumed_from >= finished[-1] - 1
    steps = [row["step"] for row in rows(folder) if "reward/mean" in row]
    assert steps == list(range(1, steps_in_all + 1))
    groups = [
        json.loads(line)["group_id"]
        for p in sorted((folder / "episodes").glob("step_*"))
        for line in p.read_text().splitlines()
    ]
    assert len(set(groups)) == steps_in_all * 4  # no task was skipped, none was drawn twice


def rows_so_far(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@pytest.mark.slow
def test_ctrl_c_ends_in_order_and_says_how_to_go_on(short: Overrides, tmp_path: Path) -> None:
    process = start(short("astuner.trainer_common.total_steps=500"))
    wait_for_step(tmp_path / "run", 2, process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "--resume" in output
    assert "Traceback" not in output
    saved = sorted((tmp_path / "run" / "resume").iterdir())
    assert len(saved) == 1
    assert saved[0].name >= "step-000002"


@pytest.mark.slow
def test_two_runs_never_share_a_folder(short: Overrides, tmp_path: Path) -> None:
    process = start(short("astuner.trainer_common.total_steps=500"))
    try:
        wait_for_step(tmp_path / "run", 1, process)
        with pytest.raises(RunError, match=f"in use by another run .pid {process.pid}"):
            train(short())
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_full_disk_ends_with_a_message_and_the_last_state_intact(short: Overrides, tmp_path: Path) -> None:
    """A file-size limit makes the kernel refuse writes just as a full disk does."""
    train(short("astuner.trainer_common.total_steps=1"))
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000));"
        "from astuner.cli import main; sys.argv = ['astuner', *sys.argv[1:]]; main()"
    )
    command = [sys.executable, "-c", code, "run", str(EXAMPLE), "--backbone", "local", "--resume", *short()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, done.stderr
    assert "cannot write" in done.stderr
    assert "--resume" in done.stderr
    assert "Traceback" not in done.stderr
    assert [p.name for p in (tmp_path / "run" / "resume").iterdir()] == ["step-000001"]


@pytest.mark.slow
def test_a_run_whose_folder_is_removed_ends_with_a_message(short: Overrides, tmp_path: Path) -> None:
    process = start(short("astuner.trainer_common.total_steps=500"))
    try:
        wait_for_step(tmp_path / "run", 1, process)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)  # what was written meanwhile
        said, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 1, said
    assert f"its folder {tmp_path / 'run'} was removed. Start again: astuner run" in said
    assert "Traceback" not in said


BAD = {
    "model folder": (["astuner.model.path=./no/such/folder"], "no such folder"),
    "hub name": (["astuner.model.path=acme/no-such-model"], "astuner.model.path"),
    "data": (["astuner.task_reader.jsonl.training.file_path=nowhere.jsonl"], "nowhere.jsonl"),
    "greedy training": (["astuner.rollout.temperature=0"], "temperature"),
    "context": (["astuner.rollout.max_model_len=1000000"], "max_model_len"),
    "parallelism": (["astuner.rollout.tensor_model_parallel_size=2"], "tensor_model_parallel_size"),
    "loss": (["astuner.trainer_common.algorithm.loss=gpro"], "gpro"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_what_cannot_work_is_said_before_anything_starts(
    short: Overrides, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    overrides, says = BAD[name]
    with pytest.raises(AstunerError, match=says):
        train(short(*overrides))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_folder_that_is_no_checkpoint_is_refused(short: Overrides, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a model folder"):
        evaluate(EXAMPLE, short(), backbone="local", checkpoint=str(tmp_path))


def test_a_step_in_which_most_episodes_fail_stops_the_run(short: Overrides, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "from astuner import Workflow\nclass Broken(Workflow):\n"
        "    async def execute(self, workflow_task, model_tuner):\n        raise KeyError('oops')\n"
    )
    with pytest.raises(RunError, match=r"16 of 16 episodes failed.*KeyError"):
        train(
            short(
                f"astuner.rollout.workflow={tmp_path}/broken.py->Broken",
                "astuner.trainer_common.val_before_train=false",
            )
        )
    failures = [json.loads(line) for line in (tmp_path / "run" / "failures.jsonl").read_text().splitlines()]
    assert len([f for f in failures if "KeyError" in f.get("error", "")]) == 16
    assert len([f for f in failures if f.get("dropped") == "0 of 4 episodes were scored"]) == 4


def test_secrets_in_the_environment_are_not_written_down(
    short: Overrides, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "OPENAI_API_KEY", "sk-very-secret")
    train(short("astuner.trainer_common.total_steps=1"))
    text = [p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()]
    assert not any(b"sk-very-secret" in t for t in text)


def interrupted_at(monkeypatch: pytest.MonkeyPatch, overrides: list[str], where: str, step: int) -> None:
    """Run until ``Experiment.<where>`` of ``step`` begins, and press Ctrl-C there."""
    from astuner.runs.run import TrainingRun

    original = getattr(TrainingRun, where)

    def press(self: TrainingRun, models: Any, at: int) -> Any:
        if at == step:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, models, at)

    with monkeypatch.context() as patched:
        patched.setattr(TrainingRun, where, press)
        with pytest.raises(Interrupted):
            train(overrides)


@pytest.mark.slow
@pytest.mark.parametrize(("where", "step"), [("validate", 0), ("rollout", 1), ("rollout", 3), ("validate", 3)])
def test_ctrl_c_at_any_moment_loses_nothing_that_was_due(
    short: Overrides, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, step: int
) -> None:
    interrupted_at(monkeypatch, short(), where, step)
    assert not (tmp_path / "run" / "summary.json").exists()
    result = train(short())  # the same command goes on by itself
    found = rows(tmp_path / "run")
    assert [row["step"] for row in found if "reward/mean" in row] == [1, 2, 3]
    assert [row["step"] for row in found if "val/success" in row] == [0, 3]
    assert (tmp_path / "run" / "checkpoints" / "step-000003" / "config.json").exists()
    assert (tmp_path / "run" / "summary.json").exists()
    assert "Success before " in result.summary()


@pytest.mark.slow
def test_a_resumed_run_draws_new_random_numbers(short: Overrides, tmp_path: Path) -> None:
    # one and the same task in every step: with the first step's random numbers its answers would come again
    (tmp_path / "one.jsonl").write_text(
        '{"question": "Tom has 3 pens and gets 4 more. How many now?", "answer": "7"}\n'
    )
    one = (f"astuner.task_reader.jsonl.training.file_path={tmp_path}/one.jsonl", "astuner.trainer_common.optim.lr=0")
    epochs = "astuner.trainer_common.total_epochs=100"
    train(short(*one, epochs, "astuner.trainer_common.total_steps=1"))
    train(short(*one, epochs, "astuner.trainer_common.total_steps=2"), resume="must")
    texts = []
    for step in (1, 2):
        lines = (tmp_path / "run" / "episodes" / f"step_{step:06d}.jsonl").read_text().splitlines()
        texts.append([[t["reply"] for t in json.loads(line)["turns"]] for line in lines])
    assert texts[0] != texts[1]


@pytest.mark.slow
def test_dynamic_sampling_with_oversampling_trains_on_whole_groups_only(short: Overrides, tmp_path: Path) -> None:
    settings = ("astuner.trainer_common.algorithm.dynamic_sampling=true", "astuner.rollout.oversample=2")
    train(short(*settings, "astuner.trainer_common.save_episodes=-1"))
    for path in (tmp_path / "run" / "episodes").glob("step_*"):
        groups = [json.loads(line)["group_id"] for line in path.read_text().splitlines()]
        assert {groups.count(g) for g in groups} == {4}


def test_eval_says_when_there_is_no_checkpoint_or_nothing_could_be_judged(short: Overrides, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*--checkpoint base"):
        evaluate(EXAMPLE, short(), backbone="local")
    (tmp_path / "judge.py").write_text(
        "from astuner import Judge\nclass Down(Judge):\n"
        "    def judge(self, workflow_task, output):\n        raise ConnectionError('down')\n"
    )
    down = short(f"astuner.task_judge.judge={tmp_path}/judge.py->Down")
    with pytest.raises(RunError, match=r"none of 4 episodes could be scored.*judge_failed.*ConnectionError: down"):
        evaluate(EXAMPLE, down, backbone="local", checkpoint="base", tasks=4)


def test_a_half_written_checkpoint_is_never_the_latest(short: Overrides, tmp_path: Path) -> None:
    train(short("astuner.trainer_common.total_steps=1"))
    half = tmp_path / "run" / "checkpoints" / "step-000009.tmp-123"
    half.mkdir()
    (half / "config.json").write_text("{}")
    assert evaluate(EXAMPLE, short(), backbone="local", tasks=2).tasks == 2


@pytest.mark.slow
def test_a_workflow_that_blocks_the_event_loop_is_named_counted_and_does_not_stop_the_run(
    short: Overrides, tmp_path: Path
) -> None:
    (tmp_path / "blocks.py").write_text(
        "import time\nfrom astuner import Workflow, WorkflowOutput\nclass Blocks(Workflow):\n"
        "    async def execute(self, workflow_task, model_tuner):\n"
        "        if workflow_task.attempt == 0:\n            time.sleep(600)\n"
        "        await model_tuner.chat([{'role': 'user', 'content': workflow_task.task.main_query}])\n"
        "        return WorkflowOutput(reward=float(workflow_task.attempt % 2))\n"
    )
    settings = ("astuner.rollout.episode_timeout=1", "astuner.trainer_common.val_before_train=false")
    one = (
        "astuner.trainer_common.total_steps=1",
        "astuner.data.max_validation_tasks=2",
        "astuner.data.train_batch_size=2",
    )
    with pytest.raises(RunError, match=r"none of 2 episodes.*timed_out"):  # validation has attempt 0 only
        train(short(f"astuner.rollout.workflow={tmp_path}/blocks.py->Blocks", *settings, *one))
    (step,) = [row for row in rows(tmp_path / "run") if "reward/mean" in row]
    assert step["rollout/errored_frac"] == pytest.approx(0.25)
    assert "blocks.py:6 in execute blocks the event loop" in (tmp_path / "run" / "run.log").read_text()
