"""A step does not wait for a group that hangs, nor lose it; and a judge may ask a second model that Trinity serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..fsdp.runs import Run, position, running

pytestmark = pytest.mark.timeout(1800)

HANGING = 5
"""The draw whose episodes hang, the first time that it is given out."""
WORKFLOW = '''
import asyncio
import os
from pathlib import Path

from astuner import Judge, JudgeOutput, Workflow, WorkflowOutput


class Hanging(Workflow):
    async def execute(self, workflow_task, model_tuner):
        hangs = "hangs" in workflow_task.task.main_query
        if hangs and not (gone := Path(__file__).with_name(f"hung-{workflow_task.attempt}")).exists():
            gone.touch()
            await asyncio.sleep(600)
        for n in range(1 + workflow_task.attempt % 3):  # each afresh: as many samples
            question = {"role": "user", "content": f"{n}: {workflow_task.task.main_query}"}
            reply = await model_tuner.chat([question])
        return WorkflowOutput(response=reply.message["content"] or "", is_success=True)


class Length(Judge):
    async def judge(self, workflow_task, output):
        return JudgeOutput(reward=len(output.response) / 100)


class Asked(Judge):
    """As long as what another model has to say about it."""

    async def judge(self, workflow_task, output):
        from openai import AsyncOpenAI

        async with AsyncOpenAI(base_url=os.environ["ASTUNER_AUXILIARY_0_URL"], api_key="EMPTY") as client:
            reply = await client.chat.completions.create(
                model=os.environ["ASTUNER_AUXILIARY_0_MODEL"],
                messages=[{"role": "user", "content": f"{workflow_task.attempt} {output.response}"}],
                max_tokens=8,
            )
        with Path(__file__).with_name("asked").open("a") as file:
            file.write(f"{reply.usage.completion_tokens}\\n")
        return JudgeOutput(reward=reply.usage.completion_tokens / 8)
'''
EXPERIMENT = """
astuner:
  model: {path: tiny-calculator}
  task_reader: {type: jsonl, jsonl: {training: {file_path: tasks.jsonl}}}
  data: {train_batch_size: 2, shuffle: false}
  rollout:
    workflow: agent.py->Hanging
    num_repeat: 4
    max_model_len: 128
    max_response_length_in_one_turn: 16
    compute_madness_checklist: []
  task_judge: {judge: agent.py->%s}
  trainer_common: {total_steps: 5, save_freq: 5, save_episodes: -1, optim: {lr: 1.0e-3}}
"""


def run_with(folder: Path, judge: str, *more: str) -> Run:
    (folder / "agent.py").write_text(WORKFLOW)
    (folder / "exp.yaml").write_text(EXPERIMENT % judge)
    questions = [f"What is {n} + 1?{' It hangs.' if n == HANGING else ''}" for n in range(16)]
    (folder / "tasks.jsonl").write_text("".join(f'{{"question": "{q}"}}\n' for q in questions))
    with running("trinity", folder / "exp.yaml", folder / "run", "--no-resume", *more) as run:
        assert run.ends() == 0, run.said()
    assert sorted(run.steps()) == [1, 2, 3, 4, 5]
    assert {row["merge/samples_per_rollout"] for row in run.steps().values()} == {1.75}
    return run


def steps_of(run: Run) -> dict[int, int]:
    """Draw -> the step that trained it."""
    trained = [(position(group), step) for step, groups in run.groups().items() for group in groups]
    assert len(dict(trained)) == len(trained), "none is trained twice"
    return dict(trained)


@pytest.mark.engines
def test_over_rollout_goes_on_without_the_slowest_while_a_second_model_judges(tmp_path: Path, tiny_model: Path) -> None:
    run = run_with(
        tmp_path,
        "Asked",
        "astuner.rollout.oversample=1.5",
        "astuner.trainer_common.n_gpus_per_node=3",
        "trinity.synchronizer.sync_style=explorer_driven",
        "trinity.explorer.rollout_model.engine_num=1",
        f"trinity.explorer.auxiliary_models=[{{model_path: {tiny_model}, engine_num: 1, tensor_parallel_size: 1}}]",
    )
    episodes = {step: row["rollout/episodes"] for step, row in run.steps().items()}
    assert set(episodes.values()) <= {8, 12}, "two groups of the three begun, or all that had ended by then"
    cut = [f["step"] for f in run.failures() if f.get("episode_id", "").startswith(f"g{HANGING:07d}")]
    assert episodes[min(cut)] == 8, "its step did not wait for it"
    step = steps_of(run)
    assert step.get(HANGING, 6) > min(cut)
    drawn, again = run.returned(5)
    assert sorted([*step, *again]) == list(range(drawn)), "every draw is trained on or comes again"
    asked = [int(line) / 8 for line in (tmp_path / "asked").read_text().split()]
    rows = run.steps().values()
    assert max(row["reward/max"] for row in rows) <= max(asked)
    assert min(row["reward/min"] for row in rows) >= min(asked) > 0, "the second model said something each time"


@pytest.mark.engines
def test_a_dynamic_timeout_ends_a_group_that_hangs_and_its_draw_comes_again(tmp_path: Path) -> None:
    run = run_with(
        tmp_path,
        "Length",
        "trinity.explorer.dynamic_timeout={enable: true, ratio: 2.0, warmup_min_steps: 2}",
    )
    episodes = {step: row["rollout/episodes"] for step, row in run.steps().items()}
    assert (episodes[1], episodes[2], episodes[3]) == (8, 8, 4), "the third step has a group less"
    assert set(episodes.values()) <= {4, 8}, "also when the new runner is slow to start, and that is taken for hanging"
    step = steps_of(run)
    assert step.get(HANGING, 6) > 3
    drawn, again = run.returned(5)
    assert sorted([*step, *again]) == list(range(drawn)), "every draw is trained on or comes again"
