"""What `astuner doctor` says about AgentScope, with versions that are not those of this environment."""

from __future__ import annotations

from importlib import metadata

import pytest

from astuner.cli import main


def test_the_doctor_knows_what_breaks_agentscope(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = {"agentscope": "1.0.21", "mcp": "2.3.0", "openai": "3.1.0", "sqlalchemy": "2.1.0"}
    real = metadata.version

    def version(name: str) -> str:
        if name == "tqdm":
            raise metadata.PackageNotFoundError(name)
        return versions.get(name) or real(name)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(SystemExit) as e:
        main(["doctor"])
    said = capsys.readouterr().out
    assert e.value.code == 1
    for fix in ("'mcp<2'", "'openai<3,>=2'", "'sqlalchemy<2.1'", "'tqdm'"):
        assert f"pip install {fix}" in said
    assert "greenlet" in said
