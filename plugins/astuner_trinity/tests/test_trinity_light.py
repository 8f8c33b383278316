"""What astuner-trinity says of itself where Trinity is not installed: tables, refusals, platforms, what to install."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from astuner import load_config
from astuner.contracts.types import FinishReason, SamplingParams
from astuner_debug.engine import OpenAICompletionsEngine
from astuner_trinity.engine import TrinityEngine
from astuner_trinity.facts import Facts, helper_environ
from tests.table import table

ROOT = Path(__file__).resolve().parents[3]
QUICK_START = ROOT / "astuner_core/tests/data/seeds/quick_start.yaml"
PAGE = ROOT / "docs" / "backbones" / "trinity.md"
LIGHT = ("facts", "table", "native")
HEAVY = ("trinity", "verl", "ray", "torch", "transformers", "tensordict")


def run(code: str, **env: str) -> str:
    """Run ``code`` in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}"],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": "", **env},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_importing_the_light_modules_imports_nothing_heavy() -> None:
    names = ", ".join(f"astuner_trinity.{name}" for name in LIGHT)
    assert run(f"import {names}\nprint([name for name in {HEAVY} if name in sys.modules])").strip() == "[]"


def test_stop_strings_reach_the_server_and_the_token_that_completes_one_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bodies: list[dict[str, Any]] = []

    def post(self: object, path: str, body: dict[str, Any]) -> dict[str, Any]:
        bodies.append(body)
        tokens = {"token_ids": [3, 4], "logprobs": {"token_logprobs": [-0.1, -0.2]}}
        return {"choices": [{"text": "4", "finish_reason": "stop", **tokens}]}

    async def version() -> int:
        return 7

    monkeypatch.setattr(OpenAICompletionsEngine, "__init__", lambda self: None)
    server = OpenAICompletionsEngine()  # type: ignore[call-arg]
    server._client, server.model, server.max_model_len = SimpleNamespace(post=partial(post, None)), "m", 50  # type: ignore[assignment]
    actor = SimpleNamespace(get_model_version=SimpleNamespace(remote=version))
    engine = TrinityEngine(server, actor, max_model_len=50)
    made = asyncio.run(engine.generate([1], SamplingParams(max_tokens=9, stop=("\nObservation:",))))
    assert bodies[0]["stop"] == ["\nObservation:"]
    assert (list(made.response_ids), made.finish_reason, made.policy_version) == ([3, 4], FinishReason.STOP, 7)


@pytest.mark.skipif(find_spec("trinity") is not None, reason="Trinity is installed here")
def test_without_trinity_the_error_says_what_to_install() -> None:
    code = """
from astuner.contracts.errors import MissingDependency
from astuner_trinity.native import every_key
try:
    every_key()
except MissingDependency as e:
    print(e)
"""
    assert "pip install astuner-trinity" in run(code)


def test_every_key_of_the_schema_is_converted_or_honoured_or_refused() -> None:
    code = """
from astuner.config.capabilities import CORE
from astuner.config.checking import section_of
from astuner.config.schema import AstunerSection
from astuner_trinity.table import TABLE

def keys(model, prefix=""):
    for name, info in model.model_fields.items():
        section = section_of(info)
        yield from keys(section, f"{prefix}{name}.") if section is not None else [f"{prefix}{name}"]

CONVERTED, OWN, CAPABILITIES = TABLE.converted, TABLE.own, TABLE.capabilities
said = {*CONVERTED, *OWN, *CAPABILITIES.only, *CAPABILITIES.instead}
dealt = {*said, *CORE, "debug"}
everything = set(keys(AstunerSection))
print([k for k in everything if not any(k == s or k.startswith(s + ".") for s in dealt)])
print([k for k in said if k not in everything and not any(e.startswith(k + ".") for e in everything)])
print(sorted(set(CAPABILITIES.only) - set(CAPABILITIES.instead)))
also = ("mini_batch_num", "algorithm.dynamic_sampling", "algorithm.max_draws")  # Trinity waits for what they mean
print(sorted(CONVERTED & OWN ^ {f"trainer_common.{name}" for name in also}))
"""
    assert run(code).splitlines() == ["[]"] * 4


REFUSED = {
    "model.device=cpu": "TRINITY_PLATFORM=cpu",
    "model.lora.dropout=0.1": "dropout would make rollout and trainer differ",
    "model.revision=main": "download the revision",
    "rollout.multi_turn.expected_steps=3": "regardless of their number",
    "rollout.name=sglang": "token IDs",
    "rollout.top_k=5": "lower rollout.temperature",
    "rollout.top_p=0.9": "lower rollout.temperature",
    "trainer_common.algorithm.use_kl_in_reward=true": "write trainer_common.use_kl_loss",
    "trainer_common.resume_freq=3": "write trainer_common.save_freq",
}
"""What a person writes below ``astuner.``, and what the refusal says."""


