"""Keys that packages add below `astuner`: as good as the core's own, and named where the package is missing."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pydantic import Field

from astuner import ConfigError, Provider, hookimpl, load_config
from astuner.config.capabilities import check_capabilities
from astuner.config.schema import AstunerSection, with_packages
from astuner.contracts.backbone import Capabilities
from astuner.contracts.section import Section
from astuner.plugins.loader import PluginManager, load_plugins
from astuner.testing import fake_config
from astuner_report.sentinel.settings import SentinelKeys
from astuner_trackers.telemetry.settings import TelemetryKeys


class Bell(Section):
    loud: int = Field(3, ge=1)
    """How loud it rings."""


class BellKeys(Section):
    bell: Bell = Bell()
    """What rings at the end."""


class ToneKeys(Section):
    tone: str = "a"
    """Its tone."""


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> PluginManager:
    made: Any = ModuleType("bells")
    made.BellKeys, made.ToneKeys = BellKeys, ToneKeys
    monkeypatch.setitem(sys.modules, "bells", made)
    made.register_config_keys = hookimpl(
        lambda: {
            "bell": Provider(target="bells:BellKeys", summary="what rings"),
            "trainer_common.algorithm.tone": Provider(target="bells:ToneKeys", summary="its tone"),
        }
    )
    distribution = SimpleNamespace(name="acme-bells", version="1.0", requires=[])
    entry: Any = SimpleNamespace(name="bells", value="bells", dist=distribution, load=lambda: made)
    manager = PluginManager().load()
    manager.load([entry])
    return manager


def load(folder: Path, text: str, manager: PluginManager) -> Any:
    (folder / "e.yaml").write_text(f"astuner:\n  model: {{path: m}}\n{text}")
    return load_config(folder / "e.yaml", plugins=manager)


def test_a_package_adds_keys(tmp_path: Path, manager: PluginManager) -> None:
    text = "  bell: {loud: '${astuner.trainer_common.save_freq}'}\n  trainer_common: {algorithm: {tone: b}}\n"
    config = load(tmp_path, text, manager)
    assert config.keys_of(BellKeys).bell.loud == config.astuner.bell.loud == 50
    assert config.astuner.trainer_common.algorithm.tone == "b"
    assert config.as_dict()["astuner"]["bell"] == {"loud": 50}
    assert check_capabilities(config, Capabilities(trains=False)) == ()
    assert isinstance(config.astuner, AstunerSection)
    with pytest.raises(ConfigError, match=r"e.yaml:3:10: unknown key astuner.bell.laud; did you mean loud?"):
        load(tmp_path, "  bell: {laud: 1}\n", manager)
    with pytest.raises(ConfigError, match=r"e.yaml:3:10: astuner.bell.loud should be at least 1, got 0"):
        load(tmp_path, "  bell: {loud: 0}\n", manager)


def test_they_are_explained(manager: PluginManager) -> None:
    from astuner_debug.explain_command import find_key, json_schema

    info = find_key("bell.loud", manager)
    assert (info.key, info.doc, info.default) == ("astuner.bell.loud", "How loud it rings.", 3)
    assert "local" in info.honoured_by
    assert find_key("astuner.trainer_common.algorithm.tone", manager).doc == "Its tone."
    assert "loud" in json.dumps(json_schema(manager), default=str)
    assert "bell" not in AstunerSection.model_fields
    assert list(with_packages(manager).model_fields)[: len(AstunerSection.model_fields)] == list(
        AstunerSection.model_fields
    )


def test_a_config_with_them_goes_to_another_process(tmp_path: Path) -> None:
    text = "  telemetry: {sample: 0.5}\n  trainer_common: {sentinel: {stop_on: [cut_off]}, save_freq: 9}\n"
    config = fake_config(tmp_path, text)
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert again.astuner.trainer_common.save_freq == 9
    assert again.keys_of(TelemetryKeys).telemetry.sample == 0.5
    assert again.keys_of(SentinelKeys).sentinel.stop_on == ["cut_off"]
    assert again.dump_yaml() == config.dump_yaml()


def test_of_a_package_that_is_off_they_are_unknown_and_it_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key astuner.telemetry: the plugin trackers .* is disabled"):
        fake_config(tmp_path, "  telemetry: {sample: 0.5}\n", disabled_plugins=["trackers"])
    without = fake_config(tmp_path, disabled_plugins=["trackers", "report"])
    assert without.keys_of(TelemetryKeys).telemetry.sample == 1.0
    assert without.keys_of(SentinelKeys).sentinel.enabled
    nothing = PluginManager().load([])
    with pytest.raises(ConfigError) as e:
        load(tmp_path, "  trainer_common: {sentinel: {enabled: false}}\n", nothing)
    assert "unknown key astuner.trainer_common.sentinel; install it: pip install" in str(e)


def test_a_written_out_config_is_read_without_the_package_as_long_as_nobody_wrote_its_keys(tmp_path: Path) -> None:
    (tmp_path / "resolved.yaml").write_text(fake_config(tmp_path).dump_yaml())
    assert "telemetry" in (tmp_path / "resolved.yaml").read_text()
    without = load_config(tmp_path / "resolved.yaml", disabled_plugins=["trackers"])
    assert "telemetry" not in without.as_dict()["astuner"]
    assert with_packages(load_plugins()) is with_packages(load_plugins())
