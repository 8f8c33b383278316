"""The page, the examples and what the tests measure are one; and the examples train."""

from __future__ import annotations

import json
import re
import textwrap
from typing import Any

import pytest

from .harness import ENVIRONMENTS, ROOT
from .test_over_http import AGENTS, EXAMPLES, RAISES, every_agent, tell

PAGE = (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8")

PINNED = {
    (name, version)
    for file in ("requirements/frameworks.txt", "requirements/constraints.txt")
    for name, version in re.findall(r"^([\w-]+)(?:\[\w+\])?==([\d.]+)", (ROOT / file).read_text(encoding="utf-8"), re.M)
} | {("agentscope", name.removeprefix("agentscope-")) for name in ENVIRONMENTS if name.startswith("agentscope-")}
"""What the tests' environments have installed."""

SECTIONS = re.findall(r"^### .*?(?=^##|\Z)", PAGE, re.M | re.S)
FILES = sorted(path.name for path in EXAMPLES.glob("with_*.py"))

ROWS = {
    cells[0]: cells[1:]
    for line in PAGE.partition("| agent | versions |")[2].partition("\n\n")[0].splitlines()[2:]
    for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
}


def test_every_agent_is_in_the_table():
    assert list(ROWS) == list(AGENTS)


@every_agent
def test_the_table_says_what_is_measured(agent):
    scenes = [tell(agent, name + suffix) for name in ("loop", "parallel", "thinking") for suffix in ("", "_streaming")]
    later = [turn for scene in scenes for turn in scene["continues"][1:]]
    share = sum(turn is not None for turn in later) / len(later)
    counts = [(scene["samples"], len(scene["turns"])) for scene in scenes]
    sequences = "one per turn" if all(n == turns for n, turns in counts) else str(max(n for n, _ in counts))
    assert ROWS[agent][1:] == [f"{share:.0%}".replace("%", " %"), sequences, *(outcome(agent, n) for n in MISTAKES)]


MISTAKES = ("unknown_tool", "cut_off")


def outcome(agent: str, name: str) -> str:
    if (agent, name) in RAISES:
        return f"`{RAISES[agent, name].partition(':')[0]}`"
    if len(tell(agent, name)["turns"]) == 1:
        return "treated as the answer"
    return "reported to the model" if name == "unknown_tool" else "the model is called again"


def test_the_versions_are_those_of_the_test_environments():
    named = set(re.findall(r"([\w-]+) (\d+\.\d+\.\d+)", " ".join(cells[0] for cells in ROWS.values())))
    assert {name for name, _ in named} == {
        "openai", "anthropic", "openai-agents", "langchain", "langchain-openai", "pydantic-ai-slim", "smolagents",
        "agentscope",
    }  # fmt: skip
    assert named <= PINNED


@pytest.mark.parametrize("file", FILES)
def test_what_the_page_shows_is_in_the_example(file):
    (section,) = [section for section in SECTIONS if f"](../examples/frameworks/{file})" in section]
    example = (EXAMPLES / file).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)
    assert blocks or file == "with_curl.py"
    for block in blocks:
        assert any(textwrap.indent(block, " " * n) in example for n in (0, 4, 8, 12)), block


@pytest.mark.parametrize("file", FILES)
def test_the_examples_readme_names_every_workflow(file):
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    (row,) = [line for line in readme.splitlines() if line.startswith(f"| [{file}]({file})")]
    defined = re.findall(r"^class (\w+)\(", (EXAMPLES / file).read_text(encoding="utf-8"), re.M)
    assert re.findall(r"`(\w+)`", row) == defined


@pytest.mark.parametrize(
    "workflow",
    ["with_openai.py->ChatCompletionsAgent", "with_openai.py->ResponsesAgent", "with_anthropic.py->AnthropicAgent"],
)
def test_the_examples_train_a_real_model(workflow: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny one, over HTTP, with the examples' own YAML."""
    from astuner import run

    monkeypatch.chdir(tmp_path)
    short = ["trainer_common.total_steps=1", "data.max_validation_tasks=4", f"rollout.workflow={workflow}"]
    result = run(str(EXAMPLES / "frameworks.yaml"), [f"astuner.{key}" for key in short], backbone="local")
    certificate = json.loads((result.run_dir / "certificate.json").read_text(encoding="utf-8"))
    assert certificate["turns_going_on"] > 32  # nearly every one of the 64 episodes calls the tool once
    assert certificate["continued_exactly_share"] == 1
    assert certificate["tokens"]["trained"] == certificate["tokens"]["generated"] > 0
