"""The checker finds nothing in runs of ours, and each planted fault by its name."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import shutil
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard

from tests.checker.abuser.agent import WAYS
from tests.checker.folder import Folder, episode
from tests.checker.rules import check, paths
from tests.table import table

HERE = Path(__file__).parent
ALLOWED = {"jinja2", "msgspec", "tests", "tokenizers", "transformers", "yaml", "zstandard", *sys.stdlib_module_names}


@table("name", ["__init__.py", "__main__.py", "folder.py", "rules.py"])
def test_it_imports_nothing_of_the_product(name: str) -> None:
    tree = ast.walk(ast.parse((HERE / name).read_text()))
    found = set()
    for node in tree:
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found.add(node.module or "")
        assert not (isinstance(node, ast.Name) and node.id in {"__import__", "exec", "eval"})
        assert not (isinstance(node, (ast.Name, ast.Attribute)) and "import_module" in ast.dump(node))
    assert {one.split(".")[0] for one in found} <= ALLOWED
    assert {one for one in found if one.startswith("tests")} <= {"tests.checker.folder", "tests.checker.rules"}


def run(folder: Path, workflow: str, tasks: list[dict[str, Any]], **keys: Any) -> Path:
    """The folder of a finished run of two steps, and beside it its samples as they were exported."""
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    (folder / "exam.yaml").write_text(
        json.dumps(
            {
                "astuner": {
                    "model": {"path": "tiny-calculator"},
                    "task_reader": {"type": "jsonl", "jsonl": {"training": {"file_path": "tasks.jsonl"}}},
                    "task_judge": {"judge": "math_answer"},
                    "data": {"train_batch_size": len(tasks)},
                    "endpoint": {"reconnect_timeout": 0.2},
                    "rollout": {
                        "workflow": workflow,
                        "num_repeat": 2,
                        "temperature": 2.0,  # for about a third of replies, encoding the text gives other tokens
                        "max_response_length_in_one_turn": 24,
                        "max_model_len": 800,
                        "max_retries": 0,
                        **keys,
                    },
                    "trainer_common": {"total_steps": 2},
                },
                "local": {"threads": 1},
            }
        )
    )
    found = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    for line in (
        "run exam.yaml --backbone local --run-dir run --no-resume",
        "export run --to tokens --out samples.jsonl --min-reward=-1e9",
    ):
        done = subprocess.run(
            [sys.executable, "-m", "astuner", *line.split()], cwd=folder, env=found, capture_output=True, text=True
        )
        assert not done.returncode, done.stdout + done.stderr
    return folder / "run"


@pytest.fixture(scope="module")
def abused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tasks = [{"question": f"{at} and 3?", "answer": "4", "way": way} for at, way in enumerate(WAYS)]
    return run(tmp_path_factory.mktemp("abused"), f"{HERE}/abuser/agent.py->Abuser", tasks)


MORE = ("control tokens in contents", "samples", "groups", "turns continued", "prompts encoded again")


@pytest.mark.slow
def test_abuses_are_exact(abused: Path) -> None:
    report = check(abused, samples=abused.parent / "samples.jsonl")
    assert not report.problems, "\n".join(map(str, report.problems[:20]))
    for what in (
        "prompts but for the replies' own spelling",
        "masks compared",
        "log-probabilities computed again",
        *MORE,
    ):
        assert report.counts[what], report.counts


# Faults, planted in a copy of a run: each takes its folder, and finds a place that fits itself.
Fault = Callable[["Copy"], None]


class Copy:
    """A copy of a run's folder with its exported samples, to plant faults in."""

    def __init__(self, of: Path, at: Path) -> None:
        self.run, self.samples = at / "run", at / "samples.jsonl"
        shutil.copytree(of, self.run)
        shutil.copy(of.parent / "samples.jsonl", self.samples)
        self.log = self.run / "episodes/episodes.sqlite"

    def turn(self, fits: Callable[[dict[str, Any]], Any], change: Callable[[dict[str, Any]], Any]) -> None:
        """Change the first turn of a credited episode that fits; its bytes are lists while that is done."""
        with contextlib.closing(sqlite3.connect(self.log)) as db, db:
            words = zstandard.ZstdCompressionDict(*db.execute("SELECT content FROM dictionary").fetchone(), 1)
            reads, writes = zstandard.ZstdDecompressor(words), zstandard.ZstdCompressor(dict_data=words)
            credited = "SELECT id, row FROM data WHERE episode_id IN (SELECT episode_id FROM credit) ORDER BY id"
            for number, row in db.execute(credited).fetchall():
                found = msgspec.msgpack.decode(reads.decompress(row))
                for turn in found["turns"]:
                    for key, kind in NUMBERS.items():
                        turn[key] = list(struct.unpack(f"<{len(turn[key]) // 4}{kind}", turn[key]))
                turn = next(filter(fits, found["turns"]), None)
                if turn is not None:
                    change(turn)
                    for one in found["turns"]:
                        one |= {key: struct.pack(f"<{len(one[key])}{kind}", *one[key]) for key, kind in NUMBERS.items()}
                    db.execute(
                        "UPDATE data SET row = ? WHERE id = ?", (writes.compress(msgspec.msgpack.encode(found)), number)
                    )
                    return
        raise AssertionError("no turn fits: the fault is planted nowhere")

    def sql(self, statement: str) -> None:
        with contextlib.closing(sqlite3.connect(self.log)) as db, db:
            assert db.execute(statement).rowcount, "the fault is planted nowhere"

    def exported(self, change: Callable[[list[dict[str, Any]]], Any]) -> None:
        rows = [json.loads(line) for line in self.samples.read_text().splitlines()]
        change(rows)
        self.samples.write_text("".join(json.dumps(row) + "\n" for row in rows))


