"""Workflow, tool, judge and engine of a round: what an attempt does is drawn from seed, task and attempt alone.

So whoever reads the log can say without ASTuner how each episode had to end, and with which reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import hashlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from astuner import Judge, JudgeOutput, Workflow, WorkflowOutput

HONEST = 0.5
"""The share of attempts that do nothing wrong."""
ENGINE_FAILS = 0.03
"""The share of model calls that fail."""
SEED = int(os.environ.get("CHAOS_SEED", "0"))
FOLDER = os.environ.get("CHAOS_FOLDER", "")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "description": "Numbers, + - * / and parentheses."}},
                "required": ["expression"],
            },
        },
    }
]


class Mute(Exception):
    def __str__(self) -> str:
        raise SystemExit("no text")

    __repr__ = __str__


class Base(BaseException):
    pass


def _raise(error: Any) -> Any:
    raise error


def _recurse() -> Any:
    return _recurse()


def _deep() -> Any:
    found: list[Any] = []
    for _ in range(5000):
        found = [found]
    return found


def _cycle() -> Any:
    found: dict[str, Any] = {}
    found["itself"] = found
    return found


async def _child(error: Any) -> None:
    await asyncio.create_task(_later(error))


async def _later(error: Any) -> None:
    raise error


async def _awaits() -> None:
    await asyncio.sleep(3600)


async def _swallows() -> None:
    while True:
        with contextlib.suppress(BaseException):
            await asyncio.sleep(3600)


def _spins() -> None:
    while True:
        pass


def _empties_temp() -> None:
    for path in Path(tempfile.gettempdir()).iterdir():
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _prints() -> None:
    if not sys.stdout.closed:  # another attempt may have
        print("x" * 3_000_000)
    print("\x1b[2J\ud800" * 1000, file=sys.stderr)


def _clears_environment() -> None:
    """All but what tells the run's processes from others: without it, nobody finds them after ``kill -9``."""
    kept = os.environ.get("ASTUNER_RUN", "")
    os.environ.clear()
    os.environ["ASTUNER_RUN"] = kept


def _leaves_children() -> None:
    subprocess.Popen(["sleep", "600"], cwd=FOLDER)
    subprocess.Popen(["sleep", "600"], cwd=FOLDER, start_new_session=True)


def _answer(**more: Any) -> Callable[[str], WorkflowOutput]:
    return lambda text: WorkflowOutput(response=text, **more)


