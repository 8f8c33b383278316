"""Older spellings are honoured with one note, or refused by name; and keys that follow from others."""

from __future__ import annotations

from pathlib import Path

import pytest

from astuner import Config, ConfigError, load_config
from astuner.config.checking import field_at
from astuner.config.schema import AlgorithmSection, AstunerSection
from astuner.contracts.hookspecs import LossProvider
from astuner.contracts.places import Tree
from astuner.plugins.loader import load_plugins
from astuner_compat.spellings import RENAMED, RETIRED
from tests.table import table

LOSSES = {name: loss for _, name, loss in load_plugins().offers("loss") if isinstance(loss, LossProvider)}
VALUES = {
    "workflow": "a->B",
    "disable_tool_calls": True,
    "num_repeat": 3,
    "judge": "a->B",
    "total_steps": 9,
    "engine_num": 2,
    "merge_level": "text",
    "url": "http://127.0.0.1:8080",
}


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def load_keys(keys: dict[str, object], *overrides: str, text: str = "") -> Config:
        import yaml

        tree = Tree()
        model = {} if any(key.startswith("ajet.") for key in keys) else {"astuner.model.path": "m"}
        for key, value in {**model, **keys}.items():
            tree.put(tuple(key.split(".")), value)
        Path("e.yaml").write_text(yaml.safe_dump(tree.data) + text, encoding="utf-8")
        return load_config("e.yaml", overrides)

    return load_keys


def problems(load, keys: dict[str, object], *overrides: str, text: str = "") -> list[str]:
    with pytest.raises(ConfigError) as e:
        load(keys, *overrides, text=text)
    return list(e.value.problems)


@table(("old", "new"), RENAMED.items())
def test_a_renamed_key_works_with_one_note_and_not_beside_the_new_one(load, old: str, new: str):
    value = VALUES[new.rpartition(".")[2]]
    config = load({old: value})
    assert [note for note in config.notes if f"{old} is now {new}" in note]
    if new.startswith("astuner."):
        assert dict((key, found) for key, found, _ in config.items())[new] == value
        assert str(config.origins[new]).startswith("e.yaml:")
    assert "is the older name of" in problems(load, {old: value, new: value})[0]
    assert load({}, f"{old}={value}").notes  # on the command line too


def test_the_older_section_of_the_environment_service(load):
    older = {
        "type": "env_service",
        "env_service": {
            "env_type": "appworld",
            "env_url": "http://127.0.0.1:8080",
            "env_action_preference": "code",
            "training_split": "train",
            "validation_split": "dev",
        },
    }
    judge = "ajet.task_judge.env_service_as_judge->EnvServiceJudge"
    config = load({"ajet.task_reader": older, "ajet.task_judge.judge_protocol": judge, "ajet.model.path": "m"})
    assert config.astuner.env_service.url == "http://127.0.0.1:8080"
    assert config.astuner.task_judge.judge == "env_service"
    section = config.section("task reader", "TaskReaderEnvService")
    assert (section.env_type, section.training_split, section.validation_split) == ("appworld", "train", "dev")


def test_an_override_wins_over_the_older_spelling_in_the_file(load):
    assert load({"astuner.rollout.n": 3}, "astuner.rollout.num_repeat=5").astuner.rollout.num_repeat == 5


@table(("key", "retired"), RETIRED.items())
def test_a_retired_key_is_harmless_or_refused_by_name(load, key: str, retired):
    for value in retired.harmless:
        assert any(f"{key} is not needed" in note for note in load({key: value}).notes)
    assert retired.reason in problems(load, {key: "something else"})[0]


def test_every_new_name_exists_and_no_old_one_does():
    for old, new in RENAMED.items():
        if new.startswith("astuner."):
            assert field_at(AstunerSection, tuple(new.split(".")[1:])) is not None, new
        assert field_at(AstunerSection, tuple(old.split(".")[1:])) is None, old
    for old in RETIRED:
        assert field_at(AstunerSection, tuple(old.split(".")[1:])) is None, old