@pytest.mark.slow
def test_what_trinity_cannot_honour_is_refused_by_name() -> None:
    code = f"""
from pathlib import Path
from astuner import load_config
from astuner.config.capabilities import check_capabilities
from astuner.contracts.errors import ConfigError
from astuner_trinity.table import TABLE
overrides = ["astuner." + override for override in {list(REFUSED)}]
try:
    check_capabilities(load_config(Path({str(QUICK_START)!r}), overrides), TABLE.capabilities)
except ConfigError as e:
    print(*e.problems, sep="\\n")
"""
    problems = run(code).splitlines()
    for override, says in REFUSED.items():
        key = f"astuner.{override.partition('=')[0]}"
        assert [problem for problem in problems if key in problem.split(";")[0] and says in problem], key
    assert len(problems) == len(REFUSED), "nothing else of the seeds' file is refused"


@table(("name", "says"), [("cpu", "pip install -e plugins/astuner_trinity/cpu"), ("tpu", "for GPUs, unset it")])
def test_a_platform_that_nobody_brings_is_an_error(name: str, says: str) -> None:
    code = """
import importlib.metadata
from astuner.contracts.errors import ConfigError
from astuner_ray.native import compose
from astuner_trinity.facts import platform
compose.entry_points = lambda **asked: ()
try:
    platform()
except ConfigError as e:
    print(e)
"""
    assert says in run(code, TRINITY_PLATFORM=name)


@table(("installed", "settings"), [(True, "{}"), (False, "WITHOUT_FLASH_ATTENTION")])
def test_where_no_platform_is_named_there_are_gpus(installed: bool, settings: str) -> None:
    code = f"""
from astuner_ray.native import compose
from astuner_trinity.facts import WITHOUT_FLASH_ATTENTION, Platform, platform
compose.find_spec = lambda name: {installed} or None
print(platform() == platform({{}}) == Platform(settings={settings}))
"""
    assert run(code).strip() == "True"


def test_no_key_is_said_twice() -> None:
    keys = re.findall(
        r"^  ([^\s:-][^\s:]*):", (files("astuner_trinity") / "keys.yaml").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(keys) > 100
    assert sorted(keys) == sorted(set(keys))  # of two, YAML would take the last


def test_the_page_has_every_key_of_the_table_and_every_refusal() -> None:
    code = """
from astuner_trinity.table import TABLE
print(*[row.native for row in TABLE.rows], *TABLE.locked, sep="\\n")
print(*[f"astuner.{key}" for key in TABLE.capabilities.instead], sep="\\n")
"""
    page = PAGE.read_text(encoding="utf-8")
    keys = run(code).split()
    assert len(keys) > 200
    assert [key for key in keys if f"`{key}`" not in page] == []


def test_an_auxiliary_model_is_found_by_its_name_and_its_number_and_trinity_is_not_told_the_name(
    tmp_path: Path,
) -> None:
    def facts(*models: dict[str, Any]) -> Facts:
        file = tmp_path / "named.yaml"
        written = f"trinity: {{explorer: {{auxiliary_models: {json.dumps(models)}}}}}\n"
        file.write_text(f"astuner: {{model: {{path: a/model}}, backbone: trinity}}\n{written}")
        found = object.__new__(Facts)  # without looking for GPUs and a model
        object.__setattr__(found, "config", load_config(file))
        return found

    named = facts({"name": "grader", "model_path": "a/judge"}, {"model_path": "b/judge", "engine_num": 2})
    assert named.own["explorer.auxiliary_models"] == [
        {"model_path": "a/judge"},
        {"model_path": "b/judge", "engine_num": 2},
    ]
    found = helper_environ([("http://a/v1", "a/judge"), ("http://b/v1", "b/judge")], named.helper_names)
    assert found == {
        "ASTUNER_AUXILIARY_0_URL": "http://a/v1",
        "ASTUNER_AUXILIARY_0_MODEL": "a/judge",
        "ASTUNER_AUXILIARY_GRADER_URL": "http://a/v1",
        "ASTUNER_AUXILIARY_GRADER_MODEL": "a/judge",
        "ASTUNER_AUXILIARY_1_URL": "http://b/v1",
        "ASTUNER_AUXILIARY_1_MODEL": "b/judge",
    }
    for names in (["grader", "Grader"], ["0"], ["a-b"], [7]):
        wrong = dict(facts(*({"name": name, "model_path": "a/judge"} for name in names))._unreadable())
        assert wrong["trinity.explorer.auxiliary_models"].startswith("should have unique names")
