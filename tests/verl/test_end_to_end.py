"""VERL's own trainer, on a CPU, driven as a person drives it: by `astuner run`, which may be interrupted and killed.

The machine is small and every run starts a Ray cluster, so each one shows as much as it can.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ..fsdp import learning, rounding
from ..fsdp.runs import MATH_AGENT, PLAIN, ROOT, Run, position, running

pytestmark = pytest.mark.timeout(2400)


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return learning.learn("verl", tmp_path_factory)


def test_the_math_agent_learns(learnt: Run) -> None:
    learning.check_learns(learnt)


def test_a_run_that_was_killed_goes_on_where_it_had_saved(learnt: Run) -> None:
    learning.check_went_on_where_it_had_saved(learnt)


def test_the_books_are_those_of_every_backbone(learnt: Run) -> None:
    learning.check_books(learnt, "verl", "time/update", "time/sync_weights")


def test_anybody_loads_the_export(learnt: Run, tmp_path: Path) -> None:
    learning.check_anybody_loads_the_export("verl", learnt, tmp_path / "model")


def test_eval_asks_the_trained_model(learnt: Run) -> None:
    learning.check_eval_asks_the_trained_model("verl", learnt)


TWO_AGENTS = '''
import asyncio
from pathlib import Path
from astuner import Workflow, WorkflowOutput

class Two(Workflow):
    """A writer, and in every other episode a critic, each with a reward of its own; asked to, they never end."""

    async def execute(self, workflow_task, model_tuner):
        question = {"role": "user", "content": workflow_task.task.main_query}
        if workflow_task.group_id.startswith("g0000004") and not Path("go").exists():
            Path("held").touch()
            await asyncio.sleep(600)
        text = await self.said(model_tuner, "writer", question)
        rewards = {"writer": 1.0 - len(text) / 100}
        if workflow_task.attempt % 2:
            rewards["critic"] = len(await self.said(model_tuner, "critic", question)) / 100
        return WorkflowOutput(reward=rewards, is_success=True)

    async def said(self, model_tuner, who, question):
        reply = await model_tuner.chat([question], agent_name=who, role=who)
        return reply.message["content"] or ""
'''
TWO_AGENTS_FILE = """
astuner:
  model: {path: tiny-calculator, lora: {rank: 4, alpha: 8}}
  agents: {writer: {}, critic: {}}
  task_reader: {type: jsonl, jsonl: {training: {file_path: tasks.jsonl}}}
  data: {train_batch_size: 2, shuffle: false}
  rollout:
    workflow: two.py->Two
    num_repeat: 4
    max_model_len: 128
    max_response_length_in_one_turn: 16
    compute_madness_checklist: []
  trainer_common:
    total_steps: 4
    save_freq: 100
    save_episodes: -1
    use_kl_loss: true
    kl_loss_coef: 0.01
    optim: {lr: 1.0e-2}
"""


@pytest.mark.engines
def test_two_agents_with_adapters_are_interrupted_in_a_rollout_and_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.py").write_text(TWO_AGENTS)
    (tmp_path / "two.yaml").write_text(TWO_AGENTS_FILE)
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"question": "What is {n} + 1?"}}\n' for n in range(8)))
    with running("verl", tmp_path / "two.yaml", tmp_path / "run", "--no-resume") as run:
        run.until(lambda: (tmp_path / "held").exists())
        assert run.interrupted() == 130, run.said()
    assert run.resumable_at() == 2, "the steps that were finished when the third one's episodes ran"
    assert run.saved() == ["step-000002"]
    (tmp_path / "go").touch()
    with running("verl", tmp_path / "two.yaml", tmp_path / "run", "--resume") as run:
        assert run.ends() == 0, run.said()
    print(run.planned_disk())
    steps = run.steps()
    assert sorted(steps) == [1, 2, 3, 4]
    assert [sorted(groups) for _, groups in sorted(run.groups().items())] == [
        [f"g{n:07d}", f"g{n + 1:07d}"] for n in (0, 2, 4, 6)
    ]
    assert all(row["rollout/episodes"] == 8 and row["merge/samples_per_rollout"] == 1.5 for row in steps.values())
    assert steps[1]["kl/ref"] == pytest.approx(0, abs=1e-6)
    assert steps[4]["kl/ref"] > 1e-4, "the reference is the starting model, also after a resume"
    agents = {a["agent"]: a["turns"] for a in run.certificate()["agents"]}
    assert agents == {"writer": 32, "critic": 16}
    assert _differs_from(tmp_path / "run" / "checkpoints" / "step-000004", "tiny-calculator")


def _differs_from(checkpoint: Path, start: str) -> bool:
    """Whether a checkpoint is a whole model with the layout of the one it started from, and other weights."""
    import torch
    from transformers import AutoModelForCausalLM

    from astuner_local.plugin import locate_model

    assert not (checkpoint / "adapter_config.json").exists()
    model, said = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not any(said[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), said
    trained = model.state_dict()
    before = AutoModelForCausalLM.from_pretrained(locate_model(start)).state_dict()
    assert list(trained) == list(before)
    return any(not torch.equal(trained[name].float(), before[name].float()) for name in before)


@pytest.mark.engines
def test_rollouts_run_ahead_of_the_trainer(tmp_path: Path) -> None:
    """That none of them is lost when such a run is killed, `test_separate_async` shows."""
    more = [
        *PLAIN,
        "verl.trainer.v1.trainer_mode=colocate_async",
        "astuner.trainer_common.total_steps=4",
        "astuner.trainer_common.save_episodes=-1",
        "astuner.trainer_common.val_before_train=false",
        "astuner.data.max_validation_tasks=8",
    ]
    with running("verl", MATH_AGENT, tmp_path / "run", "--no-resume", *more) as run:
        assert run.ends() == 0, run.said()
    print(run.planned_disk())
    assert sorted(run.steps()) == [1, 2, 3, 4]
    trained = [position(group) for groups in run.groups().values() for group in groups]
    drawn, under_way = run.returned(4)
    assert len(trained) == 4 * 8
    assert sorted(trained + under_way) == list(range(drawn)), "every draw is trained on or comes again"
    assert max(row["staleness/max"] for row in run.steps().values()) >= 1


def test_the_workers_act_in_an_environment_that_the_run_started(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    more = [
        "--with=frozen_lake",
        "astuner.trainer_common.total_steps=1",
        "astuner.data.train_batch_size=2",
        "astuner.rollout.num_repeat=4",
        "astuner.data.max_validation_tasks=4",
    ]
    with running(
        "verl", ROOT / "examples" / "frozen_lake" / "frozen_lake.yaml", tmp_path / "run", "--no-resume", *more
    ) as run:
        assert run.ends() == 0, run.said()
    assert run.steps()[1]["num_turns/mean"] > 1
    assert run.failures() == []


@pytest.mark.engines
def test_what_bfloat16_makes_of_rollouts_is_small_and_corrected(tmp_path: Path) -> None:
    rounding.check_rounding_is_corrected("verl", tmp_path)
