"""Trinity's own explorer and trainer, on a CPU, driven as a person drives them: by `astuner run`, which may be killed.

The machine is small and every run starts a Ray cluster, so each one shows as much as it can.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ..fsdp import learning, rounding
from ..fsdp.runs import ROOT, Run, position, running

pytestmark = pytest.mark.timeout(2400)


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return learning.learn("trinity", tmp_path_factory)


def test_the_math_agent_learns(learnt: Run) -> None:
    learning.check_learns(learnt)


def test_a_run_that_was_killed_goes_on_where_it_had_saved(learnt: Run) -> None:
    learning.check_went_on_where_it_had_saved(learnt)


def test_the_books_are_those_of_every_backbone(learnt: Run) -> None:
    learning.check_books(learnt, "trinity", "time/update", "time/sync_weights")
    assert {row["staleness/max"] for row in learnt.steps().values()} == {0}, "rollouts and training take turns"


def test_anybody_loads_the_export(learnt: Run, tmp_path: Path) -> None:
    learning.check_anybody_loads_the_export("trinity", learnt, tmp_path / "model")


def test_eval_asks_the_trained_model(learnt: Run) -> None:
    learning.check_eval_asks_the_trained_model("trinity", learnt)


SEVERAL = '''
from astuner import Workflow, WorkflowOutput

class Several(Workflow):
    """Says something one to three times, as its attempt has it, each time afresh: as many samples in an episode."""

    async def execute(self, workflow_task, model_tuner):
        total = 0
        for n in range(1 + workflow_task.attempt % 3):
            question = {"role": "user", "content": f"{n}: {workflow_task.task.main_query}"}
            reply = await model_tuner.chat([question])
            total += len(reply.message["content"] or "")
        return WorkflowOutput(reward=total / 100, is_success=True)
'''
SEVERAL_FILE = """
astuner:
  model: {path: tiny-calculator}
  task_reader: {type: jsonl, jsonl: {training: {file_path: tasks.jsonl}, validation: {file_path: tasks.jsonl}}}
  data: {train_batch_size: 2, shuffle: false}
  rollout:
    workflow: several.py->Several
    num_repeat: 5
    max_model_len: 128
    max_response_length_in_one_turn: 16
    compute_madness_checklist: []
  trainer_common:
    total_steps: 6
    test_freq: 3
    save_freq: 3
    save_episodes: -1
    optim: {lr: 1.0e-2}
"""
STYLES = {  # the other two are those of test_stragglers
    "one_step_off": ("trinity.synchronizer.sync_offset=1",),
    "trainer_driven": ("trinity.synchronizer.sync_style=trainer_driven",),
    "fully_async": (
        "trinity.synchronizer.sync_style=fully_async",
        "trinity.algorithm.sample_strategy_args.max_staleness=2",
    ),
}


@pytest.mark.parametrize(
    "style", [style if style == "fully_async" else pytest.param(style, marks=pytest.mark.engines) for style in STYLES]
)
def test_styles_train_whatever_number_of_samples_an_episode_has(style: str, tmp_path: Path) -> None:
    (tmp_path / "several.py").write_text(SEVERAL)
    (tmp_path / "exp.yaml").write_text(SEVERAL_FILE)
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"question": "What is {n} + 1?"}}\n' for n in range(8)))
    with running("trinity", tmp_path / "exp.yaml", tmp_path / "run", "--no-resume", *STYLES[style]) as run:
        assert run.ends() == 0, run.said()
    steps = run.steps()
    assert sorted(steps) == [1, 2, 3, 4, 5, 6]
    assert all(row["rollout/episodes"] == 10 and row["merge/samples_per_rollout"] == 1.8 for row in steps.values())
    measured = sorted(run.validations())
    assert (measured[0], measured[-1], len(measured)) == (0, 6, 3), "as often as asked, with weights not older than due"
    assert run.failures() == []
    trained = sorted(position(group) for groups in run.groups().values() for group in groups)
    assert trained == list(range(12)), "each draw once, in whatever order their steps ended"
    stale = [row["staleness/max"] for row in steps.values()]
    if style == "one_step_off":
        assert stale == [0, 1, 1, 1, 1, 1]
    if style == "fully_async":
        assert max(stale) <= 2


def test_the_workers_act_in_an_environment_that_the_run_started_beside_several_engines(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    more = [
        "--with=frozen_lake",
        "astuner.trainer_common.n_gpus_per_node=3",
        "astuner.trainer_common.trinity_only__n_vllm_engine=2",
        "trinity.explorer.runner_per_model=1",
        "astuner.trainer_common.total_steps=2",
        "astuner.trainer_common.ppo_epochs=1",  # kl/mismatch is of the weights that rolled out
        "astuner.data.train_batch_size=2",
        "astuner.rollout.num_repeat=4",
        "astuner.data.max_validation_tasks=4",
    ]
    file = ROOT / "examples" / "frozen_lake" / "frozen_lake.yaml"
    with running("trinity", file, tmp_path / "run", "--no-resume", *more) as run:
        assert run.ends() == 0, run.said()
    steps = run.steps()
    assert sorted(steps) == [1, 2]
    assert steps[1]["num_turns/mean"] > 1
    assert max(row["kl/mismatch_max"] for row in steps.values()) < 1e-4, "both engines had the weights of every step"
    assert run.failures() == []
    said = (tmp_path / "run/trinity/trinity.log").read_text()
    assert said.count("is served at") == 2, "two engines"


@pytest.mark.engines
def test_what_bfloat16_makes_of_rollouts_is_small_and_corrected(tmp_path: Path) -> None:
    rounding.check_rounding_is_corrected("trinity", tmp_path)


@pytest.mark.engines
def test_adapters_train_reach_the_engine_and_are_killed_and_go_on(tmp_path: Path) -> None:
    (tmp_path / "several.py").write_text(SEVERAL)
    (tmp_path / "exp.yaml").write_text(SEVERAL_FILE)
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"question": "What is {n} + 1?"}}\n' for n in range(8)))
    more = [
        "astuner.model.lora={rank: 4, alpha: 8}",
        "astuner.trainer_common.test_freq=never",
        "astuner.trainer_common.save_freq=2",
        "astuner.trainer_common.use_kl_loss=true",
        "astuner.trainer_common.kl_loss_coef=0.01",
    ]
    with running("trinity", tmp_path / "exp.yaml", tmp_path / "run", "--no-resume", *more) as run:
        run.until(lambda: 3 in run.steps())
        run.killed()
    with running("trinity", tmp_path / "exp.yaml", tmp_path / "run", "--resume", *more) as run:
        assert run.ends() == 0, run.said()
    steps = run.steps()
    assert sorted(steps) == [1, 2, 3, 4, 5, 6]
    assert max(row["kl/mismatch_max"] for row in steps.values()) < 1e-4, "the engine had the adapters of every step"
    assert steps[1]["kl/ref"] == pytest.approx(0, abs=1e-6)
    assert steps[6]["kl/ref"] > 1e-4, "the reference is the starting model, also after a resume"
    from transformers import AutoModelForCausalLM

    _, said = AutoModelForCausalLM.from_pretrained(
        tmp_path / "run" / "checkpoints" / "step-000006", output_loading_info=True
    )
    assert not any(said[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), said
