"""An episode as one row of the log, and back.

Of a turn that continues another, only the prompt's tokens after that turn's prompt and response are written, so a
turn costs what is new in it.  Invariant: what `read_episode` makes of `episode_row` has the same tokens, logprobs
(as float32), messages and verdict.  Free-form values travel as JSON text: what JSON cannot hold becomes text, and a
number that is not finite becomes null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from types import MappingProxyType
from typing import Any

from astuner.contracts.environment import Evaluation
from astuner.contracts.messages import mapping_of
from astuner.contracts.types import (
    Episode,
    ExternalTurn,
    FinishReason,
    Generation,
    JudgeOutput,
    Sample,
    Split,
    StopReason,
    Task,
    Turn,
    WorkflowOutput,
    WorkflowTask,
)
from astuner_record.episode_log.columns import Row, plain

_OF_SAMPLES = (
    "episode_id", "group_id", "agent", "role", "policy", "advantage", "token_weight", "reward", "policy_version",
)  # fmt: skip


def episode_row(step: int, episode: Episode, time: float) -> Row:
    """The row of an episode.

    :param time: when it ended, in seconds since 1970.
    """
    of, verdict, output = episode.workflow_task, episode.verdict, episode.output
    earlier = {turn.index: turn for turn in episode.turns}
    task = {"init_messages": of.task.init_messages, "env_type": of.task.env_type, "metadata": of.task.metadata}
    return {
        "episode_id": of.episode_id,
        "group_id": of.group_id,
        "task_id": of.task.task_id,
        "step": step,
        "split": of.split.value,
        "attempt": of.attempt,
        "time": time,
        "query": of.task.main_query,
        "stop_reason": episode.stop_reason.value,
        "reward": episode.reward,
        "rewards": json_text(verdict.rewards) if verdict and verdict.rewards else None,
        "reward_source": episode.reward_source,
        "is_success": episode.is_success,
        "error": episode.error,
        "seconds": episode.seconds,
        "retries": episode.retries,
        "task": json_text(task),
        "output": None if output is None else json_text(_output(output)),
        "metrics": json_text(verdict.metrics) if verdict and verdict.metrics else None,
        "turns": [_turn(turn, earlier) for turn in episode.turns],
        "external": [_external(turn) for turn in episode.external],
        "started": episode.started,
    }


def credit_rows(step: int, samples: Sequence[Sample], trainer: Mapping[int, Any] = MappingProxyType({})) -> list[Row]:
    """The rows of a step's samples; within an episode they are numbered in the order given.

    :param trainer: place in ``samples`` -> what the trainer computed, float32 [trained tokens].
    :raises ValueError: there is another number of them than of trained tokens.
    """
    numbers: dict[str, int] = {}
    rows = []
    for place, s in enumerate(samples):
        number = numbers.get(s.episode_id, 0)
        numbers[s.episode_id] = number + 1
        trained, logprobs = s.trained_tokens, trainer.get(place)
        if logprobs is not None and len(logprobs) != trained:
            raise ValueError(
                f"step {step}, episode {s.episode_id}, sample {number}: {trained} trained tokens, but the trainer's "
                f"log-probabilities of {len(logprobs)}"
            )
        rows.append(
            {
                **{name: getattr(s, name) for name in _OF_SAMPLES},
                "step": step,
                "sample": number,
                "tokens": len(s.input_ids),
                "trained_tokens": trained,
                "trainer_logprobs": logprobs,
            }
        )
    return rows


def read_episode(row: Row) -> Episode:
    """The episode of a row, with whole prompts."""
    task, output = json.loads(row["task"]), row["output"]
    workflow_task = WorkflowTask(
        task=Task(
            task_id=row["task_id"],
            main_query=row["query"],
            init_messages=task["init_messages"],
            env_type=task["env_type"],
            metadata=task["metadata"],
        ),
        episode_id=row["episode_id"],
        group_id=row["group_id"],
        split=Split(row["split"]),
        attempt=row["attempt"],
    )
    verdict = None
    if row["reward"] is not None:
        verdict = JudgeOutput(
            reward=row["reward"],
            is_success=row["is_success"],
            metrics=json.loads(row["metrics"] or "{}"),
            rewards=json.loads(row["rewards"] or "{}"),
        )
    return Episode(
        workflow_task=workflow_task,
        turns=_read_turns(row["turns"]),
        output=None if output is None else _read_output(json.loads(output)),
        verdict=verdict,
        reward_source=row["reward_source"],
        stop_reason=StopReason(row["stop_reason"]),
        error=row["error"],
        seconds=row["seconds"],
        retries=row["retries"],
        external=tuple(_read_external(turn) for turn in row["external"]),
        started=row["started"],
    )


def json_text(value: Any) -> str:
    """JSON that any reader reads."""
    try:
        return _encoder()(value).decode()
    except TypeError:
        text = json.dumps(_spelled_out(value, 0), ensure_ascii=False)
        return text.encode("utf-8", "backslashreplace").decode()  # \ud800 is valid in JSON


@cache
def _encoder() -> Callable[[Any], bytes]:
    """It takes JSON's own types alone, and makes null of a number that is not finite.

    Everything else is spelled out by the one rule below.  So no code of a value's own runs while the encoder holds on
    to it, and of objects no field is written that they do not show.
    """
    import orjson

    plain_only = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS
    return partial(orjson.dumps, option=plain_only)


_DEEPEST = 40
"""Levels of nesting below which a value is spelled out as text; a circle ends here too."""


def _spelled_out(value: Any, depth: int) -> Any:
    if type(value) is float:
        return value if math.isfinite(value) else None
    if value is None or type(value) in (bool, int, str):
        return value
    if depth >= _DEEPEST:
        return f"<{type(value).__name__}>"
    value = mapping_of(value)
    if isinstance(value, Mapping):
        return {str(k): _spelled_out(v, depth + 1) for k, v in list(value.items())}
    if isinstance(value, (list, tuple)):
        return [_spelled_out(v, depth + 1) for v in list(value)]
    try:
        return _spelled_out(plain(value), depth + 1)
    except TypeError:
        return str(value)


def _output(output: WorkflowOutput) -> Row:
    fields = ("reward", "is_success", "response", "metadata", "metrics")
    evaluation = asdict(output.evaluation) if output.evaluation else None
    return {**{name: getattr(output, name) for name in fields}, "evaluation": evaluation}


def _read_output(output: Row) -> WorkflowOutput:
    evaluation = output.pop("evaluation")
    return WorkflowOutput(**output, evaluation=Evaluation(**evaluation) if evaluation else None)


_SAME = (
    "index", "agent", "role", "policy", "trained", "lost", "continues", "branch_reason", "approximation", "started",
    "seconds",
)  # fmt: skip
"""Columns of a turn that are its fields."""
_SAME_OUTSIDE = ("index", "agent", "role", "model", "prompt_tokens", "started", "seconds")


def _turn(turn: Turn, earlier: Mapping[int, Turn]) -> Row:
    said = turn.generation
    inherited = 0
    if turn.continues is not None and turn.continues in earlier:
        before = earlier[turn.continues].generation
        inherited = len(before.prompt_ids) + len(before.response_ids)
    return {
        **{name: getattr(turn, name) for name in _SAME},
        "finish_reason": said.finish_reason.value,
        "policy_version": said.policy_version,
        "prompt_tokens": len(said.prompt_ids),
        "response_tokens": len(said.response_ids),
        "prompt_ids": said.prompt_ids[inherited:] if inherited else said.prompt_ids,
        "response_ids": said.response_ids,
        "logprobs": said.logprobs,
        "request": json_text(turn.request),
        "tools": json_text(turn.tools) if turn.tools else None,
        "reply": json_text(turn.message),
    }


def _read_turns(rows: Sequence[Row]) -> tuple[Turn, ...]:
    turns: dict[int, Turn] = {}
    for row in rows:
        new = tuple(row["prompt_ids"])
        if inherited := row["prompt_tokens"] - len(new):
            before = turns[row["continues"]].generation
            new = (*before.prompt_ids, *before.response_ids)[:inherited] + new
        generation = Generation(
            prompt_ids=new,
            response_ids=tuple(row["response_ids"]),
            logprobs=tuple(row["logprobs"]),
            finish_reason=FinishReason(row["finish_reason"]),
            policy_version=row["policy_version"],
        )
        turns[row["index"]] = Turn(
            **{name: row[name] for name in _SAME},
            generation=generation,
            request=tuple(json.loads(row["request"])),
            tools=tuple(json.loads(row["tools"] or "[]")),
            message=json.loads(row["reply"]),
        )
    return tuple(turns.values())


def _external(turn: ExternalTurn) -> Row:
    return {
        **{name: getattr(turn, name) for name in _SAME_OUTSIDE},
        "request": json_text(turn.request),
        "reply": json_text(turn.message),
        "response_tokens": turn.completion_tokens,
    }


def _read_external(row: Row) -> ExternalTurn:
    return ExternalTurn(
        **{name: row[name] for name in _SAME_OUTSIDE},
        request=tuple(json.loads(row["request"])),
        message=json.loads(row["reply"]),
        completion_tokens=row["response_tokens"],
    )
