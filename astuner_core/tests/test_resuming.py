"""A run resumes with its own tasks, order and validation tasks only; what differs is named, with the way out."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from astuner.config import Config
from astuner.contracts.backbone import Backbone, Capabilities, Served
from astuner.contracts.errors import RunError
from astuner.contracts.types import Task
from astuner.runs.command import RunCommand
from astuner.runs.fingerprint import Fingerprint, describe_count, describe_difference, digest
from astuner.runs.resuming import Resume, prepare_run_dir
from astuner.runs.run_dir import RunDir
from astuner.runs.tasks import read_tasks
from astuner.support.json_lines import append_jsonl
from astuner_testing.fakes import fake_config
from tests.table import table

ROWS = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(6)]
HELD_OUT = [{"question": f"{n} - 1?", "answer": str(n - 1)} for n in range(3)]
OWN_READER = """
import json
from pathlib import Path
from astuner import Task, TaskReader

class Mine(TaskReader):
    @classmethod
    def from_config(cls, section, context):
        reader = cls(section)
        reader.folder = context.base_dir
        return reader
    def read(self, split):
        name = "train.jsonl" if split == "train" else "held_out.jsonl"
        for n, line in enumerate((self.folder / name).read_text().splitlines()):
            row = json.loads(line)
            yield Task(task_id=f"mine:{n}", main_query=row["question"], metadata=row)
