"""reasoning-gym's procedural tasks: one question, one answer, scored by the package's own scorers.

Some of those scorers run what the model wrote: they give the answer to ``eval``, or to sympy, which does the same.
Invariant: an answer reaches such a scorer only if nothing in it can call, build or blow up anything; else it is scored
as no answer.  Where that cannot be told from the text, the data set is refused (`REFUSED`).

A score below 1 is no success: many scorers give a little for any answer, right or wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

from astuner.environment import Environment, Evaluation, StepResult
from astuner.types import Task
from astuner_env.worlds.actions import calls_of, text_of, tool
from astuner_env.worlds.procedural import SPLITS, TASK_IDS, list_tasks, parse_task_id, read_params

PARAMS: Mapping[str, Any] = {"datasets": {"chain_sum": {}, "countdown": {}}, "partial": True, "max_steps": 3}
MEANINGS = {
    "tasks": "how many tasks a split lists; 0: train 10000, the others 256",
    "datasets": "name of a data set -> its settings in reasoning-gym; they are listed in turn",
    "partial": "whether the score is the scorer's own, 0.01 for a wrong answer included; else 1 for a success and 0",
    "max_steps": "messages per episode: one in which no answer is found may be followed by another",
}
REFUSED = frozenset({"simple_integration", "intermediate_integration", "polynomial_multiplication"})
"""Sympy reads the answer, and whatever tells harmful formulas apart would be a parser of its own."""
READ_AS_PYTHON = frozenset({"string_insertion", "spiral_matrix", "binary_matrix", "n_queens"})
"""``eval`` reads the answer, which should be a list."""
READ_AS_ARITHMETIC = frozenset({"countdown", "puzzle24"})
"""Sympy reads the answer, which should be an arithmetic expression."""
MOST_CHARACTERS = 20_000
"""Of an answer."""
ASK = "\nGive your answer as <answer>…</answer>."


class ReasoningGym(Environment):
    """One question. Task ids are ``DATASET:SEED``; the score is the scorer's, and 1 is a success."""

    def __init__(self, params: Mapping[str, Any] | None = None) -> None:
        super().__init__(params)
        self._settings = _settings(self.params)
        self._name = ""
        self._dataset: Any = None
        self._entry: dict[str, Any] = {}
        self._steps = 0
        self._is_answered = False
        self._score = 0.0
        self._details: dict[str, Any] = {}

    @classmethod
    def tasks(cls, split: str, params: Mapping[str, Any]) -> Iterable[Task]:
        settings = _settings(params)
        return list_tasks(list(settings["datasets"]), split, settings["tasks"])

    def reset(self, task: Task) -> StepResult:
        self._name, seed = parse_task_id(task.task_id)
        self._dataset = _make(self._name, self._settings["datasets"].get(self._name, {}), seed)
        self._entry = self._dataset[0]
        self._steps, self._is_answered, self._score = 0, False, 0.0
        self._details = {"dataset": self._name, "answer": None}
        return StepResult(observation=str(self._entry["question"]) + ASK)

    def step(self, action: Mapping[str, Any]) -> StepResult:
        if self._dataset is None:
            raise RuntimeError("step before reset")
        if self._is_answered or self._steps >= self._settings["max_steps"]:
            return self._result("It is over.", 0.0)
        self._steps += 1
        answer = read_answer(action)
        if answer is None:
            return self._result("No answer found." + ASK, 0.0)
        self._is_answered = True
        self._details["answer"] = answer
        self._score = self._judge(answer)
        return self._result("Right." if self._score >= 1 else "Not right.", self._score)

    def evaluate(self) -> Evaluation:
        return Evaluation(score=self._score, success=self._score >= 1, details=self._details)

    def describe(self) -> Mapping[str, Any]:
        return {
            "rules": "Answer the question. The last <answer>…</answer> of a message counts, or a call of the tool.",
            "score": "reasoning-gym's, 0 to 1; below 1 is no success, and wrong answers may have 0.01 or 0.05",
            "tasks": TASK_IDS.replace("NAME", "DATASET"),
            "splits": list(SPLITS),
            "params": {name: {"meaning": meaning, "value": self._settings[name]} for name, meaning in MEANINGS.items()},
            "datasets": sorted(DATASETS.keys() - REFUSED - {"composite"}),
            "tools": [tool("answer", "Give the final answer.", "answer", {"type": "string"})],
        }

    def _result(self, observation: str, reward: float) -> StepResult:
        return StepResult(
            observation=observation,
            reward=reward,
            terminated=self._is_answered,
            truncated=not self._is_answered and self._steps >= self._settings["max_steps"],
            info={"steps": self._steps},
        )

    def _judge(self, answer: str) -> float:
        shown: str | None = answer
        if not is_harmless(self._name, answer):
            self._details["scorer"] = "the answer was not shown to the scorer, which would run it as code"
            shown = None
        try:
            score = self._dataset.score_answer(shown, entry=self._entry)
        except Exception as e:  # text of a kind that the scorer's author did not think of
            self._details["scorer"] = f"{type(e).__name__}: {e}"[:300]
            self._dataset.score_answer(self._entry["answer"], entry=self._entry)  # raises: the scorer itself is broken
            score = 0.0
        return self._count(score)

    def _count(self, score: Any) -> float:
        number = float(score)
        if not math.isfinite(number):
            raise ValueError(f"the scorer of {self._name} gave {number}")
        return number if self._settings["partial"] or number >= 1 else 0.0