NUMBERS = {"prompt_ids": "i", "response_ids": "i", "logprobs": "f"}


def _shift(ids: list[int]) -> None:
    ids[2], ids[3] = ids[3], ids[2]


def _swap(turn: dict[str, Any]) -> None:
    numbers = turn["logprobs"]
    least, most = numbers.index(min(numbers)), numbers.index(max(numbers))
    numbers[least], numbers[most] = numbers[most], numbers[least]


def _again(copy: Copy) -> None:
    """A reply whose tokens are not the tokenizer's: put the tokenizer's there, with lengths that fit."""
    with contextlib.closing(Folder(copy.run)) as folder:
        tokenizer = folder.words("default").tokenizer

    def anew(turn: dict[str, Any]) -> list[int]:
        text = tokenizer.decode(turn["response_ids"], skip_special_tokens=False)
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    def change(turn: dict[str, Any]) -> None:
        turn["response_ids"] = anew(turn)
        turn["response_tokens"] = len(turn["response_ids"])
        turn["logprobs"] = (turn["logprobs"] + [-0.5] * turn["response_tokens"])[: turn["response_tokens"]]

    copy.turn(lambda turn: turn["trained"] and anew(turn) != turn["response_ids"], change)


def _split(copy: Copy) -> None:
    """A prompt with a word as two tokens."""
    with contextlib.closing(Folder(copy.run)) as folder:
        tokenizer = folder.words("default").tokenizer

    def halves(turn: dict[str, Any]) -> tuple[int, list[int]] | None:
        for at, id in enumerate(turn["prompt_ids"] if turn["continues"] is None else ()):
            text = tokenizer.id_to_token(id)
            for cut in range(1, len(text)):
                pieces = [tokenizer.token_to_id(text[:cut]), tokenizer.token_to_id(text[cut:])]
                if None not in pieces and text.isascii():
                    return at, pieces
        return None

    def change(turn: dict[str, Any]) -> None:
        at, pieces = halves(turn) or (0, [])
        turn["prompt_ids"][at : at + 1] = pieces
        turn["prompt_tokens"] += 1

    copy.turn(halves, change)


def _mask_prompt(rows: list[dict[str, Any]]) -> None:
    rows[0]["loss_mask"][rows[0]["loss_mask"].index(1) - 1] = 1


def _mask_twice(rows: list[dict[str, Any]]) -> None:
    """Of two samples of an episode that begin alike, the later trains what the earlier did as well."""
    for row, other in pairwise(rows):
        for at, (one, two) in enumerate(zip(row["input_ids"], other["input_ids"], strict=False)):
            if row["episode_id"] != other["episode_id"] or one != two:
                break
            if row["loss_mask"][at] and not other["loss_mask"][at]:
                other["loss_mask"][at] = 1
                return
    raise AssertionError("no two samples begin alike")


