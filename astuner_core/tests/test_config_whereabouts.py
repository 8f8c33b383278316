"""A key that is written without what stands before it is answered with the whole key."""

import re

import pytest

from astuner import load_config
from astuner.config.checking import MEANT, TABLES, pattern_of, walk_fields
from astuner.config.sections import key_models, whole_keys
from astuner.contracts.errors import ConfigError
from astuner.plugins.loader import load_plugins
from tests.table import table


@pytest.fixture(scope="module")
def manager():
    return load_plugins(())


@table(
    ("key", "meant"),
    [
        ("data_generation.tasks", ["astuner.task_reader.data_generation.tasks"]),
        ("tracing.no_such_key", ["astuner.task_reader.tracing.no_such_key"]),
        ("helper_models.writer.rpm", ["astuner.helper_models.writer.rpm"]),
        ("trainer.logger", ["astuner.trainer_common.logger"]),
        ("num_repeat", ["astuner.rollout.num_repeat", "astuner.rollout.val_kwargs.num_repeat"]),
        ("model.path", ["astuner.model.path"]),
        ("nothing.like.it", []),
    ],
)
def test_the_whole_key_is_found(manager, key, meant):
    assert list(whole_keys(key, manager)) == meant


@table(
    ("override", "says"),
    [
        (
            "data_generation.tasks=3",
            "does not start with a section; write astuner.task_reader.data_generation.tasks=3",
        ),
        (
            "nothing.like=it",
            "'nothing.like=it' does not start with a section; keys start with `astuner.`, and this key is unknown; "
            "list all keys: astuner config explain astuner",
        ),
        ("batch_size=4", "'batch_size=4' does not start with a section; write astuner.data.train_batch_size=4"),
        ("actor.optim.lr=1", "'actor.optim.lr=1' does not start with a section; write astuner.trainer_common.optim.lr"),
        ("actor_rollout_ref.rollout.n=4", "write astuner.rollout.num_repeat=4"),
        ("trainer.learning_rate=1", "write astuner.trainer_common.optim.lr=1"),
        ("beta=0.1", "write astuner.trainer_common.kl_loss_coef=0.1 or astuner.trainer_common.use_kl_loss=0.1"),
        ("model=abc", "'model=abc' does not start with a section; write astuner.model.KEY=VALUE"),
        ("model={path: m}", "'model={path: m}' does not start with a section; write astuner.model={path: m}"),
        ("optim=1", "'optim=1' does not start with a section; write astuner.trainer_common.optim.KEY=VALUE"),
        ("jsonl=1", "'jsonl=1' does not start with a section; write astuner.task_reader.jsonl.KEY=VALUE"),
        (
            "astuner.data_generation.tasks=3",
            "unknown key astuner.data_generation; did you mean astuner.task_reader.data_generation?",
        ),
        ("astuner.rollout.kl_loss_coef=1", "did you mean astuner.trainer_common.kl_loss_coef?"),
        ("astuner.rollout.nothing_like_it=1", "unknown key astuner.rollout.nothing_like_it; known keys: "),
    ],
)
def test_an_override_that_is_wrong_is_answered_with_it(tmp_path, override, says):
    path = tmp_path / "e.yaml"
    path.write_text("astuner: {model: {path: m}}\n")
    with pytest.raises(ConfigError) as refused:
        load_config(path, [override])
    assert says in str(refused.value)


@table(
    ("override", "says"),
    [
        ("astuner.rollout.max_tokens=1", "did you mean astuner.rollout.max_response_length_in_one_turn?"),
        ("astuner.rollout.n_samples=8", "did you mean astuner.rollout.num_repeat?"),
        ("astuner.trainer_common.learning_rate=1", "did you mean astuner.trainer_common.optim.lr?"),
        ("astuner.trainer_common.num-train-epochs=1", "did you mean astuner.trainer_common.total_epochs?"),
        (
            "astuner.trainer_common.beta=1",
            "astuner.trainer_common.kl_loss_coef and astuner.trainer_common.use_kl_loss?",
        ),
        ("astuner.model.name=m", "did you mean astuner.model.path?"),
        ("astuner.model.lora.r=8", "did you mean astuner.model.lora.rank?"),
        ("astuner.dataset=d", "did you mean astuner.task_reader?"),
        ("astuner.reward_funcs=f", "did you mean astuner.task_judge.judge?"),
        ("astuner.task_reader.name=f", "did you mean astuner.task_reader.type?"),
        ("astuner.task_reader.jsonl.path=f", "did you mean astuner.task_reader.jsonl.training.file_path?"),
        ("astuner.task_judge.llm_judge.max_tokens=1", "llm_judge.max_tokens; known keys: answer_field, criteria"),
        ("astuner.system_prompt=f", "set it in the agent that the workflow creates"),
        ("astuner.output_dir=f", "did you mean astuner.experiment_dir?"),
        ("astuner.model.device=gpu", "should be auto or cpu or cuda or cuda:0, got 'gpu'; did you mean cuda?"),
        ("astuner.model.device=1", "should be auto or cpu or cuda or cuda:0, got 1; did you mean cuda:1?"),
        ("astuner.model.device=tpu", "should be auto or cpu or cuda or cuda:0, got 'tpu'"),
        ("astuner.model.dtype=fp16", "got 'fp16'; did you mean float16?"),
        ("astuner.trainer_common.optim.optimizer=adam", "did you mean adamw?"),
        ("astuner.data.on_bad_line=ignore", "did you mean skip?"),
        ("astuner.task_judge.math_answer_llm.base_url=localhost:1", "should be https://api.openai.com/v1, got"),
    ],
)
def test_names_and_values_of_other_tools_are_recognized(tmp_path, override, says):
    path = tmp_path / "e.yaml"
    path.write_text("astuner: {model: {path: m}, task_judge: {judge: math_answer_llm}}\n")
    with pytest.raises(ConfigError) as refused:
        load_config(path, [override])
    assert says in str(refused.value)
    assert "^" not in str(refused.value)


def test_all_suggested_keys_exist(manager):
    known = {".".join(key) for at, model in key_models(manager) for key, _ in [(at, None), *walk_fields(model, at)]}
    assert len(MEANT) == sum(map(len, TABLES["meant"].values()))  # no name has two meanings
    for name, target in MEANT.items():
        keys = [] if " " in target.replace(" and ", "") else [f"astuner.{key}" for key in target.split(" and ")]
        assert set(keys) <= known, target
        assert name == name.lower()


def test_every_field_with_a_pattern_has_examples(manager):
    fields = [(key, info) for at, model in key_models(manager) for key, info in walk_fields(model, at)]
    patterns = {".".join(key): info for key, info in fields if pattern_of(info)}
    assert {"astuner.model.device"} <= patterns.keys()
    for name, info in patterns.items():
        assert info.examples, name
        assert all(re.search(pattern_of(info), example) for example in info.examples), name
