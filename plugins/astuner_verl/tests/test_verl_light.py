"""What astuner-verl says of itself where VERL is not installed: the documentation's tables, and what to install."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from astuner.contracts.types import FinishReason, SamplingParams
from astuner.plugins.loader import load_plugins
from astuner_debug.explain_command import find_key
from astuner_verl.engine import VerlEngine
from tests.table import table

ROOT = Path(__file__).resolve().parents[3]
LIGHT = ("facts", "table", "native", "separate")
HEAVY = ("verl", "ray", "torch", "transformers", "hydra", "tensordict", "transfer_queue")


def run(code: str) -> str:
    """Run ``code`` in a process of its own."""
    done = subprocess.run([sys.executable, "-c", f"import sys\n{code}"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_light_modules_imports_nothing_heavy() -> None:
    names = ", ".join(f"astuner_verl.{name}" for name in LIGHT)
    assert run(f"import {names}\nprint([name for name in {HEAVY} if name in sys.modules])").strip() == "[]"


@table(("servers_read_text", "asked"), [(True, ["\nObservation:", "END"]), (False, None)])
def test_stop_strings_reach_servers_that_read_text(servers_read_text: bool, asked: list[str] | None) -> None:
    parameters: list[dict[str, Any]] = []

    class Client:
        async def generate(self, sampling_params: dict[str, Any], **_: Any) -> Any:
            parameters.append(sampling_params)
            return SimpleNamespace(token_ids=[3, 4], log_probs=[-0.1, -0.2], stop_reason="completed", extra_fields={})

    client: Any = Client()
    engine = VerlEngine(client, max_model_len=50, strings=servers_read_text)
    sampling = SamplingParams(max_tokens=9, stop=("\nObservation:", "END"))
    made = asyncio.run(engine.generate([1], sampling))
    assert parameters[0].get("stop") == asked
    assert (list(made.response_ids), made.finish_reason) == ([3, 4], FinishReason.STOP)


@pytest.mark.skipif(find_spec("verl") is not None, reason="VERL is installed here")
def test_without_verl_the_error_says_what_to_install() -> None:
    code = """
from astuner.contracts.errors import MissingDependency
from astuner_verl.native import defaults
try:
    defaults()
except MissingDependency as e:
    print(e)
"""
    assert "pip install astuner-verl" in run(code)


def test_no_key_is_said_twice() -> None:
    keys = re.findall(
        r"^  ([^\s:-][^\s:]*):", (files("astuner_verl") / "keys.yaml").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(keys) > 100
    assert sorted(keys) == sorted(set(keys))  # of two, YAML would take the last


def test_the_page_has_every_key_of_the_table_and_every_refusal() -> None:
    code = """
from astuner_verl.table import TABLE
print(*[row.native for row in TABLE.rows], *TABLE.locked, sep="\\n")
print(*[f"astuner.{key}" for key in TABLE.capabilities.instead], sep="\\n")
"""
    page = (ROOT / "docs" / "backbones" / "verl.md").read_text(encoding="utf-8")
    keys = run(code).split()
    assert len(keys) > 100
    assert [key for key in keys if f"`{key}`" not in page] == []


def test_keys_below_its_section_are_free() -> None:
    info = find_key("verl.actor_rollout_ref.rollout.gpu_memory_utilization", load_plugins())
    assert (info.type, info.doc) == (
        "anything",
        "Settings of the engine itself in the ``verl:`` or ``trinity:`` section, with the engine's own keys. They take "
        "precedence over values that ASTuner sets.",
    )