def read_answer(action: Mapping[str, Any]) -> str | None:
    """The answer in a message: a call of the tool ``answer``, else what the last ``<answer>…</answer>`` holds."""
    for name, arguments in calls_of(action):
        if name == "answer" and "answer" in arguments:
            return str(arguments["answer"]).strip()
    text = text_of(action)
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return None if start < 0 else text[start + len("<answer>") : end].strip()


def is_harmless(dataset: str, answer: str) -> bool:
    """Whether the data set's scorer may see the answer: nothing in it is run, or what is run can do nothing.

    Python without ``(`` calls nothing, and without ``* < % {`` it builds nothing large.  Arithmetic without letters
    and without powers computes numbers about as long as the text.
    """
    if len(answer) > MOST_CHARACTERS:
        return False
    if dataset in READ_AS_PYTHON:
        return not re.search(r"[(*<%{]", answer)
    if dataset in READ_AS_ARITHMETIC:
        return len(answer) <= 500 and re.fullmatch(r"[\d\s+\-*/().]*", answer) is not None and "**" not in answer
    return True


def warm() -> None:
    """What every instance would do first, done once before they are forked."""
    for name in PARAMS["datasets"]:
        ReasoningGym().reset(Task(task_id=f"{name}:0"))


def _settings(params: Mapping[str, Any]) -> dict[str, Any]:
    settings = read_params(params, PARAMS)
    if not settings["datasets"]:
        raise ValueError("the parameter 'datasets' names no data set")
    for name, config in settings["datasets"].items():
        _check(name, config)
    if settings["max_steps"] < 1:
        raise ValueError(f"the parameter 'max_steps' is {settings['max_steps']}; it must be at least 1")
    return settings


def _check(name: str, config: Any) -> None:
    if name in REFUSED:
        raise ValueError(f"the data set {name!r} is not offered: it is scored by running the answer as code")
    if name not in DATASETS or name == "composite":
        raise ValueError(f"reasoning-gym has no data set {name!r} that can be made from a name and a seed")
    if not isinstance(config, Mapping):
        raise ValueError(f"the settings of {name!r} are {config!r}; they must be a mapping")
    known = {field.name for field in fields(DATASETS[name][1])} - {"seed", "size"}
    if unknown := sorted(config.keys() - known):
        raise ValueError(f"{name!r} has no setting {unknown[0]!r}; it has {', '.join(sorted(known))}")


def _make(name: str, config: Mapping[str, Any], seed: int) -> Any:
    _check(name, config)
    try:
        return reasoning_gym.create_dataset(name, **config, seed=seed, size=1)
    except (AssertionError, TypeError, ValueError) as e:
        raise ValueError(f"reasoning-gym refuses the settings {dict(config)} of {name!r}: {e}") from e