def _retokenised(rows: list[dict[str, Any]], copy: Copy) -> None:
    with contextlib.closing(Folder(copy.run)) as folder:
        tokenizer = folder.words("default").tokenizer
    for row in rows:
        ids = tokenizer.encode(
            tokenizer.decode(row["input_ids"], skip_special_tokens=False), add_special_tokens=False
        ).ids
        if ids != row["input_ids"]:
            row["input_ids"], row["loss_mask"] = ids, (row["loss_mask"] + [1] * len(ids))[: len(ids)]
            return
    raise AssertionError("every reply is as the tokenizer would make it")


def _branch(copy: Copy) -> str:
    """The condition for a sample that shares its beginning with one before it, whose trained tokens it counts again."""
    with contextlib.closing(Folder(copy.run)) as folder:
        credited = {(row.episode, row.sample) for row in folder.credit()}
        for name, data in folder.rows():
            for at, sample in enumerate(paths(episode(data))):
                if sample.path[0] not in sample.trained and (name, at) in credited:
                    again = sum(len(turn.response) for turn in sample.path if turn not in sample.trained)
                    return f"trained_tokens = trained_tokens + {again} WHERE episode_id = '{name}' AND sample = {at}"
    raise AssertionError("no sample shares its beginning")


def _forge(turn: dict[str, Any]) -> None:
    """Make its prompt's own control token one that stands in a content."""
    messages = json.loads(turn["request"])
    messages[-1]["content"] = f"<|im_end|>{messages[-1]['content']}"
    at = len(turn["prompt_ids"]) - turn["prompt_ids"][::-1].index(1) - 1
    at = len(turn["prompt_ids"][:at]) - turn["prompt_ids"][:at][::-1].index(1) - 1
    turn["prompt_ids"][at + 3 : at + 3] = [2]
    turn["prompt_tokens"] += 1
    turn["request"] = json.dumps(messages)


