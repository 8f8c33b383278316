"""reasoning-gym's procedural tasks: one question, one answer, scored by the package's own scorers.

Some scorers run what they are shown, as Python or as a formula of sympy's, which does the same; others take nonsense
for right.  Invariants: a scorer that runs text is shown text that this module wrote, from values or sums that it read
by itself, or the reference answer; where there is no such form, the data set is refused (`REFUSED`).  A scorer runs in
a process of its own, for so long, and with nothing to do harm with: whatever it does with an answer, running forever
and taking all memory included, is the answer's fault, and scores 0.  It is the scorer's only if the reference answer
fares no better.  So an answer that is not shown, or that a scorer fails at, is wrong, and never an error.

A score below 1 is no success: many scorers give a little for any answer, right or wrong.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

import reasoning_gym
from pydantic import Field, field_validator
from reasoning_gym.factory import DATASETS

from astuner.contracts.environment import Evaluation, StepResult
from astuner.contracts.types import counts_as_success
from astuner_env.worlds import procedural
from astuner_env.worlds.procedural import calls_of, text_of, tool
from astuner_sandbox.isolation.channel import Channel
from astuner_sandbox.isolation.child import ForkedChild
from astuner_sandbox.isolation.confine import Confinement, library
from astuner_sandbox.isolation.proc import address_space_mb

ASK = "\nGive your answer as <answer>…</answer>."


class Params(procedural.Params):
    datasets: dict[str, Any] = Field({"chain_sum": {}, "countdown": {}})
    """name of a data set -> its settings in reasoning-gym; they are listed in turn"""
    partial: bool = True
    """whether the score is the scorer's own, 0.01 for a wrong answer included; else 1 for a success and 0"""
    max_steps: int = Field(3, ge=1)
    """messages per episode: one in which no answer is found may be followed by another"""

    @field_validator("datasets")
    @classmethod
    def _known(cls, datasets: dict[str, Any]) -> dict[str, Any]:
        if not datasets:
            raise ValueError("the parameter 'datasets' names no data set")
        for name, config in datasets.items():
            _check(name, config)
        return datasets

    @property
    def names(self) -> Sequence[str]:
        return list(self.datasets)


class ReasoningGym(procedural.ProceduralWorld):
    """One question. Task ids are ``DATASET:SEED``; the score is the scorer's, and 1 is a success."""

    kind = Params
    named = "DATASET"
    _name: str
    _dataset: Any
    _entry: dict[str, Any]
    _score = 0.0
    _details: Mapping[str, Any] = {}

    def _begin(self, name: str, seed: int) -> StepResult:
        self._name = name
        self._dataset = _make(name, self._settings.datasets.get(name, {}), seed)
        self._entry = self._dataset[0]
        self._score = 0.0
        self._details = {"dataset": name, "answer": None}
        return StepResult(observation=str(self._entry["question"]) + ASK)

    def _act(self, action: Mapping[str, Any]) -> tuple[str, float]:
        answer = read_answer(action)
        if answer is None:
            return "No answer found." + ASK, 0.0
        self._is_done = True
        self._details = {**self._details, "answer": answer}
        self._score = self._judge(answer)
        return "Right." if counts_as_success(self._score) else "Not right.", self._score

    def evaluate(self) -> Evaluation:
        return Evaluation(score=self._score, success=counts_as_success(self._score), details=self._details)

    def _about(self) -> dict[str, Any]:
        return {
            "rules": "Answer the question. The last <answer>…</answer> of a message counts, or a call of the tool.",
            "score": "reasoning-gym's, 0 to 1; below 1 is no success, and wrong answers may have 0.01 or 0.05",
            "datasets": offered(),
            "tools": [tool("answer", "Give the final answer.", "answer", {"type": "string"})],
        }

    def _info(self) -> dict[str, Any]:
        return {**super()._info(), **{name: text for name, text in self._details.items() if name == "scorer"}}

    def _judge(self, answer: str) -> float:
        try:
            number = score(self._dataset, shown(self._name, answer, self._entry), self._entry)
        except NotShown as e:
            why = f"the answer was not shown to the scorer: {e}"
        except ScorerFailed as e:
            why = f"the scorer failed at the answer: {e}"
        else:
            return number if self._settings.partial or number >= 1 else 0.0
        self._details = {**self._details, "scorer": why}
        return 0.0


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