WORKFLOW_FAILS: dict[str, Callable[[], Any]] = {
    "raises": lambda: _raise(ValueError("chaos")),
    "raises_base": lambda: _raise(Base("chaos")),
    "raises_mute": lambda: _raise(Mute()),
    "raises_keyboard": lambda: _raise(KeyboardInterrupt()),
    "raises_exit": lambda: sys.exit(0),
    "raises_generator_exit": lambda: _raise(GeneratorExit()),
    "raises_cancelled": lambda: _raise(asyncio.CancelledError()),
    "raises_megabytes": lambda: _raise(ValueError("chaos" * 1_000_000)),
    "recurses": _recurse,
    "raises_in_a_task": lambda: _child(SystemExit(1)),
    "ends_the_process": lambda: os._exit(0),
    "returns_nothing": lambda: None,
    "returns_nan": lambda: WorkflowOutput(reward=float("nan")),
    "returns_infinity": lambda: WorkflowOutput(reward=float("inf")),
    "returns_too_much": lambda: WorkflowOutput(reward=1e308),
    "returns_text": lambda: WorkflowOutput(reward="1.0"),  # type: ignore[arg-type]
    "returns_a_list": lambda: WorkflowOutput(reward=[1.0]),  # type: ignore[arg-type]
    "returns_success_word": lambda: WorkflowOutput(reward=1.0, is_success="no"),  # type: ignore[arg-type]
    "returns_for_nobody": lambda: WorkflowOutput(reward={"nobody": 1.0}),
    "returns_metric_nan": lambda: WorkflowOutput(reward=1.0, metrics={"m": float("nan")}),
    "returns_a_class": lambda: WorkflowOutput,
}
TIMES_OUT: dict[str, Callable[[], Any]] = {
    "awaits_for_ever": _awaits,
    "swallows_its_end": _swallows,
    "spins": _spins,
    "sleeps": lambda: time.sleep(3600),
}
COPES: dict[str, Callable[[], Any]] = {
    "prints_megabytes": _prints,
    "closes_stdout": lambda: sys.stdout.close(),
    "changes_folder": lambda: os.chdir("/"),
    "clears_environment": _clears_environment,
    "empties_temp": _empties_temp,
    "leaves_a_thread": lambda: threading.Thread(target=time.sleep, args=(3600,), daemon=True).start(),
    "leaves_children": _leaves_children,
}
"""What is done besides; the answer counts all the same."""
ANSWERS: dict[str, Any] = {
    "answers_huge_numbers": lambda: {"n": 10**5000, "m": -(10**5000)},
    "answers_deep": lambda: {"deep": _deep()},
    "answers_a_cycle": _cycle,
    "answers_megabytes": lambda: {"text": "x" * 20_000_000},
    "answers_half_characters": lambda: {"text": "\ud800\x00", "\udfff": 1},
    "answers_mute": lambda: {"object": Mute(), 1: object()},
    "answers_nan": lambda: {"n": float("nan")},
}
TOOL: dict[str, Any] = {
    "tool_raises": lambda: _raise(OSError("chaos: the tool is broken")),
    "tool_says_too_much": lambda: "7 " * 20_000,
    "tool_says_megabytes": lambda: "7 " * 5_000_000,
}
JUDGE_FAILS: dict[str, Callable[[], Any]] = {
    "judge_raises": lambda: _raise(ValueError("chaos")),
    "judge_raises_mute": lambda: _raise(Mute()),
    "judge_raises_keyboard": lambda: _raise(KeyboardInterrupt()),
    "judge_exits": lambda: sys.exit(0),
    "judge_says_nothing": lambda: None,
    "judge_says_nan": lambda: (float("nan"), True),
    "judge_says_text": lambda: ("1.0", True),
    "judge_says_word": lambda: (1.0, "no"),
    "judge_says_three": lambda: (1.0, True, 3),
    "judge_hangs": lambda: time.sleep(3600),
}
WORLD_FAILS = ("raises", "exits", "leaves", "is_killed", "hangs", "says_nothing", "says_an_object", "reward_is_nan")
WORLD_FAILS += ("score_is_nan", "success_is_a_word")
WORLD = (*(f"world_{name}" for name in WORLD_FAILS), "world_prints", "world_has_children")
PLAIN = (*WORKFLOW_FAILS, *TIMES_OUT, *COPES, *ANSWERS, *TOOL, *JUDGE_FAILS, "gives_its_own_reward")
IN_A_WORLD = (*WORLD, *WORKFLOW_FAILS, *ANSWERS, *JUDGE_FAILS)

SLOW = (*TIMES_OUT, "judge_hangs", "world_hangs")
"""What takes seconds, and is drawn less often."""
LEFT_OUT = tuple(filter(None, os.environ.get("CHAOS_LEAVE_OUT", "").split(",")))


def number(*of: object) -> float:
    """A number from 0 to 1 that anybody can compute and nobody can guess."""
    return int(hashlib.sha256("|".join(map(str, of)).encode("utf-8", "replace")).hexdigest()[:8], 16) / 2**32


def drawn(seed: int, task_id: str, attempt: int, split: str, *, world: bool, left_out: tuple[str, ...]) -> str:
    """What this attempt does."""
    kinds = [kind for kind in (IN_A_WORLD if world else PLAIN) if kind not in left_out]
    at = (seed, task_id, attempt, split)
    if number("honest", *at) < HONEST:
        return "honest"
    kind = kinds[int(number("kind", *at) * len(kinds))]
    return "honest" if kind in SLOW and number("slow", *at) > 0.2 else kind