ONE = "WHERE (episode_id, step, sample) = (SELECT episode_id, step, sample FROM credit ORDER BY trained_tokens DESC)"
FAULTS: dict[str, tuple[str, Fault]] = {
    "a token of a reply shifted": (
        "reply",
        lambda copy: copy.turn(lambda turn: len(turn["response_ids"]) > 6, lambda turn: _shift(turn["response_ids"])),
    ),
    "a token of a prompt shifted": (
        "template",
        lambda copy: copy.turn(lambda turn: turn["continues"] == 0, lambda turn: _shift(turn["prompt_ids"])),
    ),
    "a token of the prompt missing": (
        "prefix",
        lambda copy: copy.turn(lambda turn: turn["continues"] == 0, lambda turn: turn["prompt_ids"].pop(0)),
    ),
    "another turn continued": (
        "prefix",
        lambda copy: copy.turn(lambda turn: turn["continues"] == 1, lambda turn: turn.update(continues=0)),
    ),
    "trained in two masks": ("trained_twice", lambda copy: copy.exported(_mask_twice)),
    "trained in two samples": ("trained_twice", lambda copy: copy.sql(f"UPDATE credit SET {_branch(copy)}")),
    "trained in two steps": (
        "trained_twice",
        lambda copy: copy.sql(
            "INSERT INTO credit SELECT step + 1, episode_id, group_id, agent, role, policy, sample, advantage,"
            " token_weight, reward, tokens, trained_tokens, policy_version, trainer_logprobs FROM credit WHERE step = 1"
        ),
    ),
    "a reply made again of its text": ("retokenised", _again),
    "a sample made again of its text": (
        "retokenised",
        lambda copy: copy.exported(lambda rows: _retokenised(rows, copy)),
    ),
    "a prompt of other tokens": ("retokenised", _split),
    "a token of the prompt in a mask": ("masked_prompt", lambda copy: copy.exported(_mask_prompt)),
    "a token too many in the credit": (
        "masked_prompt",
        lambda copy: copy.sql(f"UPDATE credit SET trained_tokens = trained_tokens + 1 {ONE}"),
    ),
    "a token in no mask": (
        "not_trained",
        lambda copy: copy.exported(lambda rows: rows[0].update(loss_mask=[0] * len(rows[0]["loss_mask"]))),
    ),
    "a token too few in the credit": (
        "not_trained",
        lambda copy: copy.sql(f"UPDATE credit SET trained_tokens = trained_tokens - 1 {ONE}"),
    ),
    "the log-probability of another token": (
        "logprob",
        lambda copy: copy.turn(lambda turn: max(turn["logprobs"]) - min(turn["logprobs"]) > 0.1, _swap),
    ),
    "no log-probability of a token": (
        "count",
        lambda copy: copy.turn(lambda turn: turn["response_ids"], lambda turn: turn["logprobs"].pop()),
    ),
    "a log-probability that is none": (
        "logprob",
        lambda copy: copy.turn(
            lambda turn: turn["response_ids"], lambda turn: turn["logprobs"].__setitem__(0, float("nan"))
        ),
    ),
    "the reward of another": ("credit", lambda copy: copy.sql(f"UPDATE credit SET reward = reward + 1 {ONE}")),
    "the advantage of another": (
        "credit",
        lambda copy: copy.sql(f"UPDATE credit SET advantage = 0.1 - advantage {ONE}"),
    ),
    "the version of another": ("credit", lambda copy: copy.sql(f"UPDATE credit SET policy_version = 7 {ONE}")),
    "a credited episode that is not there": (
        "credit",
        lambda copy: copy.sql("DELETE FROM data WHERE episode_id = (SELECT episode_id FROM credit)"),
    ),
    "a forged control token": (
        "forged",
        lambda copy: copy.turn(lambda turn: turn["continues"] is None and turn["index"] == 0, _forge),
    ),
    "a certificate of another run": (
        "certificate",
        lambda copy: (copy.run / "certificate.json").write_text(
            json.dumps({"tokens": {"trained": 1, "of_untrained_agents": 0, "left_out": {}, "generated": 1}})
        ),
    ),
    "a key in a file": ("key", lambda copy: (copy.run / "x.log").write_text(f"sent sk-astuner-{'a1' * 20}\n")),
    "a key in a row": (
        "key",
        lambda copy: copy.turn(lambda turn: True, lambda turn: turn.update(branch_reason=f"Bearer {'b2' * 20}")),
    ),
    "a row of rubbish": ("unreadable", lambda copy: _rubbish(copy)),
}  # fmt: skip


def _rubbish(copy: Copy) -> None:
    with contextlib.closing(sqlite3.connect(copy.log)) as db, db:
        words = zstandard.ZstdCompressionDict(*db.execute("SELECT content FROM dictionary").fetchone(), 1)
        row = zstandard.ZstdCompressor(dict_data=words).compress(msgspec.msgpack.encode({"turns": 5}))
        db.execute("UPDATE data SET row = ? WHERE id = (SELECT max(id) FROM data)", (row,))


@pytest.mark.slow
def test_the_command_says_what_it_compared_and_what_is_wrong(abused: Path, tmp_path: Path) -> None:
    def command(*told: object) -> tuple[int, str]:
        line = [sys.executable, "-m", "tests.checker", *map(str, told)]
        done = subprocess.run(line, cwd=HERE.parents[1], capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    code, said = command(abused)
    assert (code, "no problem" in said, "tokens generated" in said) == (0, True, True), said
    copy = Copy(abused, tmp_path)
    FAULTS["a key in a file"][1](copy)
    shutil.rmtree(copy.run / "checkpoints")
    code, said = command(copy.run)
    assert (code, "--tokenizer DIR" in said) == (2, True), said
    (saved,) = abused.glob("checkpoints/step-*")
    code, said = command(copy.run, "--tokenizer", saved, "--json")
    assert (code, [one["kind"] for one in json.loads(said)["problems"]]) == (1, ["key"]), said
    assert "a1a1a1a1" not in said


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_by_its_name(abused: Path, tmp_path: Path, fault: str) -> None:
    kind, plant = FAULTS[fault]
    copy = Copy(abused, tmp_path)
    plant(copy)
    (saved,) = abused.glob("checkpoints/step-*")  # read once for all of them
    report = check(copy.run, tokenizer=saved, samples=copy.samples)
    assert kind in report.kinds(), "\n".join(map(str, report.problems[:20]))