# ---- scoring ---------------------------------------------------------------------------------------------------------

_RUNS_FORMULAS = "it is scored by running the answer as code, in sympy"
REFUSED: Mapping[str, str] = {
    "composite": "it cannot be made from a name and a seed",
    "simple_integration": _RUNS_FORMULAS,
    "intermediate_integration": _RUNS_FORMULAS,
    "polynomial_multiplication": _RUNS_FORMULAS,
    "game_of_life_halting": "its scorer takes any text for right",
    "coin_flip": "its scorer takes 0 for nearly any probability",
}
"""Data set -> why it is not offered."""
READ_AS_PYTHON = frozenset({"string_insertion", "spiral_matrix", "binary_matrix", "n_queens"})
"""``eval`` reads the answer, which should be a list, unless it is the very reference."""
READ_AS_ARITHMETIC = frozenset({"countdown", "puzzle24"})
"""Sympy reads the answer, which should be a sum of the question's numbers."""
MOST_CHARACTERS = 20_000
"""Of an answer."""
LONGEST_SUM = 500
"""Characters of an arithmetic answer; without powers its value has about as many digits."""
MOST_NESTED = 50
"""Lists in lists, or operations in operations."""
CPU_S = 5
"""Processor time for one answer; scorers take milliseconds."""
MEMORY_MB = 512
"""What a scorer may take beyond what this process has."""
TIMEOUT_S = 60
"""For a machine that has other things to do: the processor time is what ends a scorer that runs on."""

