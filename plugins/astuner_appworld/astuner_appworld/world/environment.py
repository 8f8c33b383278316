"""Implement AppWorld as an `Environment`, in one trusted instance process without a world.

It forks a process with the world and the apps, a process with the shell for model-written code, and for every
evaluation a new process that knows the answers (`session`). Invariant: an agent can harm only its own episode, which is
always scored; only a failure of AppWorld itself raises an error. Every message of an agent results in code or in a
sentence that describes what is missing; nothing is guessed.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from astuner.contracts.environment import Environment, Evaluation, StepResult
from astuner.contracts.types import Task
from astuner_appworld.world import package, roots
from astuner_appworld.world.session import Options, Session, StateBroken

_SYSTEM_PROMPT = Path(__file__).with_name("system_prompt.txt").read_text(encoding="utf-8").rstrip("\n")
"""Prompt written for ASTuner; the text of a task comes from AppWorld's data at run time."""
TOOL_NAMES = ("appworld", "execute")

_FENCE = re.compile(
    r"^[ \t]*```[ \t]*(?P<language>[\w+-]*)[ \t]*\r?\n(?P<code>.*?)(?:^[ \t]*```[ \t]*\r?$|\Z)",
    re.MULTILINE | re.DOTALL,
)
_PYTHON = {"", "python", "python3", "py"}

NO_CODE = (
    "No code was found in your message, so nothing was run. Write one block that opens with ```python on a line of its "
    "own and closes with ``` on another."
)


def warm() -> None:
    """Import the package before the first fork, so that instances share its pages."""
    package.load()


class AppWorldEnvironment(Environment):
    """Task for a person with nine everyday apps, solved by writing Python."""

    def __init__(self, params: Mapping[str, Any] | None = None) -> None:
        super().__init__(params)
        self._options = Options.of(self.params)
        self._folder: Path | None = None
        self._session: Session | None = None
        self._steps = 0
        self._over: StepResult | None = None
        self._completed = False

    @classmethod
    def tasks(cls, split: str, params: Mapping[str, Any]) -> Iterator[Task]:
        for task_id in roots.task_ids(roots.data_root(), split):
            yield Task(task_id=task_id, env_type="appworld", metadata={"split": split})

    def reset(self, task: Task) -> StepResult:
        if self._session is not None:
            raise RuntimeError("An instance serves one episode. Create a new instance.")
        root = roots.data_root()
        roots.task_folder(root, task.task_id)
        package.load()
        self._folder = Path(tempfile.mkdtemp(prefix="aw-")).resolve()
        self._session = Session(root, task.task_id, self._folder, self._options)
        facts = self._session.start()
        messages = opening(facts["instruction"], facts["supervisor"])
        return StepResult(
            observation=messages[-1]["content"], messages=messages, info={"confined": self._session.confined}
        )

    def step(self, action: Mapping[str, Any]) -> StepResult:
        if self._over is not None:
            over = {**self._over.info, "refused": True}
            return replace(self._over, observation="The task is over; nothing was run.", info=over)
        session = self._running()
        self._steps += 1
        lost = False
        try:
            ran = session.run(code_of(action, self._options.code_format))
        except NoCode as e:
            said = str(e)
        else:
            said = observation(shortened(ran.output, self._options.max_output))
            self._completed, lost = ran.completed, ran.lost
        truncated = not self._completed and (lost or self._steps >= self._options.max_interactions)
        result = StepResult(
            observation=said,
            terminated=self._completed,
            truncated=truncated,
            info={"interactions": self._steps, "restarts": session.restarts, "world_lost": lost},
        )
        self._over = result if result.is_over else None
        return result

    def evaluate(self) -> Evaluation:
        found = self._tests()
        passes, num_tests = found["passes"], found["num_tests"]
        return Evaluation(
            score=len(passes) / num_tests if num_tests else 0.0,
            success=bool(num_tests) and len(passes) == num_tests and not found["stumbled"],
            details={**found, "task_completed": self._completed, "interactions": self._steps},
        )

    def describe(self) -> Mapping[str, Any]:
        return {
            "summary": "Carry out a person's task in AppWorld's apps by writing Python in ```python blocks.",
            "score": "Share of the task's tests that pass; a success passes all of them. An untouched world passes "
            "some tests: see the reward modes of the judge.",
            "tools": list(TOOL_NAMES),
            "splits": list(roots.SPLITS),
            "options": asdict(self._options),
            "confined": self._session.confined if self._session is not None else "",
        }

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None

    def _tests(self) -> dict[str, Any]:
        """Run the tests; a state that the tests cannot read counts as a failure."""
        try:
            return self._running().evaluate()
        except StateBroken:
            failure = {"requirement": "the tests can look at the state that the agent left", "label": "no_op_fail"}
            return {"passes": [], "failures": [failure], "num_tests": 1, "difficulty": None, "stumbled": "StateBroken"}

    def _running(self) -> Session:
        if self._session is None or self._folder is None:
            raise RuntimeError("The instance was not reset." if self._session is None else "The instance is closed.")
        return self._session


def opening(instruction: str, supervisor: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the system message and the user message."""
    name = f"{supervisor.get('first_name', '')} {supervisor.get('last_name', '')}".strip()
    system = _SYSTEM_PROMPT.format(
        name=name, email=supervisor.get("email", ""), phone=supervisor.get("phone_number", "")
    )
    return [{"role": "system", "content": system}, {"role": "user", "content": f"The task: {instruction}"}]


def observation(text: str) -> str:
    """Return the output of the code in the format for the agent."""
    return f"Output:\n```\n{text}\n```"


def shortened(text: str, limit: int) -> str:
    """Return at most ``limit`` characters of output plus the number of omitted characters."""
    text = text.rstrip()
    if len(text) <= limit:
        return text
    head = limit * 2 // 3
    tail = limit - head
    return f"{text[:head]}\n[... {len(text) - limit} characters left out ...]\n{text[len(text) - tail :]}"


class NoCode(Exception):
    """Raised for a message without code; the agent receives the text."""


def code_of(action: Mapping[str, Any], code_format: str = "first_block") -> str:
    """Return the code to run; the code of several tool calls is joined.

    :param code_format: ``first_block`` runs the first fenced Python block, ``all_blocks`` joins all of them, ``raw``
        also accepts text without a fence as code.
    :raises NoCode: The message contains no code.
    """
    calls = action.get("tool_calls")
    if calls:
        return "\n".join(_code_of_call(call) for call in (calls if isinstance(calls, list) else [calls]))
    content = action.get("content")
    text = content if isinstance(content, str) else ""
    blocks = [m["code"] for m in _FENCE.finditer(text) if m["language"].lower() in _PYTHON]
    blocks = [block for block in blocks if block.strip()]
    if blocks:
        return "\n".join(blocks) if code_format == "all_blocks" else blocks[0]
    if code_format == "raw" and text.strip() and "```" not in text:
        return text
    raise NoCode(NO_CODE)


def _code_of_call(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    name, arguments = (
        (function.get("name"), function.get("arguments")) if isinstance(function, Mapping) else (None, None)
    )
    if name not in TOOL_NAMES:
        raise NoCode(f"There is no tool named {str(name)[:80]!r}, so nothing was run. The tool is {TOOL_NAMES[1]!r}.")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise NoCode("The tool call's arguments are not JSON, so nothing was run.") from None
    code = arguments.get("code") if isinstance(arguments, Mapping) else None
    if not isinstance(code, str) or not code.strip():
        raise NoCode('The tool call has no code, so nothing was run. Its arguments are {"code": "..."}.')
    return code
