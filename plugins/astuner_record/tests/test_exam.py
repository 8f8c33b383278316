"""What an episode was asked, what it answered, what was expected, and why it failed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

from astuner.contracts.types import WorkflowOutput
from astuner_record.episode_log import EpisodeLog
from astuner_record.exam import answer_of, cause_of, expected_of, question_of
from tests.table import table

from .test_episode_log import episode, write


@table(
    ("one", "other"),
    [
        ("ConnectionError: 127.0.0.1:8001 refused after 3 s", "ConnectionError: 10.0.0.7:8002 refused after 12.5 s"),
        ("<Agent object at 0x7f3a> died at 12:03:55", "<Agent object at 0x9c01> died at 23:59:01"),
        ("episode g0000012-3: lost", "episode g0000099-0: lost"),
        ("task 3f2a9c1e-77aa-4b1d-9f00-1234567890ab is gone", "task 00000000-0000-4000-8000-000000000000 is gone"),
        ("ValueError: 'I think it is x' is no number", "ValueError: 'or y, perhaps' is no number"),
        ('JSONDecodeError in {"a": {"b": 1}}', 'JSONDecodeError in {"c": [], "d": {}}'),
        ("no space\nline 1 of the traceback", "no space\nanother line"),
    ],
)
def test_what_differs_by_occurrence_has_one_cause(one: str, other: str) -> None:
    assert cause_of(one) == cause_of(other)


@table(
    ("one", "other"),
    [
        ("KeyError: 'answer'", "KeyError: 'question'"),
        ("TimeoutError: after 5 s", "ConnectionError: after 5 s"),
        ("the model can't, so it won't", "the model can't, so it shan't"),
    ],
)
def test_other_causes_stay_others(one: str, other: str) -> None:
    assert cause_of(one) != cause_of(other)


def row(output: Any = None, metadata: Any = (), query: str = "why?", turns: Any = ()) -> dict[str, Any]:
    task = {"init_messages": [{"role": "user", "content": [{"text": "parts"}]}], "metadata": dict(metadata)}
    replies = [{"reply": json.dumps(turn)} for turn in turns]
    return {"output": output and json.dumps(output), "task": json.dumps(task), "query": query, "turns": replies}


def test_the_answer_is_what_a_judge_would_read() -> None:
    said = {"role": "assistant", "content": "last words"}
    assert answer_of(row({"metadata": {"final_answer": "4"}, "response": "x"}, turns=[said])) == "4"
    assert answer_of(row({"metadata": {}, "response": {"a": 1}}, turns=[said])) == '{"a": 1}'
    assert answer_of(row({"metadata": {}, "response": None}, turns=[said])) == "last words"
    assert answer_of(row(turns=[said])) == "last words"
    assert answer_of(row()) == ""
    assert expected_of(row(metadata={"target": 7, "answer": ""})) == "7"
    assert expected_of(row(metadata={"other": 7})) == ""
    assert (question_of(row()), question_of(row(query=""))) == ("why?", "parts")


def test_the_log_tells_answers_and_finds_causes(tmp_path: Path) -> None:
    refused = [episode(f"g-{i}", None, error=f"refused at port {8000 + i}\n…") for i in range(3)]
    write(tmp_path, *((1, one) for one in refused), (2, episode("h-0", output=WorkflowOutput(response="four"))))
    with EpisodeLog(tmp_path) as log:
        assert log.facets()["error"] == (("refused at port #", 3),)
        assert log.count(["cause=refused at port #"]) == 3
        assert log.exams(log.list()) == [("answer 3", "4")] * 3 + [("four", "4")]
        assert log.exams([replace(log.list()[0], id=5)]) == [("", "")]  # a resumed run has forgotten it
        assert [e.episode_id for e in log.list(order="query", descending=True, limit=1)] == ["h-0"]
