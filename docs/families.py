"""The table of chat templates in docs/model_families.md: what the tests hold true of real ones."""

from __future__ import annotations

import json
from pathlib import Path

FACTS = Path(__file__).resolve().parent.parent / "plugins/astuner_families/tests/templates/families.json"
TEMPLATES = {
    "qwen2.5": "Qwen2.5",
    "hermes": "`hermes`, ASTuner's for ChatML",
    "qwen3": "Qwen3",
    "qwen3.5": "Qwen3.5",
    "glm-4.5": "GLM-4.5",
    "gpt-oss": "gpt-oss",
    "llama-3.1": "Llama 3.1",
    "llama-3.2": "Llama 3.2",
    "mistral-nemo": "Mistral Nemo",
    "mistral-small-3.2": "Mistral Small 3.2",
    "deepseek-v3.1": "DeepSeek V3.1",
    "deepseek-v3": "DeepSeek V3, R1",
    "r1-distill": "DeepSeek R1 distilled",
    "gemma-3": "Gemma 3",
}
"""What people call the templates that are test data, in the order of the page."""
VOCABULARIES = FACTS.parents[4] / "tests/vocabularies/vocabularies.json"
OLDER = {f"mistral-{version}": f"Mistral {version}" for version in ("v1", "v2", "v3", "v7")}
"""Templates that are tested with their vocabularies alone."""


def families() -> str:
    """What the tests hold true of real chat templates."""
    from astuner.chat.reply import NO_CALLS, known_families

    styles = [style.name for style in (NO_CALLS, *(style for family in known_families() for style in family.styles))]
    known = json.loads(FACTS.read_text(encoding="utf-8"))
    assert sorted(known) == sorted(TEMPLATES), "docs/families.py: TEMPLATES names each of families.json once"
    rows = []
    for name, title in TEMPLATES.items():
        facts = known[name]
        calls = next(style for style in styles if style.startswith(facts["calls"] or "no tool calls"))
        reasoning = (
            ("dropped from history" if facts["drops_reasoning"] else "kept") if facts["reasons"] else "not marked"
        )
        cells = (title, facts["family"], calls, reasoning, "always" if facts["incremental"] else "not always")
        rows.append(f"| {' | '.join(cells)} |")
    head = "| chat template of | family | tool calls | reasoning | a reply can be continued |\n|---|---|---|---|---|\n"
    return head + "\n".join(rows) + "\n"


def vocabularies() -> str:
    """The vocabulary that each template is tested with, and which beginnings of a reply merge with the prompt there."""
    rows = []
    for name, known in json.loads(VOCABULARIES.read_text(encoding="utf-8")).items():
        for template, merging in known["templates"].items():
            title = {**TEMPLATES, **OLDER}[template]
            begins = ", ".join(f"`{json.dumps(begin)[1:-1]}`" for begin in merging) or "never"
            rows.append(f"| {title} | {name} | {known['package']} {known['version']} | {begins} |")
    head = "| chat template of | vocabulary | out of the package | merges with a reply that begins with |\n"
    head += "|---|---|---|---|\n"
    return head + "\n".join(rows) + "\n"
