"""Implement the `program` workflow: run any program that calls an OpenAI- or Anthropic-style endpoint.

The program starts once per episode with the endpoint's URL and its own key in the environment. It receives the task on
standard input, and its standard output is passed to the judge. Invariant: when the episode ends, no process that the
program started is left, except processes that created their own session; no key occurs in a message.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Literal

from pydantic import Field

from astuner.contracts.secrets import is_secret_variable, without_user, without_values
from astuner.contracts.section import Section
from astuner.contracts.types import WorkflowOutput, WorkflowTask
from astuner.contracts.workflow import Workflow
from astuner_gateway.beside import signal_group

if TYPE_CHECKING:
    from astuner import ModelTuner

MAX_OUTPUT = 1 << 22
"""Maximum bytes of standard output and of standard error."""
_SHOWN = 2000
_KEY = re.compile(r"(^|_)(KEY|TOKEN|PAT|PASS)(_|$)")
"""Names of environment variables with secrets, in addition to the common patterns."""
_LOOK = 0.1
"""Seconds between checks of the size of the output."""
_PATIENCE = 2.0
"""Seconds that a program has to end after SIGTERM."""


class ProgramConfig(Section):
    """Settings of the workflow `program`."""

    argv: list[str] = Field(min_length=1)
    """Program and its arguments, run without a shell. Relative paths start in `cwd`."""
    cwd: str | None = None
    """Working directory, relative to the experiment file; null: directory of the experiment file."""
    env: dict[str, str] = Field(default_factory=dict)
    """Additional environment variables."""
    input: Literal["text", "json"] = "text"
    """Standard input. `text`: the query of the task; `json`: one object with `task_id`, `main_query` and
    `init_messages`."""
    metadata_fields: list[str] = Field(default_factory=list)
    """Metadata fields of the task to add to the object of `input: json`. Do not add the reference answer."""
    output: Literal["text", "json"] = "text"
    """Standard output. `text`: the answer, which the judge reads as `final_answer`; `json`: a last line with an object
    of any of `final_answer`, `reward`, `is_success`, `metadata` and `metrics`."""
    agents: list[str] = Field(default_factory=list)
    """Names of several agents in the program. `ASTUNER_KEY_X` contains the key of agent X; `OPENAI_API_KEY` is the key
    of the first. The role of agent X is the entry X of `astuner.agents`."""


class ProgramFailed(Exception):
    """The program could not start, failed, or wrote an invalid answer."""


class ProgramWorkflow(Workflow):
    """Start the program and wait for its answer."""

    name = "program"

    def __init__(self, config: ProgramConfig) -> None:
        self.config = config

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        env = self._environment(model_tuner)
        with TemporaryFile() as given, TemporaryFile() as out, TemporaryFile() as err:
            given.write(self._input(workflow_task))
            given.seek(0)
            process = await self._start(env, model_tuner.config.base_dir / (self.config.cwd or ""), given, out, err)
            try:
                while process.returncode is None:
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(process.wait(), _LOOK)
                    _check_size(out, err)
            finally:
                await _end(process)
            _check_size(out, err)
            for file in (out, err):
                file.seek(0)
            said, complained = (file.read().decode("utf-8", "replace") for file in (out, err))
        if process.returncode != 0:
            told = _without_secrets(complained.strip()[-_SHOWN:], env)
            before, _, last = told.rpartition("\n")  # the last line of a traceback is the cause
            message = f"{last}; output before it: {before}" if before else last or "no message"
            raise ProgramFailed(f"{self.config.argv[0]} ended with exit status {process.returncode}: {message}")
        return self._output(said)

    def _environment(self, model_tuner: ModelTuner) -> dict[str, str]:
        """Return this process's variables without ASTuner's own keys, plus the endpoint's variables."""
        access = model_tuner.base_url_and_key(self.config.agents[0] if self.config.agents else None)
        keys = {f"ASTUNER_KEY_{name}": model_tuner.base_url_and_key(name).api_key for name in self.config.agents}
        settings = model_tuner.config.astuner
        ours = {settings.endpoint.token_env, settings.debug.api_key_env}
        ours |= {agent.api_key_env for agent in settings.agents.values()}
        inherited = {name: value for name, value in os.environ.items() if name not in ours}
        return {**inherited, **access.environment(), **keys, **self.config.env}

    async def _start(
        self, env: dict[str, str], cwd: Path, given: IO[bytes], out: IO[bytes], err: IO[bytes]
    ) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                *self.config.argv,
                cwd=cwd,
                env=env,
                stdin=given,  # files instead of pipes, because leftover processes could hold pipes open
                stdout=out,
                stderr=err,
                start_new_session=True,  # so that all of its processes can be ended with it
            )
        except OSError as e:
            raise ProgramFailed(f"astuner.rollout.program.argv: cannot start {self.config.argv[0]!r}: {e}") from e

    def _input(self, workflow_task: WorkflowTask) -> bytes:
        task = workflow_task.task
        if self.config.input == "text":
            return task.main_query.encode()
        shown = {name: task.metadata.get(name) for name in self.config.metadata_fields}
        whole = {"task_id": task.task_id, "main_query": task.main_query, "init_messages": list(task.init_messages)}
        return json.dumps({**whole, **({"metadata": shown} if shown else {})}, ensure_ascii=False).encode()

    def _output(self, text: str) -> WorkflowOutput:
        if self.config.output == "text":
            return WorkflowOutput(response=text.strip(), metadata={"final_answer": text.strip()})
        last = text.strip().rpartition("\n")[2]
        try:
            answer = json.loads(last)
        except ValueError:
            answer = None
        if not isinstance(answer, Mapping):
            raise ProgramFailed(
                f"the last line of {self.config.argv[0]}'s output is {last[:200]!r}, but must be one JSON object "
                "(astuner.rollout.program.output: json)"
            )
        metadata = {**(answer.get("metadata") or {})}
        if "final_answer" in answer:
            metadata["final_answer"] = answer["final_answer"]
        return WorkflowOutput(
            reward=answer.get("reward"),
            is_success=answer.get("is_success"),
            response=answer.get("final_answer"),
            metadata=metadata,
            metrics=answer.get("metrics") or {},
        )


def _check_size(*files: IO[bytes]) -> None:
    if any(os.fstat(file.fileno()).st_size > MAX_OUTPUT for file in files):
        raise ProgramFailed(f"the program wrote more than {MAX_OUTPUT >> 20} MiB. Write logs to a file instead")


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the program and all of its processes: with SIGTERM first if it still runs."""
    if process.returncode is None:
        signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), _PATIENCE)
    signal_group(process.pid, signal.SIGKILL)  # its children may still run
    await process.wait()


def _without_secrets(text: str, env: Mapping[str, str]) -> str:
    """Return ``text`` without the values of secret variables, which include the endpoint's keys."""
    hidden = [value for name, value in env.items() if is_secret_variable(name) or _KEY.search(name)]
    return without_user(without_values(text, hidden, "***"))
