"""One episode of a real agent over a scripted model, and what became of each of its turns.

Two halves.  In a test: `run_program` runs a file of ``programs/`` with the Python of another environment, since agent
frameworks exclude one another, and reads the JSON that it prints.  In such a program: `play` runs an episode through
the real `EpisodeRunner`, with a `FakeEngine` that says what it is told as real token ids, and `story` makes JSON of it.

Importing this needs astuner, and `play` needs transformers (not torch); nothing here needs pytest.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"

ENVIRONMENTS = {
    "here": Path(sys.executable),  # AgentScope 2.x
    **{
        name: ROOT / f".venv-{name}" / "bin" / "python"
        for name in ("frameworks", "agentscope-1.0.7", "agentscope-1.0.21")
    },
}
"""The Python of each environment that `make test-slow` prepares."""

_PLAY = """\
from astuner import Judge, JudgeOutput, Workflow

class Play(Workflow):
    async def execute(self, workflow_task, model_tuner):
        return await workflow_task.task.metadata["work"](model_tuner)

class Indifferent(Judge):
    def judge(self, workflow_task, output):
        return JudgeOutput(reward=0.0)
"""


# ---- in a test -------------------------------------------------------------------------------------------------------


def run_program(environment: str, program: str, *arguments: str, timeout: float = 240, **variables: str) -> Any:
    """Run ``programs/<program>.py`` in an environment and return what it prints: one JSON value, as its last line.

    :param timeout: in seconds.
    :param variables: further environment variables.
    :raises AssertionError: it failed; with all that it wrote.
    """
    command = [str(ENVIRONMENTS[environment]), str(PROGRAMS / f"{program}.py"), *arguments]
    with tempfile.TemporaryDirectory() as home:  # AgentScope 1.x imports a folder "ray" that it finds where it runs
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=home,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "ASTUNER_HOME": home, **variables},
        )
    wrote = f"{' '.join(command)}\nexit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, wrote
    try:
        return json.loads(done.stdout.rstrip().rpartition("\n")[2])
    except ValueError:
        raise AssertionError(f"the last line is not JSON\n{wrote}") from None


# ---- in a program ----------------------------------------------------------------------------------------------------


def play(
    work: Callable[[Any], Awaitable[Any]] | str,
    replies: Any,
    *,
    chat_template: str | None = None,
    settings: str = "",
    max_model_len: int = 100_000,
    files: Mapping[str, str] | None = None,
    engine_type: Any = None,
    **task: Any,
) -> Any:
    """Run one training episode; return the `Episode`.

    :param work: what the workflow does with its ``model_tuner``, or a reference to a workflow (``file.py->Class``).
    :param replies: what the model says, one text per call, or a function of the prompt's text.
    :param settings: YAML of the ``astuner`` section, indented by two spaces.
    :param files: name -> text of further files beside the experiment file, for references to them.
    :param engine_type: a subclass of `FakeEngine` to use instead.
    :param task: fields of the `Task`; ``main_query``, ``env_type``, ``metadata``.
    :raises AssertionError: a turn does not begin with exactly the tokens of the turn that it continues.
    """
    from astuner.contracts.types import SamplingParams, Split, Task, WorkflowTask
    from astuner.rollout.models import one_model
    from astuner.rollout.runner import EpisodeRunner
    from astuner.testing import FakeEngine, fake_config

    tokenizer = _tokenizer()
    engine = (engine_type or FakeEngine)(replies, tokenizer, max_model_len=max_model_len)
    metadata = {"work": work, **task.pop("metadata", {})}
    whole_task = Task(task_id="task", main_query=task.pop("main_query", "?"), metadata=metadata, **task)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in {"play.py": _PLAY, **(files or {})}.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        workflow = work if isinstance(work, str) else "play.py->Play"
        parts = [f"astuner.rollout.workflow={workflow}", "astuner.task_judge.judge=play.py->Indifferent"]
        config = fake_config(Path(folder), settings, parts)
        codec = _codec(chat_template, config.astuner.rollout.disable_tool_calls)
        attempt = WorkflowTask(task=whole_task, episode_id="episode", group_id="group", split=Split.TRAIN)

        async def run() -> Any:
            runner = EpisodeRunner(config)
            try:
                return await runner.run(attempt, one_model(engine, codec), SamplingParams(max_tokens=1000))
            finally:
                await runner.close()

        episode = asyncio.run(run())
    _check_exact(episode)
    assert [list(t.generation.prompt_ids) for t in episode.turns] == [call[0] for call in engine.calls], (
        f"not every call of the engine was recorded once, in order: {episode.stop_reason.value} {episode.error}"
    )
    return episode


@functools.cache
def _tokenizer() -> Any:
    from astuner.testing import make_tokenizer

    return make_tokenizer()


@functools.cache
def _codec(chat_template: str | None, no_tools: bool) -> Any:
    """One for all episodes, as in a run: it tries its template out when it is made, which takes a while."""
    from astuner.chat.codec import ChatCodec

    return ChatCodec(_tokenizer(), chat_template=chat_template, disable_tool_calls=no_tools)


def _check_exact(episode: Any) -> None:
    turns = {turn.index: turn for turn in episode.turns}
    for turn in episode.turns:
        if turn.continues is not None:
            before = turns[turn.continues].generation
            sofar = (*before.prompt_ids, *before.response_ids)
            assert turn.generation.prompt_ids[: len(sofar)] == sofar, (
                f"turn {turn.index} does not begin with the tokens of turn {turn.continues}, which it continues"
            )


def story(episode: Any) -> dict[str, Any]:
    """The episode as JSON."""
    return {
        "stop_reason": episode.stop_reason.value,
        "error": episode.error,
        "output": None if episode.output is None else _plain(episode.output.metadata),
        "continues": [turn.continues for turn in episode.turns],
        "reasons": [turn.branch_reason for turn in episode.turns],
        "turns": [
            {
                "index": turn.index,
                "agent": turn.agent,
                "role": turn.role,
                "new": [dict(message) for message in turn.request],
                "tools": [tool["function"]["name"] for tool in turn.tools],
                "message": dict(turn.message),
                "prompt_tokens": len(turn.generation.prompt_ids),
                "completion_tokens": len(turn.generation.response_ids),
            }
            for turn in episode.turns
        ],
    }


def account(episode: Any) -> dict[str, Any]:
    """The episode as JSON, with its training samples, and the advantages next to a twin that failed.

    :raises AssertionError: a generated token is in no sample, or in several.
    """
    from astuner.config.schema import AlgorithmSection
    from astuner.rollout.credit import Scored, assign_credit
    from astuner.rollout.turns import build_samples

    cut = build_samples(episode)
    assert cut.dropped_paths == 0
    trained = [
        token for sample in cut.samples for token, mask in zip(sample.input_ids, sample.loss_mask, strict=True) if mask
    ]
    generated = [token for turn in episode.turns if turn.trained for token in turn.generation.response_ids]
    assert sorted(trained) == sorted(generated), f"{len(trained)} of {len(generated)} generated tokens are trained"
    scored = Scored.of(episode, cut.samples)
    failed = replace(
        scored,
        episode_id="failed",
        reward=scored.reward - 1,
        credits=tuple(replace(credit, reward=credit.reward - 1) for credit in scored.credits),
    )
    n = len(cut.samples)
    credited = assign_credit([scored, failed], AlgorithmSection(), constant_length=1)
    return {
        **story(episode),
        "samples": n,
        "generated": cut.generated_tokens,
        "trained": len(trained),
        "advantages": [round(sample.advantage, 3) for sample in credited[:n]],
        "of_failed": [round(sample.advantage, 3) for sample in credited[n:]],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (str, int, float, bool)) else repr(value)


def thinking_template() -> str:
    """The chat template of the tokenizer that `play` uses, and of a model that reasons before it answers."""
    from astuner_testing.fakes import CHATML

    plain = "{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}"
    assert plain in CHATML
    return CHATML.replace(
        plain,
        "{{- '<|im_start|>' + message.role + '\\n' -}}"
        "{%- if message.reasoning_content -%}"
        "{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}"
        "{%- endif -%}{{- message.content or '' -}}",
    )


def call(arguments: str = '{"a":6,"b":7}', name: str = "multiply") -> str:
    """A tool call as the scripted model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def tell(stories: Mapping[str, Any]) -> None:
    """Print the result of a program."""
    print(json.dumps(stories, ensure_ascii=False))
