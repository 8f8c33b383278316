"""What `astuner doctor` reports about AgentScope, for versions other than those of this environment."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import metadata

import pytest

from astuner.cli import main
from astuner.contracts.diagnosis import Finding
from astuner_agentscope.diagnosis import findings
from tests.table import table

Install = Callable[[Mapping[str, str | None]], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Pretend that distributions have these versions; None: not installed."""
    real = metadata.version

    def pretend(versions: Mapping[str, str | None]) -> None:
        def version(name: str) -> str:
            if (found := versions.get(name, "real")) == "real":
                return real(name)
            if found is None:
                raise metadata.PackageNotFoundError(name)
            return found

        monkeypatch.setattr(metadata, "version", version)

    return pretend


def found() -> list[tuple[str, str, str]]:
    return [(f.level, f.detail, f.fix) for f in findings() if isinstance(f, Finding)]


WORKS_WITH_1 = {"mcp": "1.30.0", "openai": "2.54.0", "sqlalchemy": "2.0.58", "tqdm": "4.70.1"}


@table("version", ["1.0.7", "1.0.21", "2.0.6", "2.0.10"])
def test_supported_versions_are_ok(version: str, install: Install) -> None:
    if version.startswith("2.") and sys.version_info < (3, 11):
        pytest.skip("AgentScope 2.x needs Python 3.11")
    install({"agentscope": version, **WORKS_WITH_1})
    assert found() == [("ok", version, "")]


def test_without_agentscope_it_names_the_package_that_brings_it(install: Install) -> None:
    install({"agentscope": None})
    detail = "not installed; AgentScope workflows cannot run"
    assert found() == [("warn", detail, "pip install astuner-agentscope")]


@table(
    ("version", "fix"),
    [
        ("1.0.5", "pip install 'agentscope<2,>=1.0.7'"),
        ("2.0.3", "pip install 'agentscope!=2.0.11,<3,>=2.0.6'"),
        ("2.0.11", "pip install 'agentscope!=2.0.11,<3,>=2.0.6'"),
        ("3.0.0", "pip install 'agentscope!=2.0.0,!=2.0.1,!=2.0.11,!=2.0.2,!=2.0.3,!=2.0.4,!=2.0.5,<3,>=1.0.7'"),
        ("0.1.6", "pip install 'agentscope!=2.0.0,!=2.0.1,!=2.0.11,!=2.0.2,!=2.0.3,!=2.0.4,!=2.0.5,<3,>=1.0.7'"),
    ],
)
def test_other_versions_fail_with_the_command_that_stays_on_their_major_version(
    version: str, fix: str, install: Install
) -> None:
    if version.startswith("2.") and sys.version_info < (3, 11):
        pytest.skip("AgentScope 2.x needs Python 3.11")
    install({"agentscope": version, **WORKS_WITH_1})
    ((level, detail, command),) = found()
    assert (level, command) == ("fail", fix)
    assert detail.endswith(f": {version} is installed; ASTuner is not tested with this version")


def test_the_doctor_knows_what_breaks_agentscope_1(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install({"agentscope": "1.0.21", "mcp": "2.3.0", "openai": "3.1.0", "sqlalchemy": "2.1.0", "tqdm": None})
    with pytest.raises(SystemExit) as e:
        main(["doctor"])
    printed = capsys.readouterr().out
    assert e.value.code == 1
    for fix in ("'mcp<2'", "'openai<3,>=2'", "'sqlalchemy<2.1'", "'tqdm'"):
        assert printed.count(f"pip install {fix}") == 1
    assert "greenlet" in printed
