"""Every YAML block of the first documents loads unchanged and means what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from astuner import load_config
from astuner.config.capabilities import check_capabilities
from tests.table import table

SEEDS = Path(__file__).parent / "data" / "seeds"
BLOCKS = sorted(SEEDS.glob("*_[0-9].yaml"))
MODEL = "astuner.model.path=Qwen/Qwen2.5-14B-Instruct"


def test_all_blocks_are_here():
    assert len(BLOCKS) == 7


@table("path", BLOCKS, ids=lambda path: path.stem)
def test_a_block_loads_once_a_model_is_named(path: Path):
    config = load_config(path, [] if "model:" in path.read_text(encoding="utf-8") else [MODEL])
    assert config.experiment_name == path.stem


def test_the_quick_start_means_what_it_says():
    config = load_config(SEEDS / "quick_start.yaml", backbone="local")
    a = config.astuner
    assert config.run_dir == Path("launcher_record/quick_start")
    assert a.project_name == "math_agent"
    assert a.rollout.workflow == "math_agent.math_agent->MathAgentWorkflow"
    assert a.task_judge.judge == "math_answer"
    assert config.section("judge", "math_answer") is not None
    reader = config.section("task reader", a.task_reader.type)
    assert (reader.dataset_path, reader.training_split, reader.validation_split) == ("gsm8k/main", "train", "test")
    assert reader is config.section("task reader", "huggingface_dat_repo")
    assert (a.data.train_batch_size, a.data.max_prompt_length, a.data.max_response_length) == (264, 3000, 10000)
    r = a.rollout
    assert (r.temperature, r.max_env_worker, r.num_repeat, r.max_num_seqs, r.max_model_len) == (0.7, 64, 4, 40, 13000)
    assert (r.tensor_model_parallel_size, r.multi_turn.max_sample_per_task) == (1, 4)
    assert r.compute_madness_checklist == ["nonsense", "wrong_toolcall"]
    assert (r.agent_madness_reward, r.max_response_length_in_one_turn) == (0.0, 1024)
    t = a.trainer_common
    assert (t.save_freq, t.test_freq, t.total_epochs) == (99999, 99999, 99999)
    assert sum("hydra:" in note for note in config.notes) == 1
    assert any("trinity_only__n_vllm_engine is now trinity.explorer" in note for note in config.notes)
    assert any(note.startswith("trinity: ignored") for note in config.notes)


@pytest.mark.parametrize("name", ["quick_start", "appworld_1"])
@pytest.mark.parametrize("backbone", ["debug", "local"])
def test_every_key_of_the_seeds_is_honoured_or_refused_by_name(name: str, backbone: str):
    config = load_config(SEEDS / f"{name}.yaml", backbone=backbone)
    capabilities = config.resolve("backbone", backbone).capabilities
    notes = check_capabilities(config, capabilities)
    assert any("does not train" in note for note in notes) == (backbone == "debug" and name == "quick_start")


def test_the_appworld_block_means_what_it_says():
    config = load_config(SEEDS / "appworld_1.yaml")
    a = config.astuner
    assert a.rollout.workflow == "appworld"
    assert any("ExampleAgentScopeLearnProtocol' is now 'appworld'" in note for note in config.notes)
    assert a.rollout.disable_tool_calls is True
    assert (a.debug.debug_max_parallel, a.debug.debug_first_n_tasks) == (1, 1)
    assert config.experiment_name == "appworld_1"
    assert a.task_judge.judge == "env_service"