"""


class Trainer(Backbone):
    """Has saved what is in the folder ``resume``; trains nothing."""

    capabilities = Capabilities(trains=True)

    def saved_states(self, run_dir: RunDir) -> Iterable[tuple[Path, str]]:
        return [(path, "") for path in run_dir.resume.iterdir()] if run_dir.resume.is_dir() else []

    def serve(self, model_path: str | None = None) -> Any:
        raise NotImplementedError(Served)

    def train(self, run: Any) -> None:
        raise NotImplementedError


@dataclass
class Experiment:
    """Files and settings of an experiment, which a row of a table changes before it is resumed."""

    folder: Path
    train: list[dict[str, Any]] = field(default_factory=lambda: [dict(row) for row in ROWS])
    held_out: list[dict[str, Any]] = field(default_factory=lambda: [dict(row) for row in HELD_OUT])
    overrides: list[str] = field(default_factory=list)
    train_name: str = "train.jsonl"
    reader: str = "jsonl"

    def config(self) -> Config:
        files = {self.train_name: self.train, "held_out.jsonl": self.held_out}
        for name, rows in files.items():
            (self.folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        (self.folder / "mine.py").write_text(OWN_READER)
        section = (
            f"{{type: jsonl, jsonl: {{training: {{file_path: {self.train_name}}}, "
            "validation: {file_path: held_out.jsonl}}}"
        )
        section = section if self.reader == "jsonl" else f"{{type: {self.reader}}}"
        overrides = [f"astuner.experiment_dir={self.folder}", "astuner.experiment_name=run", *self.overrides]
        return fake_config(self.folder, f"  task_reader: {section}\n", overrides)

    def prepare(self, resume: Resume) -> tuple[Path | None, str]:
        config = self.config()
        command = RunCommand(file="e.yaml", overrides=tuple(self.overrides), backbone="local")
        return prepare_run_dir(self.run_dir, config, Trainer(config), resume, read_tasks(config), command)

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.folder / "run")

    def save(self, *, measured: bool = True, finished: bool = False) -> None:
        """Write what a run leaves after one step."""
        (self.run_dir.resume / "step-000001").mkdir()
        append_jsonl(self.run_dir.metrics, {"step": 1, **({"val/success": 0.5} if measured else {})})
        if finished:
            self.run_dir.summary.write_text("{}")


def change(experiment: Experiment, code: str) -> None:
    exec(code, {"e": experiment})


REFUSED = [
    # what changes, what the message names
    ("e.train.insert(0, {'question': 'new?', 'answer': '1'})", ["training tasks", "1 added", "train.jsonl:1"]),
    ("e.train += [{'question': f'{n}?'} for n in range(4)]", ["training tasks", "4 added", "train.jsonl:7"]),
    ("e.train.reverse()", ["training tasks", "another order"]),
    ("e.train[2], e.train[3] = e.train[3], e.train[2]", ["training tasks", "another order"]),
    ("e.train[3]['answer'] = 'edited'", ["training tasks", "1 of 6 changed", "train.jsonl:4"]),
    ("e.train[0]['hint'] = None", ["training tasks", "1 of 6 changed", "train.jsonl:1"]),
    ("e.train[5]['answer'] = 6", ["training tasks", "1 of 6 changed", "train.jsonl:6"]),
    ("del e.train[2:4]", ["training tasks", "2 of 6 removed"]),
    ("e.train[:] = e.train[1:] + [e.train[1]]", ["training tasks", "1 of 6 changed"]),
    ("e.train, e.held_out = e.held_out, e.train", ["training tasks", "validation tasks", "file_path"]),
    ("e.train_name, e.train[1]['answer'] = 'other.jsonl', '?'", ["training tasks", "1 of 6 changed", "other.jsonl"]),
    ("e.reader = 'mine.py->Mine'; e.train.pop()", ["training tasks", "1 of 6 removed"]),
    ("e.held_out[0]['answer'] = '7'", ["validation tasks", "1 of 3 changed", "held_out.jsonl:1"]),
    ("e.held_out.pop()", ["validation tasks", "1 of 3 removed"]),
    ("e.held_out.append({'question': 'new?'})", ["validation tasks", "1 added", "held_out.jsonl:4"]),
    ("e.overrides += ['astuner.data.max_validation_tasks=2']", ["validation tasks", "1 of 3 removed"]),
    ("e.overrides += ['astuner.seed=7']", ["astuner.seed is 7 (was 0)"]),
    ("e.overrides += ['astuner.data.shuffle=false']", ["astuner.data.shuffle is false (was true)"]),
    ("e.overrides += ['astuner.seed=7']; e.train.pop()", ["astuner.seed is 7", "training tasks", "1 of 6 removed"]),
]


@table(("code", "named"), REFUSED)
def test_what_a_run_keeps_to_its_end_is_named_and_the_run_not_continued(tmp_path, code, named):
    experiment = Experiment(tmp_path)
    experiment.prepare("auto")
    experiment.save()
    change(experiment, code)
    with pytest.raises(RunError) as e:
        experiment.prepare("must")
    message = str(e.value)
    assert [text for text in named if text not in message] == []
    assert message.endswith("--no-resume")
    assert (experiment.run_dir.resume / "step-000001").is_dir()  # and the folder is as it was
    assert Experiment(tmp_path).prepare("must")[0] == experiment.run_dir.resume / "step-000001"


CONTINUED = [
    ("pass", []),
    ("e.train_name = 'renamed.jsonl'", ["file_path"]),
    ("e.reader = 'mine.py->Mine'", ["task_reader"]),
    ("e.overrides += ['astuner.rollout.num_repeat=2']", ["astuner.rollout.num_repeat is 2 (was 8)"]),
    ("e.overrides += ['astuner.data.train_batch_size=3']", ["astuner.data.train_batch_size is 3 (was "]),
    ("e.overrides += ['astuner.rollout.oversample=1.5']", ["astuner.rollout.oversample is 1.5 (was "]),
    ("e.overrides += ['astuner.trainer_common.algorithm.dynamic_sampling=true']", ["dynamic_sampling is true"]),
    ("e.overrides += ['astuner.trainer_common.optim.lr=0.5']", ["astuner.trainer_common.optim.lr is 0.5 (was "]),
    ("e.overrides += ['astuner.trainer_common.total_steps=50']", []),
    ("e.overrides += ['astuner.trainer_common.total_epochs=9']", []),
    ("e.train[0] = dict(reversed(e.train[0].items()))", []),
    ("e.folder.joinpath('held_out.jsonl').touch()", []),
]


@table(("code", "named"), CONTINUED)
def test_what_may_change_is_named_and_the_run_continues(tmp_path, code, named):
    experiment = Experiment(tmp_path)
    experiment.prepare("auto")
    experiment.save()
    change(experiment, code)
    state, note = experiment.prepare("must")
    assert state == experiment.run_dir.resume / "step-000001"
    assert [text for text in named if text not in note] == []
    assert ("(was" in note) == bool(named)


@table(
    ("code", "continues"),
    [
        ("pass", True),
        ("e.train_name = 'renamed.jsonl'", True),
        ("e.overrides += ['astuner.trainer_common.total_steps=50']", True),
        ("e.overrides += ['astuner.rollout.max_env_worker=2']", True),
        ("e.train_name, e.train[0]['answer'] = 'other.jsonl', '?'", False),
        ("e.overrides += ['astuner.rollout.num_repeat=2']", False),
    ],
)
def test_the_plain_command_continues_the_same_experiment(tmp_path, code, continues):
    experiment = Experiment(tmp_path)
    experiment.prepare("auto")
    experiment.save()
    change(experiment, code)
    assert (experiment.prepare("auto")[0] is not None) == continues


def test_the_plain_command_refuses_other_tasks_of_the_same_file(tmp_path):
    experiment = Experiment(tmp_path)
    experiment.prepare("auto")
    experiment.train.pop()
    assert experiment.prepare("auto")[0] is None  # nothing was saved: nothing is lost
    experiment.save()
    experiment.train.pop()
    with pytest.raises(RunError, match="1 of 5 removed"):
        experiment.prepare("auto")
    assert experiment.prepare("never")[0] is None


def test_validation_tasks_may_change_before_they_are_measured(tmp_path):
    experiment = Experiment(tmp_path)
    experiment.prepare("auto")
    experiment.save(measured=False)
    experiment.held_out.pop()
    state, note = experiment.prepare("must")
    assert state is not None
    assert "validation tasks have changed" in note


def test_a_folder_of_an_earlier_version_continues_with_a_note(tmp_path):
    experiment = Experiment(tmp_path)
    experiment.prepare("auto")
    experiment.save()
    experiment.run_dir.task_digests.unlink()
    experiment.train.pop()
    state, note = experiment.prepare("must")
    assert state is not None
    assert "earlier version" in note
    assert "earlier version" not in experiment.prepare("must")[1]


@table("resume", ["must", "auto"])
def test_damaged_files_of_the_folder(tmp_path, resume):
    for name in ("resolved.yaml", "task_digests.json"):
        experiment = Experiment(tmp_path / name)
        experiment.folder.mkdir()
        experiment.prepare("auto")
        experiment.save()
        (experiment.run_dir.path / name).write_text("{[")
        if resume == "must":
            state, note = experiment.prepare("must")
            assert state is not None
            assert f"{name} is damaged" in note
        else:
            with pytest.raises(RunError, match=f"{name} is damaged"):
                experiment.prepare("auto")


@table(
    ("code", "finished", "named", "command"),
    [
        (
            "e.overrides += ['astuner.rollout.num_repeat=2']",
            False,
            ["astuner.rollout.num_repeat is 2 (was 8)"],
            ["astuner.rollout.num_repeat=2"],
        ),
        (
            "e.overrides += ['astuner.seed=7']",
            False,
            ["astuner.seed is 7 (was 0)"],
            ["astuner.seed=7", "astuner.seed=0"],
        ),
        (
            "e.overrides += ['astuner.data.shuffle=false', 'astuner.trainer_common.optim.lr=0.1']",
            False,
            ["astuner.data.shuffle is false (was true)", "optim.lr is 0.1"],
            ["astuner.data.shuffle=true"],
        ),
        (
            "e.train_name = 'b.jsonl'; e.train.pop()",
            False,
            ["file_path", "train.jsonl", "b.jsonl", "1 of 6 removed"],
            [],
        ),
        ("pass", True, ["finished", "--steps"], []),
        ("e.overrides += ['astuner.rollout.num_repeat=2']", True, ["finished"], ["astuner.rollout.num_repeat=2"]),
    ],
)
def test_a_run_that_starts_over_says_why_and_how_the_earlier_one_continues(tmp_path, code, finished, named, command):
    experiment = Experiment(tmp_path)
    experiment.prepare("auto")
    experiment.save(finished=finished)
    change(experiment, code)
    state, note = experiment.prepare("auto")
    assert state is None
    (moved,) = tmp_path.glob("run.*")
    assert [text for text in [*named, str(moved)] if text not in note] == []
    words = shlex.split(note[note.index("astuner run") :])
    assert words[-1] == "--resume"
    assert words[words.index("--run-dir") + 1] == str(moved)
    assert words[words.index("--backbone") + 1] == "local"
    assert [word for word in command if word not in words] == []


def test_nothing_is_said_of_a_first_run_or_of_one_that_saved_nothing(tmp_path):
    experiment = Experiment(tmp_path)
    assert experiment.prepare("auto") == (None, "")
    experiment.overrides.append("astuner.seed=7")
    _, note = experiment.prepare("auto")
    assert "astuner run" not in note
    assert "astuner.seed is 7" in note


COMMANDS = [
    (RunCommand(file="e.yaml"), ["astuner", "run", "e.yaml"]),
    (RunCommand(file="my file.yaml", backbone="verl"), ["astuner", "run", "my file.yaml", "--backbone", "verl"]),
    (
        RunCommand(file="e.yaml", overrides=("a.b=[1, 2]", "a.c='x y'")),
        ["astuner", "run", "e.yaml", "a.b=[1, 2]", "a.c='x y'"],
    ),
    (
        RunCommand(file="e.yaml", overrides=("a=1", 'astuner.experiment_dir="/r"', 'astuner.experiment_name="007"')),
        ["astuner", "run", "e.yaml", "a=1", "--run-dir", "/r/007"],
    ),
    (
        RunCommand(file="e.yaml", overrides=('astuner.experiment_dir="/a b/ü"', 'astuner.experiment_name="c d"')),
        ["astuner", "run", "e.yaml", "--run-dir", "/a b/ü/c d"],
    ),
    (
        RunCommand(file="e.yaml", overrides=("astuner.experiment_name=x",)),
        ["astuner", "run", "e.yaml", "astuner.experiment_name=x"],
    ),
    (
        RunCommand(file="e.yaml", overrides=("astuner.experiment_dir=r", "astuner.experiment_name=x")),
        ["astuner", "run", "e.yaml", "astuner.experiment_dir=r", "astuner.experiment_name=x"],
    ),
    (
        RunCommand(file="e.yaml", services=("feedback", "toy")),
        ["astuner", "run", "e.yaml", "--with", "feedback", "--with", "toy"],
    ),
    (RunCommand(file="e.yaml", disabled_plugins=("math",)), ["astuner", "-p", "no:math", "run", "e.yaml"]),
    (
        RunCommand(file="e.yaml", overrides=("a.url=http://me:pass@host/v1",)),
        ["astuner", "run", "e.yaml", "a.url=http://(removed: a secret)@host/v1"],
    ),
    (
        RunCommand(file="e.yaml", overrides=("a.api_key=sk-123456789",)),
        ["astuner", "run", "e.yaml", "a.api_key=(removed: a secret)"],
    ),
    (RunCommand(file="$(e).yaml", overrides=("a=`b`;&|",)), ["astuner", "run", "$(e).yaml", "a=`b`;&|"]),
    (
        RunCommand(file="e.yaml", backbone="local").overriding("astuner.backbone=verl"),
        ["astuner", "run", "e.yaml", "astuner.backbone=verl", "--backbone", "verl"],
    ),
    (
        RunCommand(file="e.yaml", overrides=("astuner.experiment_name=x", "a=1")).at(Path("/r/1e5")),
        ["astuner", "run", "e.yaml", "a=1", "--run-dir", "/r/1e5"],
    ),
]


@table(("command", "words"), COMMANDS)
def test_a_command_is_what_was_typed_quoted_for_a_shell(command: RunCommand, words: Sequence[str]) -> None:
    assert shlex.split(str(command)) == words
    assert shlex.split(command.resuming()) == [*words, "--resume"]
    assert shlex.split(command.starting_over()) == [*words, "--no-resume"]


def task(**metadata: Any) -> Task:
    return Task(task_id=metadata.pop("label", "train.jsonl:1"), main_query="a?", metadata=metadata)


class Thing:
    def __init__(self, text: str) -> None:
        self.text = text


@table(
    ("one", "other", "same"),
    [
        (task(a=1), task(a=1, label="other.jsonl:7"), True),
        (task(a=1), task(a=1, label="shop-7"), False),
        (replace(task(), env_type="maze"), replace(task(label="train.jsonl:2"), env_type="maze"), False),
        (task(a=1), task(a=1.0), False),
        (task(a=1), task(a=True), False),
        (task(a=1), task(a="1"), False),
        (task(a=None), task(), False),
        (task(a=1, b=2), task(b=2, a=1), True),
        (task(a=[1, 2]), task(a=(1, 2)), True),
        (task(a={"x": {1: 2, "y": 3}}), task(a={"x": {"y": 3, 1: 2}}), True),
        (task(a={1: 2}), task(a={"1": 2}), True),  # as JSON has it
        (task(a=date(2024, 1, 5)), task(a=date(2024, 1, 6)), False),
        (task(a={1, 2, 3}), task(a={3, 2, 1}), True),
        (task(a=Thing("x")), task(a=Thing("x")), True),
        (task(a=b"x"), task(a=b"y"), False),
        (task(a="\ud800"), task(a="\ud801"), False),
        (replace(task(), init_messages=({"role": "user", "content": "x"},)), task(), False),
    ],
)
def test_a_digest_is_of_what_a_task_holds(one: Task, other: Task, same: bool) -> None:
    assert (digest(one) == digest(other)) == same


def test_a_task_that_contains_itself_has_a_digest() -> None:
    cycle: dict[str, Any] = {}
    cycle["self"] = cycle
    assert re.fullmatch("[0-9a-f]{16}", digest(task(a=cycle)))


def test_a_difference_is_empty_for_equal_tasks() -> None:
    fingerprint = Fingerprint.of([task(a=n) for n in range(3)], [])
    assert describe_difference(fingerprint.train, fingerprint.train, [task()] * 3) == ""


@table(
    ("tasks", "text"),
    [
        ([], "0 to train on"),
        ([task(a=n) for n in range(3)], "3 to train on"),
        ([task(a=n) for _ in range(100) for n in range(20)], "20 to train on (each 100 times)"),
        (
            [task(a=n, id=f"{n}/{k}", label=f"{n}/{k}") for k in range(5) for n in range(4)],
            "4 to train on (each 5 times)",
        ),
        (
            [task(a=n, task_id=4 * k + n, label=f"{4 * k + n}") for k in range(5) for n in range(4)],
            "4 to train on (each 5 times)",
        ),
        ([task(label=f"conversation-{n}") for n in range(4)], "4 to train on"),
        ([task(a=n) for n in (1, 1, 2)], "3 to train on (2 different)"),
        ([task(a=1)] * 7, "1 to train on (each 7 times)"),
        ([task(a=n) for n in (1, 1.0, True, "1")], "4 to train on"),
        ([replace(task(label=f"level-{n}"), env_type="maze") for n in range(4)], "4 to train on"),
        ([replace(task(label=f"level-{n % 2}"), env_type="maze") for n in range(4)], "2 to train on (each 2 times)"),
        ([replace(task(), main_query=q) for q in ("a?", "a?", "b?", "b?")], "2 to train on (each 2 times)"),
    ],
)
def test_repetitions_are_counted_apart(tasks: list[Task], text: str) -> None:
    assert describe_count(tasks, "to train on") == text
