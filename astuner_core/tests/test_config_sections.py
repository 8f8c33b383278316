"""The sections of plugins: found under any spelling, checked by their own model, never ignored in silence."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from astuner import ConfigError, Provider, hookimpl, load_config
from astuner.config import Config
from astuner.contracts.secrets import REMOVED
from astuner.plugins.loader import PluginManager


class ReaderConfig(BaseModel):
    """Pydantic's default would ignore unknown keys."""

    path: str
    limit: int | None = Field(None, ge=1)


class JudgeConfig(BaseModel):
    model_config = ConfigDict(populate_by_name=True)

    model: str = Field("small", validation_alias=AliasChoices("model", "alien_llm_model"))
    api_key: str = ""
    tries: int = 3


class EngineConfig(BaseModel):
    model_config = ConfigDict(extra="allow")

    workers: int = 1


class SinkConfig(BaseModel):
    colour: str = "green"


def plugin(name: str, **hooks: dict[str, Provider]) -> Any:
    made = ModuleType(name)
    for hook, offered in hooks.items():
        setattr(made, hook, hookimpl(lambda offered=offered: offered))
    return SimpleNamespace(
        name=name, value=name, dist=SimpleNamespace(name=f"astuner-{name}", version="1", requires=[]), load=lambda: made
    )


def provider(config: str | None = None, *aliases: str) -> Provider:
    return Provider(target="json:loads", config=f"acme_models:{config}" if config else None, aliases=aliases)


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    models = ModuleType("acme_models")
    for model in (ReaderConfig, JudgeConfig, EngineConfig, SinkConfig):
        setattr(models, model.__name__, model)
    monkeypatch.setitem(sys.modules, "acme_models", models)
    monkeypatch.chdir(tmp_path)
    manager = PluginManager().load(
        [
            plugin(
                "acme",
                register_task_readers={"files": provider("ReaderConfig", "old_files"), "plain": provider()},
                register_judges={"llm": provider("JudgeConfig", "acme.judges->Llm"), "twice": provider("JudgeConfig")},
                register_workflows={"agent": provider()},
                register_backbones={"engine": provider("EngineConfig", "old_engine"), "bare": provider()},
                register_log_sinks={"console": provider(), "jsonl": provider(), "tinted": provider("SinkConfig")},
            ),
            plugin("compat", register_parts={"older_spellings": Provider(target="astuner_compat.spellings:Spellings")}),
            plugin("other", register_judges={"twice": provider("JudgeConfig"), "gone": provider("NoSuchModel")}),
        ]
    )

    def load_text(text: str, *overrides: str, backbone: str = "engine") -> Config:
        Path("e.yaml").write_text(f"astuner:\n  model: {{path: m}}\n{text}", encoding="utf-8")
        return load_config("e.yaml", overrides, backbone=backbone, plugins=manager)

    return load_text


def problems(load: Any, text: str, *overrides: str, **options: str) -> list[str]:
    with pytest.raises(ConfigError) as e:
        load(text, *overrides, **options)
    return list(e.value.problems)


@pytest.mark.parametrize("chosen", ["files", "old_files", "acme/files"])
@pytest.mark.parametrize("section", ["files", "old_files", "acme/files"])
def test_a_section_is_found_under_every_spelling(load, chosen: str, section: str):
    config = load(f"  task_reader: {{type: {chosen}, {section}: {{path: x}}}}\n")
    assert config.astuner.task_reader.type == "files"
    for spelling in ("files", "old_files", "acme/files"):
        assert config.section("task reader", spelling) == ReaderConfig(path="x")
    assert str(config.origins["astuner.task_reader.files.path"]).startswith("e.yaml:3:")
    assert ("'old_files' is now 'files'" in "".join(config.notes)) == (chosen == "old_files")


def test_two_spellings_of_one_section_are_an_error(load):
    text = "  task_reader:\n    type: files\n    files: {path: x}\n    old_files: {path: y}\n"
    assert problems(load, text) == [
        "e.yaml:6:5: astuner.task_reader.old_files and astuner.task_reader.files are the same section; keep one"
    ]
    text = "  task_reader:\n    type: files\n    old_files: {path: y}\n    files: {path: x}\n"
    assert "are the same section; keep one" in problems(load, text)[0]


def test_a_plugins_section_is_checked_like_the_cores_own(load):
    text = "  task_reader:\n    type: files\n    files: {pth: x, limit: true}\n"
    assert problems(load, text) == [
        "e.yaml:5:5: astuner.task_reader.files.path is required",
        "e.yaml:5:13: unknown key astuner.task_reader.files.pth; did you mean path?",
        "e.yaml:5:21: astuner.task_reader.files.limit should be integer or null ≥ 1, got True",
    ]
    assert problems(load, "  task_reader: {type: files}\n") == [
        "e.yaml:3:3: astuner.task_reader.files.path is required"
    ]
    assert problems(load, "  task_reader: {type: plain, plain: {a: 1}}\n") == [
        "e.yaml:3:30: astuner.task_reader.plain: the task reader 'plain' takes no options; remove its keys"
    ]
    assert problems(load, "  task_reader: {type: files, files: 3}\n") == [
        "e.yaml:3:30: astuner.task_reader.files should be a section (keys below it), got 3"
    ]


def test_a_section_that_is_not_chosen_is_checked_too(load):
    assert load("  task_judge: {judge: acme/twice, llm: {tries: 2}}\n").section("judge", "llm").tries == 2
    assert "llm.tries should be an integer" in problems(load, "  task_judge: {llm: {tries: x}}\n")[0]