_NAN = re.compile(r"(?<![a-z])s?nan\d*[ij]?(?![a-z])", re.IGNORECASE)
_OPERATIONS: Mapping[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SIGNS: Mapping[type, int] = {ast.UAdd: 1, ast.USub: -1}


class NotShown(ValueError):
    """The scorer must not see the answer; says why."""


def shown(dataset: str, answer: str, entry: Mapping[str, Any]) -> str:
    """What the scorer may see.

    :param entry: the task, as reasoning-gym made it.
    :raises NotShown: nothing of the answer; it is wrong.
    """
    if len(answer) > MOST_CHARACTERS:
        raise NotShown(f"it has more than {MOST_CHARACTERS} characters")
    if answer in _references(entry):
        return answer
    if _NAN.search(answer) and not _NAN.search(str(entry["answer"])):
        raise NotShown("a number that is none equals nothing, but to some scorers everything")
    if dataset in READ_AS_PYTHON:
        return rewritten_list(answer)
    if dataset in READ_AS_ARITHMETIC:
        total = rewritten_sum(answer)
        if dataset == "puzzle24" and Counter(total.numbers) != Counter(entry["metadata"]["numbers"]):
            raise NotShown("it does not use the question's numbers, which the scorer does not look at")
        if dataset == "puzzle24" and total.value.denominator != 1:
            raise NotShown("it is no whole number, and the scorer cuts off what is behind the point")
        return total.text
    return answer


def rewritten_list(answer: str) -> str:
    """A list of whole numbers, texts and further lists, written anew.

    :raises NotShown: it is anything else.
    """
    try:
        value = ast.literal_eval(answer)
        _check_value(value, MOST_NESTED)
        return repr(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as e:
        raise NotShown(f"it is no list of numbers or texts ({type(e).__name__})") from None


@dataclass(frozen=True)
class Sum:
    """An arithmetic answer."""

    text: str
    numbers: tuple[int, ...]
    """As they occur in it."""
    value: Fraction


def rewritten_sum(answer: str) -> Sum:
    """A sum of whole numbers with ``+ - * /`` and parentheses, written anew.

    :raises NotShown: it is anything else, or divides by 0.
    """
    try:
        # plain numbers only: 1_0, 1e1 and 0x1 would hide from a scorer which numbers are used, and 1.2 splits in two
        if len(answer) > LONGEST_SUM or not re.fullmatch(r"[0-9\s+\-*/()]+", answer, re.ASCII):
            raise ValueError("other characters")
        tree = ast.parse(answer.strip(), mode="eval").body
        value = _value(tree, MOST_NESTED)
    except (ValueError, SyntaxError, ZeroDivisionError, MemoryError, RecursionError) as e:
        reason = f"{type(e).__name__}: {e}"[:100]
        raise NotShown(f"it is no sum of whole numbers with + - * / and parentheses ({reason})") from None
    numbers = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return Sum(ast.unparse(tree), tuple(number for number in numbers if isinstance(number, int)), value)


def _references(entry: Mapping[str, Any]) -> set[str]:
    """Texts that the scorer compares the answer with before it does anything else."""
    metadata = entry.get("metadata") or {}
    return {str(right).strip() for right in (entry["answer"], *metadata.get("valid_answers", ()))}


def _check_value(value: Any, depth: int) -> None:
    if depth == 0:
        raise ValueError("nested too deep")
    if isinstance(value, (list, tuple)):
        for item in value:
            _check_value(item, depth - 1)
    elif not isinstance(value, (int, str)):
        raise ValueError(f"it holds a {type(value).__name__}")


def _value(tree: ast.expr, depth: int) -> Fraction:
    if depth == 0:
        raise ValueError("nested too deep")
    if isinstance(tree, ast.BinOp) and type(tree.op) in _OPERATIONS:
        return _OPERATIONS[type(tree.op)](_value(tree.left, depth - 1), _value(tree.right, depth - 1))
    if isinstance(tree, ast.UnaryOp) and type(tree.op) in _SIGNS:
        return _SIGNS[type(tree.op)] * _value(tree.operand, depth - 1)
    if isinstance(tree, ast.Constant) and type(tree.value) is int:
        return Fraction(tree.value)
    raise ValueError("another operation")


class ScorerBroken(RuntimeError):
    """The scorer fails on the reference answer too; says how."""


class ScorerFailed(ValueError):
    """The scorer gave no score for this answer; says why."""


def score(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    """The scorer's score.

    :raises ScorerFailed: it failed, at this answer.
    :raises ScorerBroken: it fails at any.
    :raises ForkFailed: it could not be started.
    """
    try:
        return _run(dataset, answer, entry)
    except ScorerFailed:
        try:
            _run(dataset, entry["answer"], entry)
        except ScorerFailed as e:
            raise ScorerBroken(f"the scorer fails with the reference answer, too: {e}") from e
        raise


def _run(dataset: Any, answer: Any, entry: Mapping[str, Any]) -> float:
    confinement = Confinement(read=library(), cpu_s=CPU_S, memory_mb=address_space_mb() + MEMORY_MB, file_mb=0)
    child = ForkedChild(_child, dataset, answer, entry, confinement=confinement)
    try:
        found = child.call("score", TIMEOUT_S)
    except TimeoutError:
        raise ScorerFailed(f"it did not end within {TIMEOUT_S} s") from None
    except (EOFError, ValueError) as e:
        raise ScorerFailed(f"it ended without a score: {e}") from None
    finally:
        child.kill()
    if "failed" in found:
        raise ScorerFailed(str(found["failed"]))
    return float(found["score"])


def _child(channel: Channel, dataset: Any, answer: Any, entry: Mapping[str, Any]) -> None:
    channel.recv()
    try:
        number = float(dataset.score_answer(answer, entry=entry))
        if not math.isfinite(number):
            raise ValueError(f"it gave {number}")
    except Exception as e:  # text of a kind that the scorer's author did not think of
        channel.send({"failed": f"{type(e).__name__}: {e}"[:300]})
    else:
        channel.send({"score": number})


warm = ReasoningGym.warm
