"""`check_workflow`: does a workflow keep to the contract of `astuner.Workflow`?"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from astuner.contracts.types import SamplingParams, WorkflowOutput, WorkflowTask
from astuner.testing._run import LONGEST_BLOCK, ask, is_finite_number, run
from astuner.testing.fakes import FakeEngine, Replies, fake_config, make_tokenizer

AT_ONCE = 4


def check_workflow(
    workflow_cls: Any, workflow_task: WorkflowTask, *, replies: Replies = ("The answer is 4.",), config: Any = None
) -> WorkflowOutput:
    """Run one workflow with a scripted model, and return what it returned.

    - it can be built without arguments, anew for every episode;
    - it asks ``model_tuner`` at least once (otherwise there is nothing to train);
    - it returns a `WorkflowOutput`; its reward is None or a finite number;
    - the same replies give the same prompts again, and 4 episodes at once do not mix;
    - as ``async def`` it does not hold up the event loop.

    :param replies: what the model says, one text per call, or a function of the prompt's text. A tool call is
        ``<tool_call>\\n{"name": "add", "arguments": {"a": 1}}\\n</tool_call>``.
    """
    name = getattr(workflow_cls, "__name__", str(workflow_cls))
    tokenizer = make_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        settings = config if config is not None else fake_config(Path(folder))

        async def once() -> tuple[Any, list[list[int]]]:
            engine = FakeEngine(replies, tokenizer)
            return await _episode(workflow_cls, workflow_task, engine, settings), [call[0] for call in engine.calls]

        async def many() -> list[tuple[Any, list[list[int]]]]:
            return await asyncio.gather(*(once() for _ in range(AT_ONCE)))

        (output, prompts), _ = run(once())
        # Measured the second time: the first call imports the agent's framework, once per process.
        (_, prompts_again), blocked = run(once())
        together, _ = run(many())
    assert prompts, f"{name} never asked the model; pass model_tuner to the agent as its model"
    assert isinstance(output, WorkflowOutput), (
        f"{name}.execute returned {output!r}; return WorkflowOutput(reward=None, …)"
    )
    reward = output.reward
    rewards = list(reward.values()) if isinstance(reward, Mapping) else [reward]
    assert reward is None or (rewards and all(is_finite_number(r) for r in rewards)), (
        f"{name} returned the reward {reward!r}; return a finite number, a mapping of agents or roles to finite "
        "numbers, or None to ask the judge"
    )
    assert prompts_again == prompts, (
        f"{name} showed the model other prompts the second time, with the same task and replies: "
        f"{_difference(tokenizer, prompts, prompts_again)}; leave out clocks and random ids"
    )
    for _, others in together:
        assert others == prompts, (
            f"{AT_ONCE} episodes at once showed the model other prompts than one alone: "
            f"{_difference(tokenizer, prompts, others)}; keep an episode's state on self, not on class or module"
        )
    assert blocked < LONGEST_BLOCK, (
        f"{name}.execute held up the event loop for {blocked:.1f} s, and with it all other episodes; "
        "await what waits, or write a plain `def execute`, which runs in a thread of its own"
    )
    return output


async def _episode(workflow_cls: Any, workflow_task: WorkflowTask, engine: FakeEngine, config: Any) -> Any:
    from astuner.chat.codec import ChatCodec
    from astuner.rollout.agents import AgentRegistry
    from astuner.rollout.model_tuner import ModelTuner
    from astuner.rollout.models import PolicyModel
    from astuner.rollout.recorder import EpisodeRecorder

    codec = ChatCodec(engine.tokenizer)
    tuner = ModelTuner(
        models=dict.fromkeys(AgentRegistry.of(config.astuner).policies, PolicyModel(engine, codec)),
        recorder=EpisodeRecorder(),
        sampling=SamplingParams(max_tokens=4096, stop_token_ids=tuple(codec.stop_token_ids)),
        config=config,
        workflow_task=workflow_task,
    )
    return await ask(workflow_cls().execute, workflow_task, tuner)


def _difference(tokenizer: Any, one: list[list[int]], other: list[list[int]]) -> str:
    if len(one) != len(other):
        return f"{len(one)} calls and {len(other)} calls"
    call = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    a, b = tokenizer.decode(one[call]), tokenizer.decode(other[call])
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"call {call}: …{a[max(0, at - 20) : at + 40]!r} and …{b[max(0, at - 20) : at + 40]!r}"
