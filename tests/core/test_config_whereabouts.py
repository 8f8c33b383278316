"""A key that is written without what stands before it is answered with the whole key."""

import pytest

from astuner import load_config
from astuner.config.whereabouts import whole_keys
from astuner.errors import ConfigError
from astuner.plugins import load_plugins


@pytest.fixture(scope="module")
def manager():
    return load_plugins(())


@pytest.mark.parametrize(
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
    assert whole_keys(key, manager) == meant


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "data_generation.tasks=3",
            "does not start with a section; write astuner.task_reader.data_generation.tasks=3",
        ),
        ("nothing.like=it", "'nothing.like=it' does not start with a section; write astuner.nothing.like=it"),
        (
            "astuner.data_generation.tasks=3",
            "unknown key astuner.data_generation; did you mean astuner.task_reader.data_generation?",
        ),
        ("astuner.rollout.kl_loss_coef=1", "did you mean astuner.trainer_common.kl_loss_coef?"),
        ("astuner.rollout.nothing_like_it=1", "unknown key astuner.rollout.nothing_like_it; known here: "),
    ],
)
def test_an_override_that_is_wrong_is_answered_with_it(tmp_path, override, says):
    path = tmp_path / "e.yaml"
    path.write_text("astuner: {model: {path: m}}\n")
    with pytest.raises(ConfigError) as refused:
        load_config(path, [override])
    assert says in str(refused.value)