def test_without_this_package_an_older_key_is_unknown_and_the_package_is_named(tmp_path: Path):
    for number, keys in enumerate(("rollout: {agentscope_workflow: a->B}", "context_tracker: {x: 1}")):
        file = tmp_path / f"{number}.yaml"
        file.write_text(f"astuner:\n  model: {{path: m}}\n  {keys}\n")
        with pytest.raises(ConfigError, match=r"unknown key .*for legacy keys: pip install astuner-compat$"):
            load_config(file, disabled_plugins=["compat"])
    file.write_text("astune: {model: {path: m}}\n")
    assert load_config(file).notes
    with pytest.raises(ConfigError, match=r"below astuner:; .*: pip install astuner-compat$"):
        load_config(file, disabled_plugins=["compat"])


def test_the_older_root_section(load):
    config = load_text(load, "astune:\n  model: {path: m}\n  rollout: {agentscope_learn_protocol: a->B}\n")
    assert config.astuner.rollout.workflow == "a->B"
    assert any("astune: is now astuner:" in note for note in config.notes)
    assert load({}, "astune.seed=3").astuner.seed == 3
    assert "both are set" in problems(load, {}, text="astune: {seed: 1}\n")[0]


def load_text(load, text: str) -> Config:
    Path("t.yaml").write_text(text, encoding="utf-8")
    return load_config("t.yaml")


def test_defaults_name_layers_and_hydra_is_not_read(load):
    text = "hydra: {anything: [goes]}\ndefaults: [verl_default, trinity_default, local_default, _self_]\n"
    notes = load({}, text=text).notes
    assert sum("hydra:" in note for note in notes) == sum("defaults:" in note for note in notes) == 1
    assert problems(load, {}, text="defaults: [trinty_default]\n") == [
        "e.yaml:4:12: no layer is called 'trinty_default'; did you mean trinity_default?"
    ]
    assert "must be a list of layers" in problems(load, {}, text="defaults: base\n")[0]


@table("loss", LOSSES)
def test_a_loss_implies_what_nobody_wrote(load, loss: str):
    config = load({"astuner.trainer_common.algorithm.loss": loss})
    for name, value in LOSSES[loss].implies.items():
        assert getattr(config.astuner.trainer_common.algorithm, name) == value
        origin = config.origins[f"astuner.trainer_common.algorithm.{name}"]
        assert str(origin) == f"implied by algorithm.loss: {loss}"
        assert f"astuner.trainer_common.algorithm.{name}" not in config.written


def test_what_is_written_wins_over_what_is_implied(load):
    written = {"astuner.trainer_common.algorithm.loss": "dapo", "astuner.trainer_common.algorithm.clip_ratio_high": 0.5}
    config = load(written, "astuner.trainer_common.algorithm.dynamic_sampling=false")
    algorithm = config.astuner.trainer_common.algorithm
    assert algorithm.clip_ratio_high == 0.5
    assert algorithm.dynamic_sampling is False
    assert algorithm.loss_agg_mode == "token-mean"


def test_what_losses_imply_can_be_written():
    for loss in LOSSES.values():
        AlgorithmSection.model_validate(loss.implies)


@table(
    ("written", "other"),
    [
        ("astuner.trainer_common.val_pass_n", "astuner.rollout.val_kwargs.num_repeat"),
        ("astuner.rollout.val_kwargs.num_repeat", "astuner.trainer_common.val_pass_n"),
    ],
)
def test_two_keys_of_one_meaning_follow_each_other(load, written: str, other: str):
    config = load({written: 4})
    assert config.astuner.rollout.val_kwargs.num_repeat == config.astuner.trainer_common.val_pass_n == 4
    assert str(config.origins[other]) == f"same as {written.removeprefix('astuner.')}"
    assert load({written: 4, other: 4}).astuner.trainer_common.val_pass_n == 4
    assert "make them equal" in problems(load, {written: 4, other: 5})[0]


def test_agentjets_merging_policy_is_todays_merge_level(load) -> None:
    at = "astuner.context_tracker.timeline_merging_policy"
    exact = load({f"{at}.timeline_compare_level": "token", f"{at}.ignore_tools": True})
    assert exact.astuner.rollout.merge_level == "exact"
    assert any("merge_level: token is now exact" in note for note in exact.notes)
    text = load({f"{at}.timeline_compare_level": "text", "astuner.enable_experimental_interchange_server": True})
    assert text.astuner.rollout.merge_level == "text"
    (problem,) = problems(load, {"astuner.context_tracker.detect_timeline_snap": True})
    assert "astuner.context_tracker is not a key any more" in problem