def reward_of(seed: int, task_id: str, attempt: int, answer: str, text: str) -> float:
    """The judge's arithmetic: whether the text has the right answer, and a bit that shows whose verdict it is."""
    boxed = re.findall(r"\\boxed\{([^}]*)\}", text)
    return float(bool(boxed) and boxed[-1].strip() == answer) + number(seed, task_id, attempt, text) / 2


def kind_of(workflow_task: Any) -> str:
    task = workflow_task.task
    at = (SEED, task.task_id, workflow_task.attempt, workflow_task.split.value)
    return drawn(*at, world=bool(task.env_type), left_out=LEFT_OUT)


def calculate(call: Any) -> str:
    arguments = str(call["function"]["arguments"])
    found = re.search(r"(\d+) ?([-+*/]) ?(\d+)", arguments)
    if not found:
        return "error"
    a, b = int(found[1]), int(found[3])
    return str({"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else "error"}[found[2]])


class Flow(Workflow):
    async def execute(self, workflow_task: Any, model_tuner: Any) -> Any:
        kind, task = kind_of(workflow_task), workflow_task.task
        text = await (self.act if task.env_type else self.solve)(kind, task, model_tuner)
        for kinds in (WORKFLOW_FAILS, TIMES_OUT):
            if kind in kinds:
                done = kinds[kind]()
                return await done if asyncio.iscoroutine(done) else done
        if kind in COPES:
            COPES[kind]()
        if kind == "gives_its_own_reward":
            return WorkflowOutput(reward=-number(workflow_task.attempt), response=text)
        return WorkflowOutput(response=text, metadata=ANSWERS[kind]() if kind in ANSWERS else {})

    async def solve(self, kind: str, task: Any, model_tuner: Any) -> str:
        system = "You solve math problems with a calculator. Answer with \\boxed{}."
        messages: list[Any] = [{"role": "system", "content": system}, {"role": "user", "content": task.main_query}]
        while True:
            reply = await model_tuner.chat(messages, tools=TOOLS)
            messages.append(reply.message)
            if not (calls := reply.message.get("tool_calls")) and kind not in TOOL:
                return reply.message.get("content") or ""
            for call in calls or [{"id": "none"}]:
                said = TOOL[kind]() if kind in TOOL else calculate(call)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})

    async def act(self, kind: str, task: Any, model_tuner: Any) -> str:
        messages: list[Any] = [{"role": "user", "content": task.main_query}]
        said, over = kind, False
        while True:
            observation, _, over, _ = model_tuner.gym_step({"role": "assistant", "content": said})
            if over:
                return said
            reply = await model_tuner.chat(messages)
            said = reply.message.get("content") or ""
            messages += [reply.message, {"role": "user", "content": observation}]


class Mine(Judge):
    wants_evaluation = True

    def judge(self, workflow_task: Any, output: Any) -> Any:
        task, kind = workflow_task.task, kind_of(workflow_task)
        if kind in JUDGE_FAILS:
            return JUDGE_FAILS[kind]()
        if output.evaluation is not None:
            return JudgeOutput(reward=output.evaluation.score, is_success=False)
        text = output.response or ""
        return JudgeOutput(reward=reward_of(SEED, task.task_id, workflow_task.attempt, task.metadata["answer"], text))


def break_engine() -> None:
    """Some calls of the model fail, in one of several ways."""
    from astuner.contracts.errors import ModelFailed
    from astuner_local.engine.engine import LocalEngine

    whole = LocalEngine.generate

    async def generate(self: Any, *arguments: Any, **options: Any) -> Any:
        if random.random() < ENGINE_FAILS:
            kinds = (
                ModelFailed("chaos: the engine"),
                RuntimeError("chaos: the engine"),
                TimeoutError("chaos: the engine"),
            )
            raise random.choice(kinds)
        return await whole(self, *arguments, **options)

    LocalEngine.generate = generate  # type: ignore[method-assign]


if FOLDER:
    faulthandler.register(signal.SIGUSR1)  # so that who waits for it in vain sees where it is
    break_engine()
