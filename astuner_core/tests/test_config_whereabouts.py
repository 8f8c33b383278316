"""A key that is written without what stands before it is answered with the whole key."""

import pytest

from astuner import load_config
from astuner.config.sections import whole_keys
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
        ("batch_size=4", "'batch_size=4' does not start with a section; keys start with `astuner.`, and this key"),
        ("actor.optim.lr=1", "'actor.optim.lr=1' does not start with a section; keys start with `astuner.`"),
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
