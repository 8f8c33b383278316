"""What must hold after a round, read from the files by their documented formats and not by ASTuner."""

from __future__ import annotations

import getpass
import json
import math
import stat
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from tests.chaos import agent, world
from tests.chaos.running import EVERY, REPEAT, SECONDS, STEPS, TASKS, VALIDATED, Round, read

CACHE = f"torchinductor_{getpass.getuser()}"
"""A folder in which torch keeps what it compiled, for every process of a person."""
UNSCORED = {"workflow_failed", "timed_out", "environment_failed", "model_failed", "judge_failed", "prompt_too_long"}
LIMITS = {"truncated", "context_overflow"}


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Every row of the table ``data``, in the order in which they were written."""
    (first,) = [*read(run, "SELECT content FROM dictionary")] or [(b"",)]
    content = zstandard.ZstdCompressionDict(first[0], dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    decompress = zstandard.ZstdDecompressor(dict_data=content).decompress
    rows = read(run, "SELECT row FROM data ORDER BY id")
    return [msgspec.msgpack.decode(decompress(frame)) for (frame,) in rows]


def expected(round_: Round, row: dict[str, Any]) -> tuple[set[str], float | None]:
    """How such an episode may end, and the reward that it has if it is scored."""
    task = round_.tasks[row["task_id"]]
    at = (round_.seed, row["task_id"], row["attempt"], row["split"])
    in_a_world = "env_type" in task
    kind = agent.drawn(*at, world=in_a_world, left_out=round_.left_out)
    reason = row["stop_reason"]
    replies = [json.loads(turn["reply"]).get("content") or "" for turn in row["turns"]]
    reward = agent.reward_of(
        round_.seed, row["task_id"], row["attempt"], task["answer"], replies[-1] if replies else ""
    )
    if in_a_world:
        reward = world.score_of([kind, *replies[: world.STEPS]])
    # A call of the model that fails, and a time limit on a busy machine, may end any of them.
    ends = {"model_failed"} if "chaos: the engine" in row["error"] else set()
    ends |= {"timed_out"} if row["seconds"] >= SECONDS else set()
    ends |= {"judge_failed"} if "judge_timeout" in row["error"] else set()
    if kind in agent.JUDGE_FAILS:
        return ends | {"judge_failed"}, None
    scored = {"completed", *LIMITS}
    if kind.startswith("world_") and kind.removeprefix("world_") in agent.WORLD_FAILS:
        return ends | {"environment_failed"}, None
    cut = reason in LIMITS and row["output"] is not None and "stop_reason" in json.loads(row["output"])["metadata"]
    early = reason in LIMITS and (cut or row["output"] is None)  # a limit of the model's ended it before the mischief
    if early:
        return ends | LIMITS, reward
    if kind in agent.WORKFLOW_FAILS or kind == "tool_raises":
        return ends | {"workflow_failed"}, None
    if kind in agent.TIMES_OUT:
        return ends | {"timed_out"}, None
    if kind == "gives_its_own_reward":
        return ends | scored, -agent.number(row["attempt"])
    return ends | scored, reward


def problems(round_: Round) -> list[str]:
    """Everything that does not hold, a line each."""
    found = _of_the_end(round_)
    if not (round_.run / "summary.json").exists():
        return [*found, "the run did not come to its end"]
    rows = rows_of(round_.run)
    newest = {row["episode_id"]: row for row in rows}
    trained = [row for row in rows if row["split"] == "train"]
    for name, many in Counter(row["episode_id"] for row in trained).items():
        found += [f"{name} is {many} times in the log"] if many > 1 else []
    for row in newest.values():
        ends, reward = expected(round_, row)
        label = f"{row['episode_id']} ({row['task_id']}, attempt {row['attempt']}, {row['split']}) {_kind(round_, row)}"
        if row["stop_reason"] not in ends:
            found.append(f"{label} ended as {row['stop_reason']}, not {sorted(ends)}: {row['error'][:300]}")
        elif row["stop_reason"] in UNSCORED:
            found += [f"{label} has a reward, {row['reward']}"] if row["reward"] is not None else []
        elif row["reward"] != reward:
            found.append(f"{label} has the reward {row['reward']}, not {reward}")
    return found + _of_the_curve(round_, list(newest.values()))


def _kind(round_: Round, row: dict[str, Any]) -> str:
    world = "env_type" in round_.tasks[row["task_id"]]
    at = (round_.seed, row["task_id"], row["attempt"], row["split"])
    return agent.drawn(*at, world=world, left_out=round_.left_out)


def _of_the_curve(round_: Round, rows: list[dict[str, Any]]) -> list[str]:
    found = []
    metrics = [json.loads(line) for line in (round_.run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in metrics if "reward/mean" in row]
    if [row["step"] for row in steps] != [*range(1, STEPS + 1)]:
        found.append(f"the curve has the steps {[row['step'] for row in steps]}")
    validated = [row["step"] for row in metrics if "val/reward/mean" in row or "val/success" in row]
    if validated != sorted({*range(0, STEPS, EVERY), STEPS}):
        found.append(f"validations after the steps {validated}")
    for step in range(1, STEPS + 1):
        of = [row for row in rows if row["step"] == step and row["split"] == "train"]
        draws = Counter(row["group_id"] for row in of)
        if len(of) != TASKS * REPEAT or set(draws.values()) != {REPEAT}:
            found.append(f"step {step} has {len(of)} episodes in the log, of the draws {dict(draws)}")
        rewards = [row["reward"] for row in of if row["reward"] is not None]
        told = next((row["reward/mean"] for row in steps if row["step"] == step), math.nan)
        if not math.isclose(told, math.fsum(rewards) / max(len(rewards), 1), abs_tol=1e-6):
            found.append(f"step {step}: the curve says {told}, the log's rewards have another mean")
    held_out = Counter(row["step"] for row in rows if row["split"] == "validation")
    if set(held_out.values()) != {VALIDATED} or sorted(held_out) != validated:
        found.append(f"validated episodes by step: {dict(held_out)}")
    ended = Counter(("validation/" * (row["split"] != "train")) + row["stop_reason"] for row in rows)
    summary = json.loads((round_.run / "summary.json").read_text())["ledger"]
    counted = {
        name: many
        for name, many in summary.items()
        if name.removeprefix("validation/") in UNSCORED | LIMITS | {"completed"}
    }
    if counted != ended:
        found.append(f"the ledger counts {counted}, the log has {dict(ended)}")
    failures = [json.loads(line) for line in (round_.run / "failures.jsonl").read_text().splitlines()]
    failed = Counter(row["episode_id"] for row in failures if "episode_id" in row)
    if failed != Counter(row["episode_id"] for row in rows if row["stop_reason"] in UNSCORED):
        found.append(f"failures.jsonl has {sum(failed.values())} episodes, {len(failed)} different ones")
    return found


def _of_the_end(round_: Round) -> list[str]:
    """Return codes, last lines, and what is left on the machine."""
    found = []
    for number, leg in enumerate(round_.legs, start=1):
        which = f"leg {number} ({leg.ended_by or 'to the end'})"
        out, err = leg.out.strip().splitlines(), leg.err.strip().splitlines()
        nothing = "nothing was saved yet" in leg.err or "nothing to resume" in leg.err
        codes = {"kill": {-9}, "kill early": {-9}, "stop": {0, 130}, "disk": {0, 1}, "": {0}}
        allowed = {1} if nothing else codes.get(leg.ended_by, {0})
        if leg.code not in allowed:
            found.append(f"{which}: return code {leg.code}, not {sorted(allowed)}; last: {[*out[-1:], *err[-3:]]}")
        elif leg.code == 0 and not any(line.startswith(("Verdict ", "Next ", "Run folder ")) for line in out[-1:]):
            found.append(f"{which}: its last line is {out[-1:]}")
        elif leg.code == 1 and not err[-1].startswith("astuner: "):
            found.append(f"{which}: its last line is {err[-1]!r}")
        found += [f"{which}: a traceback: {err[-3:]}"] if "Traceback (most recent call last)" in leg.err else []
        found += [f"{which}: still runs: {line}" for line in leg.left]
    found += [f"still runs: {line}" for line in round_.processes()]
    found += [f"left in the temporary folder: {path.name}" for path in round_.temp.iterdir() if path.name != CACHE]
    for path in round_.folder.rglob("*"):
        if stat.S_ISSOCK(path.lstat().st_mode):
            found.append(f"a socket is left: {path}")
        elif path.name.endswith(".tmp") and path.is_relative_to(round_.run):
            found.append(f"half a file is left: {path}")
    return found
