"""The `program` workflow: any program that speaks to an OpenAI- or Anthropic-style endpoint, in any language.

It is started once per episode with the endpoint's URL and a key of its own in the environment, gets the task on its
standard input, and its standard output is what the judge sees.  Invariant: when the episode ends, however, nothing
that the program started is left, except what has made itself a session of its own; and no key is in a message.
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
"""Bytes of standard output, and as many of standard error, that are read; more is a failure."""
_SHOWN = 2000
_KEY = re.compile(r"(^|_)(KEY|TOKEN|PAT|PASS)(_|$)")
"""How environment variables with secrets are called, beside what settings are."""
_LOOK = 0.1
"""Seconds between looks whether the program has written too much."""
_PATIENCE = 2.0
"""Seconds a program has to end by itself after SIGTERM."""


class ProgramConfig(Section):
    argv: list[str] = Field(min_length=1)
    """The program and its arguments; no shell is involved."""
    cwd: str | None = None
    """The folder it runs in, relative to the experiment file's; null: that folder itself."""
    env: dict[str, str] = Field(default_factory=dict)
    """More environment variables."""
    input: Literal["text", "json"] = "text"
    """Standard input: the task's query, or one JSON object with task_id, main_query and init_messages."""
    metadata_fields: list[str] = Field(default_factory=list)
    """Fields of the task's metadata that the JSON object also holds; the reference answer should not be among them."""
    output: Literal["text", "json"] = "text"
    """Standard output: the answer, or a last line of JSON (`final_answer`, `reward`, `is_success`, `metadata`, …)."""
    agents: list[str] = Field(default_factory=list)
    """More agents in the program: the key of agent X is in ASTUNER_KEY_X, its role the entry X of astuner.agents."""


class ProgramFailed(Exception):
    """The program cannot be started, failed, or wrote something that is no answer."""


class ProgramWorkflow(Workflow):
    """Starts the program, waits for its answer."""

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
            before, _, last = told.rpartition("\n")  # where it is a traceback, this is the cause
            message = f"{last}; before that it wrote: {before}" if before else last or "no message"
            raise ProgramFailed(f"{self.config.argv[0]} ended with exit status {process.returncode}: {message}")
        return self._output(said)

    def _environment(self, model_tuner: ModelTuner) -> dict[str, str]:
        """This process's variables without the keys that are for ASTuner itself, and the endpoint's."""
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
                stdin=given,  # files and no pipes, which something that it leaves behind could hold open
                stdout=out,
                stderr=err,
                start_new_session=True,  # so that all it starts can be ended with it
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
                f"the last line of {self.config.argv[0]}'s output is {last[:200]!r}; it must be one JSON object "
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
        raise ProgramFailed(f"the program wrote more than {MAX_OUTPUT >> 20} MiB; write logs to a file instead")


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the program and everything it started: politely first, if it still runs."""
    if process.returncode is None:
        signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), _PATIENCE)
    signal_group(process.pid, signal.SIGKILL)  # its children may outlive it
    await process.wait()


def _without_secrets(text: str, env: Mapping[str, str]) -> str:
    """``text`` without the values of variables whose names say that they are secret, the endpoint's keys among them."""
    hidden = [value for name, value in env.items() if is_secret_variable(name) or _KEY.search(name)]
    return without_user(without_values(text, hidden, "***"))
