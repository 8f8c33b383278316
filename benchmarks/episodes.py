"""Episodes on an engine that answers immediately, without a run: the work of a single model call."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from astuner import Generation, InferenceEngine, Task, WorkflowTask
from astuner.chat.codec import ChatCodec
from astuner.config import load_config
from astuner.contracts.types import FinishReason, SamplingParams
from astuner.rollout.model_tuner import ModelTuner
from astuner.rollout.models import one_model
from astuner.rollout.parts import OutputChecks
from astuner.rollout.turns import EpisodeRecorder
from astuner.support.collector import leave_out_what_is_loaded
from benchmarks.records import ANSWER, call, first_messages, results


def replies(tokenizer: Any, turns: int) -> list[list[int]]:
    """Return the token IDs of the model's reply at every turn, in the family's format, including the end token."""
    codec = ChatCodec(tokenizer)
    template = codec.template
    texts = [template.write_reply("", [call(turn)]) for turn in range(turns - 1)] + [template.write_reply(ANSWER)]
    return [[*template.encode(text), codec.stop_token_ids[0]] for text in texts]


class ScriptedEngine(InferenceEngine):
    """Engine that immediately returns the next reply of the conversation.

    :param replies: Token IDs at every turn; the session identifies the conversation.
    """

    max_model_len = 1 << 20

    def __init__(self, replies: Sequence[Sequence[int]]) -> None:
        self._replies = [tuple(ids) for ids in replies]
        self._logprobs = [(-0.5,) * len(ids) for ids in self._replies]
        self._asked: dict[str, int] = {}

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, session: str = "") -> Generation:
        turn = self._asked.get(session, 0)
        self._asked[session] = turn + 1
        return Generation(
            prompt_ids=prompt_ids,
            response_ids=self._replies[turn],
            logprobs=self._logprobs[turn],
            finish_reason=FinishReason.STOP,
            policy_version=0,
        )

    def forget(self) -> None:
        """Restart all conversations."""
        self._asked.clear()


class Episodes:
    """Factory of model tuners with the default checks, like `EpisodeRunner`."""

    def __init__(self, tokenizer: Any, engine: InferenceEngine) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "benchmark.yaml"
            path.write_text("astuner:\n  model:\n    path: scripted\n", encoding="utf-8")
            self.config = load_config(path)
        self._checks = OutputChecks.build(self.config)
        self._models = one_model(engine, ChatCodec(tokenizer))
        self._made = 0

    def make(self, **options: Any) -> tuple[ModelTuner, EpisodeRecorder]:
        """Return the model tuner and recorder of a new episode."""
        leave_out_what_is_loaded()
        self._made += 1
        recorder = EpisodeRecorder()
        tuner = ModelTuner(
            models=self._models,
            recorder=recorder,
            sampling=SamplingParams(max_tokens=4096),
            config=self.config,
            workflow_task=WorkflowTask(
                task=Task(task_id=str(self._made), main_query=""), episode_id=str(self._made), group_id="0"
            ),
            checks=self._checks,
            **options,
        )
        return tuner, recorder


async def converse(ask: Any, number: int) -> int:
    """Run the agent of the scripted conversation and return its number of model calls.

    :param ask: ``await ask(messages)`` returns an assistant message.
    """
    messages: list[Any] = [*first_messages(number)]
    turn = 0
    while True:
        message = await ask(messages)
        heard = results(message, number, turn)
        turn += 1
        if not heard:
            return turn
        messages += [message, *heard]