def test_a_section_of_nobody_is_an_error_and_of_a_missing_plugin_a_note(load):
    assert problems(load, "  task_judge: {lm: {tries: 2}}\n") == [
        "e.yaml:3:16: unknown key astuner.task_judge.lm; did you mean llm?"
    ]
    config = load("  task_judge: {judge: llm, math_answer: {x: 1}}\n")
    assert any("math_answer" in note and "astuner-math is not installed" in note for note in config.notes)


def test_a_name_of_two_plugins_must_be_qualified(load):
    text = "  task_judge:\n    judge: twice\n"
    assert problems(load, text) == [
        "e.yaml:4:5: astuner.task_judge.judge: 2 plugins register the judge 'twice'; write acme/twice or other/twice"
    ]
    config = load("  task_judge:\n    judge: other/twice\n    twice: {tries: 9}\n")
    assert config.astuner.task_judge.judge == "other/twice"
    assert config.section("judge", "other/twice").tries == 9


def test_a_model_that_cannot_be_imported_is_named(load):
    assert "acme_models has no 'NoSuchModel'" in problems(load, "  task_judge: {judge: gone}\n")[0]


def test_a_class_of_the_users_own_is_left_alone_and_not_imported(load, tmp_path: Path):
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme" / "judges.py").write_text("raise RuntimeError('imported')\n")
    config = load("  task_judge: {judge: acme.judges->Llm}\n  rollout: {workflow: flow.py->Flow}\n")
    assert config.astuner.task_judge.judge == "acme.judges->Llm"  # the file beside wins over the plugin's alias
    assert config.section("judge", "acme.judges->Llm") is None
    (tmp_path / "acme" / "judges.py").unlink()
    assert load("  task_judge: {judge: acme.judges->Llm}\n").astuner.task_judge.judge == "llm"


def test_only_the_chosen_backbones_root_section_is_read(load):
    text = "engine: {workers: 2, deep: {er: 1}}\nbare: {x: 1}\ntrinity: {y: z}\n"
    config = load(text)
    assert config.backbone_section("engine").workers == 2
    assert config.as_dict()["engine"] == {"workers": 2, "deep": {"er": 1}}
    assert config.backbone_section("bare") is None
    assert any(note.startswith("bare:, trinity: ignored") for note in config.notes)
    (problem,) = problems(load, text, backbone="bare")
    assert problem.startswith("e.yaml:4:1: bare: the backbone 'bare' takes no options")
    renamed = load("old_engine: {workers: 4, name: '${astuner.model.path}'}\n").backbone_section("engine")
    assert (renamed.workers, renamed.name) == (4, "m")
    both = problems(load, "engine: {workers: 1}\nold_engine: {workers: 4}\n")
    assert both == ["e.yaml:4:1: old_engine and engine are the same section; keep one"]
    assert load("", "engine.workers=5").backbone_section("engine").workers == 5
    assert "engine.workers should be an integer" in problems(load, "", "engine.workers=x")[0]


def test_the_helper_models_older_keys_go_to_the_judge_that_asks_one(load):
    config = load("  task_judge: {judge: llm, alien_llm_model: big}\n")
    assert config.section("judge", "llm").model == "big"
    assert any("alien_llm_model is now astuner.task_judge.llm.model" in note for note in config.notes)
    assert problems(load, "  task_judge: {judge: llm, alien_llm_response_length: 5}\n") == [
        "e.yaml:3:28: astuner.task_judge.alien_llm_response_length: "
        "the judge 'llm' uses no helper model. Remove the key"
    ]
    assert "this judge uses no helper model" in problems(load, "  task_judge: {alien_llm_model: big}\n")[0]
    both = problems(load, "  task_judge: {judge: llm, alien_llm_model: big, llm: {model: small}}\n")
    assert both == [
        "e.yaml:3:28: astuner.task_judge.alien_llm_model and astuner.task_judge.llm.model "
        "are the same key. Keep one of them"
    ]


def test_log_sinks_are_checked_and_get_their_defaults(load):
    config = load("  trainer_common: {logger: [console, tinted]}\n")
    assert config.section("log sink", "tinted") == SinkConfig()
    assert problems(load, "  trainer_common: {logger: tintd}\n") == [
        "e.yaml:3:20: astuner.trainer_common.logger: unknown log sink 'tintd'; did you mean tinted?"
    ]


def test_secrets_are_in_no_output_and_can_be_read_back(load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HELPER_KEY", "sk-from-environment")
    clear = load("  task_judge: {judge: llm, llm: {api_key: sk-in-clear}}\n")
    assert clear.section("judge", "llm").api_key == "sk-in-clear"
    assert clear.as_dict()["astuner"]["task_judge"]["llm"]["api_key"] == REMOVED
    assert "sk-in-clear" not in clear.dump_yaml() + str(list(clear.items()))

    kept = load("  task_judge: {judge: llm, acme/llm: {api_key: '${oc.env:HELPER_KEY}'}}\n")
    assert kept.section("judge", "llm").api_key == "sk-from-environment"
    assert "sk-from" not in kept.dump_yaml()
    dumped = yaml.safe_load(kept.dump_yaml())
    assert dumped["astuner"]["task_judge"]["llm"]["api_key"] == "${oc.env:HELPER_KEY}"

    again = load(textwrap.indent(yaml.safe_dump({"task_judge": dumped["astuner"]["task_judge"]}), "  "))
    assert again.section("judge", "llm").api_key == "sk-from-environment"
    lost = f"  task_judge: {{judge: llm, llm: {{api_key: '{REMOVED}'}}}}\n"
    assert (
        "was removed from this file because it is a secret; pass astuner.task_judge.llm.api_key=VALUE"
        in problems(load, lost)[0]
    )
    assert load(lost, "astuner.task_judge.llm.api_key=sk").section("judge", "llm").api_key == "sk"
    assert not [p for p in problems(load, "  task_judge: {judge: llm, llm: {api_key: {a: sk-9}}}\n") if "sk-9" in p]
