"""An episode with a scripted model, for the tests of this package."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from astuner import ModelTuner
from astuner.chat.codec import ChatCodec
from astuner.config.schema import AstunerSection
from astuner.contracts.types import SamplingParams, Split
from astuner.plugins.loader import load_plugins
from astuner.rollout.models import one_model
from astuner.rollout.turns import EpisodeRecorder
from astuner.testing import FakeEngine, make_tokenizer, workflow_task


class Bench:
    """An episode whose model gives these replies."""

    def __init__(
        self,
        *replies: str,
        chat_template: str | None = None,
        max_model_len: int = 100_000,
        split: Split = Split.VALIDATION,  # where an agent may choose its temperature
        engine_type: type[FakeEngine] = FakeEngine,
        **settings: Any,
    ) -> None:
        self.tokenizer = make_tokenizer()
        self.engine = engine_type(list(replies), self.tokenizer, max_model_len=max_model_len)
        self.recorder = EpisodeRecorder()
        checked = AstunerSection.model_validate({"model": {"path": "fake"}, **settings})
        config: Any = SimpleNamespace(astuner=checked, plugins=load_plugins())
        self.tuner: Any = ModelTuner(
            models=one_model(self.engine, ChatCodec(self.tokenizer, chat_template=chat_template)),
            recorder=self.recorder,
            sampling=SamplingParams(max_tokens=1000),
            config=config,
            workflow_task=workflow_task(split=split),
        )

    @property
    def continued(self) -> list[int | None]:
        return [turn.continues for turn in self.recorder.turns]

    @property
    def reasons(self) -> list[str]:
        return [turn.branch_reason for turn in self.recorder.turns]

    @property
    def requests(self) -> Sequence[Sequence[Any]]:
        """The new messages of each turn."""
        return [turn.request for turn in self.recorder.turns]


def call(arguments: str = '{"a":6,"b":7}', name: str = "multiply") -> str:
    """A reply that calls a tool."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
