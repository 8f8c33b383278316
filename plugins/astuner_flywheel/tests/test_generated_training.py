"""The whole way, offline: documents → tasks → episodes of a real agent → steps of the local backbone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("agentscope")
pytest.importorskip("torch")

from astuner import run
from astuner.testing import ScriptedModel

from ._files import make_docx, make_html, make_pdf
from ._writer import asked_for, kind, rows, shown

pytestmark = pytest.mark.slow

NAMES = ("Mia", "Tom", "Zoe", "Sam", "Ada")
THINGS = ("pens", "eggs", "cards", "stars")
FACT = re.compile(r"(\w+) has (\d) boxes with (\d) (\w+) in each\.")


def facts(start):
    """Facts in words that the tiny model knows, with numbers that it can multiply."""
    numbers = range(start, start + 4)
    return [f"{NAMES[n % 5]} has {n % 7 + 2} boxes with {n % 5 + 3} {THINGS[n % 4]} in each." for n in numbers]


def problem(m):
    return f"{m[1]} has {m[2]} boxes with {m[3]} {m[4]} in each. How many {m[4]}?"


def word_problems(body):
    """Writes a word problem for each fact of the text, in the way of the math example's data."""
    text = " ".join((shown(body, "TEXT") or "").split())
    if kind(body) == "write from text":
        tasks = [
            {"question": problem(m), "answer": str(int(m[2]) * int(m[3])), "evidence": m[0]}
            for m in FACT.finditer(text)
        ]
        return {"tasks": tasks[: asked_for(body)]}
    one, other = (int(number) for number in re.findall(r"\d", shown(body, "QUESTION")))
    return {"reasoning": f"{one} * {other}", "found": True, "answer": str(one * other)}


def test_the_local_backbone_trains_on_tasks_made_from_documents(tmp_path, monkeypatch):
    monkeypatch.setenv("ASTUNER_HOME", str(tmp_path / "home"))
    docs = tmp_path / "docs"
    docs.mkdir()
    make_pdf(docs / "a.pdf", [" ".join(facts(0))])
    make_docx(docs / "b.docx", facts(4))
    make_html(docs / "c.html", facts(8))
    (docs / "d.md").write_text("# Boxes\n\n" + "\n\n".join(facts(12)), encoding="utf-8")
    workflow = Path(__file__).parents[3] / "examples" / "math_agent" / "workflow.py"
    with ScriptedModel(word_problems) as server:
        experiment = {
            "astuner": {
                "model": {"path": "tiny-calculator"},
                "experiment_dir": str(tmp_path / "runs"),
                "helper_models": {"writer": {"base_url": server.base_url, "model": "scripted"}},
                "task_reader": {
                    "type": "data_generation",
                    "data_generation": {
                        "helper_model": "writer", "documents": ["docs"], "tasks": 16, "validation_share": 0.25,
                    },
                },
                "data": {"train_batch_size": 4},
                "rollout": {
                    "workflow": f"{workflow}->MathAgentWorkflow", "num_repeat": 2, "max_env_worker": 8,
                    "max_response_length_in_one_turn": 40, "max_model_len": 256, "multi_turn": {"max_steps": 3},
                },
                "task_judge": {"judge": "math_answer"},
                "trainer_common": {"total_steps": 2, "test_freq": 2, "logger": []},
            }
        }  # fmt: skip
        path = tmp_path / "made_of_documents.yaml"
        path.write_text(json.dumps(experiment), encoding="utf-8")
        result = run(path, backbone="local")
    folder = tmp_path / "generated" / "made_of_documents"
    train, held_out = rows(folder / "train.jsonl"), rows(folder / "validation.jsonl")
    assert len(train) + len(held_out) == 16
    sources = {row["metadata"]["provenance"]["document"] for row in train + held_out}
    assert sources == {"docs/a.pdf", "docs/b.docx", "docs/c.html", "docs/d.md"}
    metrics = rows(result.run_dir / "metrics.jsonl")
    trained = [row for row in metrics if row.get("tokens/trained", 0) > 0]
    assert trained, "two steps of eight episodes have a group to learn from"
    assert any(row["grad_norm"] > 0 for row in trained)
    assert all(row["rollout/errored_frac"] == 0 for row in metrics if "rollout/errored_frac" in row)
    assert metrics[-1]["val/tasks"] == len(held_out)
    episodes = (result.run_dir / "episodes" / "step_000001.jsonl").read_text(encoding="utf-8")
    assert sum(row["main_query"] in episodes for row in train) == 4, "the first step's four tasks"
    assert not any(row["main_query"] in episodes for row in held_out)
