"""reasoning-gym's procedural tasks: one question, one answer, scored by the package's own scorers.

Invariant: a scorer sees an answer only in a form in which it can do no harm (`reasoning_answers`), and in a process of
its own (`reasoning_scoring`); an answer that it is not shown, or fails at, is wrong, and never an error.

A score below 1 is no success: many scorers give a little for any answer, right or wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

from astuner.contracts.environment import Environment, Evaluation, StepResult
from astuner.contracts.types import Task
from astuner_env.worlds.actions import calls_of, text_of, tool
from astuner_env.worlds.procedural import SPLITS, TASK_IDS, list_tasks, parse_task_id, read_params
from astuner_env.worlds.reasoning_answers import REFUSED, NotShown, shown
from astuner_env.worlds.reasoning_scoring import ScorerFailed, score

PARAMS: Mapping[str, Any] = {"datasets": {"chain_sum": {}, "countdown": {}}, "partial": True, "max_steps": 3}
MEANINGS = {
    "tasks": "how many tasks a split lists; 0: train 10000, the others 256",
    "datasets": "name of a data set -> its settings in reasoning-gym; they are listed in turn",
    "partial": "whether the score is the scorer's own, 0.01 for a wrong answer included; else 1 for a success and 0",
    "max_steps": "messages per episode: one in which no answer is found may be followed by another",
}
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
            "datasets": offered(),
            "tools": [tool("answer", "Give the final answer.", "answer", {"type": "string"})],
        }

    def _result(self, observation: str, reward: float) -> StepResult:
        return StepResult(
            observation=observation,
            reward=reward,
            terminated=self._is_answered,
            truncated=not self._is_answered and self._steps >= self._settings["max_steps"],
            info={"steps": self._steps, **{name: text for name, text in self._details.items() if name == "scorer"}},
        )

    def _judge(self, answer: str) -> float:
        try:
            number = score(self._dataset, shown(self._name, answer, self._entry), self._entry)
        except NotShown as e:
            self._details["scorer"] = f"the answer was not shown to the scorer: {e}"
            return 0.0
        except ScorerFailed as e:
            self._details["scorer"] = f"the scorer failed at the answer: {e}"
            return 0.0
        return number if self._settings["partial"] or number >= 1 else 0.0


def offered() -> list[str]:
    """The data sets that there are tasks of."""
    return sorted(DATASETS.keys() - REFUSED.keys())


def read_answer(action: Mapping[str, Any]) -> str | None:
    """The answer in a message: a call of the tool ``answer``, else what the last ``<answer>…</answer>`` holds."""
    for name, arguments in calls_of(action):
        if name == "answer" and "answer" in arguments:
            return str(arguments["answer"]).strip()
    text = text_of(action)
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return None if start < 0 else text[start + len("<answer>") : end].strip()


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
        raise ValueError(f"the data set {name!r} is not offered: {REFUSED[name]}")
    if name not in DATASETS:
        raise ValueError(f"reasoning-gym has no data set {name!r}")
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
