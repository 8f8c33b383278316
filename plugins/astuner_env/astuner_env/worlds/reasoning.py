"""Adapt reasoning-gym's generated tasks: one question, one answer, scored by the package's own scorers.

Some scorers execute the answer, as Python or as a SymPy formula (which is equivalent). Others accept nonsense.
Invariants:

- A scorer that executes text gets only text that this module wrote from parsed values or sums, or the reference
  answer. Data sets without such a form are refused (`REFUSED`).
- A scorer runs in a confined process with a time limit. A failure, including an endless loop or excessive memory use,
  is attributed to the answer, which scores 0, unless the scorer also fails on the reference answer.
- An answer that is not shown to the scorer, or on which the scorer fails, is wrong. It is never an error.

Scores below 1 are not a success: many scorers give a small score for any answer.
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
    """Parameters of `ReasoningGym`."""

    datasets: dict[str, Any] = Field({"chain_sum": {}, "countdown": {}})
    """name of a data set -> its settings in reasoning-gym; tasks are listed in turn"""
    partial: bool = True
    """whether to use the scorer's score, which may be 0.01 for a wrong answer; otherwise 1 for a success, else 0"""
    max_steps: int = Field(3, ge=1)
    """maximum number of messages: after a message without an answer, the agent may send another one"""

    @field_validator("datasets")
    @classmethod
    def _known(cls, datasets: dict[str, Any]) -> dict[str, Any]:
        if not datasets:
            raise ValueError("the parameter 'datasets' is empty")
        for name, config in datasets.items():
            _check(name, config)
        return datasets

    @property
    def names(self) -> Sequence[str]:
        return list(self.datasets)


class ReasoningGym(procedural.ProceduralWorld):
    """Question with task IDs ``DATASET:SEED``. The score comes from the scorer; 1 is a success."""

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
            "score": "reasoning-gym's score, 0 to 1; only 1 is a success; wrong answers may score 0.01 or 0.05",
            "datasets": offered(),
            "tools": [tool("answer", "Give the final answer.", "answer", {"type": "string"})],
        }

    def _info(self) -> dict[str, Any]:
        return {**super()._info(), **{name: text for name, text in self._details.items() if name == "scorer"}}

    def _judge(self, answer: str) -> float:
        try:
            number = score(self._dataset, shown(self._name, answer, self._entry), self._entry)
        except NotShown as e:
            why = f"the answer was not passed to the scorer: {e}"
        except ScorerFailed as e:
            why = f"the scorer failed: {e}"
        else:
            return number if self._settings.partial or number >= 1 else 0.0
        self._details = {**self._details, "scorer": why}
        return 0.0


def offered() -> list[str]:
    """Return the names of the supported data sets."""
    return sorted(DATASETS.keys() - REFUSED.keys())


def read_answer(action: Mapping[str, Any]) -> str | None:
    """Return the answer in a message: from a call of the tool ``answer``, else from the last ``<answer>…</answer>``."""
    for name, arguments in calls_of(action):
        if name == "answer" and "answer" in arguments:
            return str(arguments["answer"]).strip()
    text = text_of(action)
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return None if start < 0 else text[start + len("<answer>") : end].strip()


def _check(name: str, config: Any) -> None:
    if name in REFUSED:
        raise ValueError(f"the data set {name!r} is not supported: {REFUSED[name]}")
    if name not in DATASETS:
        raise ValueError(f"unknown reasoning-gym data set {name!r}")
    if not isinstance(config, Mapping):
        raise ValueError(f"the settings of {name!r} are {config!r}; they must be a mapping")
    known = {field.name for field in fields(DATASETS[name][1])} - {"seed", "size"}
    if unknown := sorted(config.keys() - known):
        raise ValueError(f"unknown setting {unknown[0]!r} of {name!r}; known settings: {', '.join(sorted(known))}")


def _make(name: str, config: Mapping[str, Any], seed: int) -> Any:
    _check(name, config)
    try:
        return reasoning_gym.create_dataset(name, **config, seed=seed, size=1)
    except (AssertionError, TypeError, ValueError) as e:
        raise ValueError(f"reasoning-gym rejects the settings {dict(config)} of {name!r}: {e}") from e


# ---- scoring ---------------------------------------------------------------------------------------------------------

_RUNS_FORMULAS = "its scorer executes the answer as code, in SymPy"
REFUSED: Mapping[str, str] = {
    "composite": "it cannot be created from a name and a seed",
    "simple_integration": _RUNS_FORMULAS,
    "intermediate_integration": _RUNS_FORMULAS,
    "polynomial_multiplication": _RUNS_FORMULAS,
    "game_of_life_halting": "its scorer accepts any text",
    "coin_flip": "its scorer accepts 0 for nearly any probability",
}
"""Data set -> reason why it is not supported."""
READ_AS_PYTHON = frozenset({"string_insertion", "spiral_matrix", "binary_matrix", "n_queens"})
"""Data sets whose scorers call ``eval`` on the answer (a list), unless it equals the reference."""
READ_AS_ARITHMETIC = frozenset({"countdown", "puzzle24"})
"""Data sets whose scorers parse the answer (an arithmetic expression) with SymPy."""
MOST_CHARACTERS = 20_000
"""Maximum length of an answer."""
LONGEST_SUM = 500
"""Maximum length of an arithmetic answer; without powers, its value has about as many digits."""
MOST_NESTED = 50
"""Maximum nesting depth of lists or operations."""
CPU_S = 5
"""CPU seconds per answer; scorers need milliseconds."""
MEMORY_MB = 512
"""Memory that a scorer may use in addition to the memory of this process."""
TIMEOUT_S = 60
"""Wall-clock limit in seconds, for busy machines; endless scorers are ended by their CPU limit."""

_NAN = re.compile(r"(?<![a-z])s?nan\d*[ij]?(?![a-z])", re.IGNORECASE)
_OPERATIONS: Mapping[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SIGNS: Mapping[type, int] = {ast.UAdd: 1, ast.USub: -1}


class NotShown(ValueError):
    """Raised if the scorer must not see the answer; the message gives the reason."""


def shown(dataset: str, answer: str, entry: Mapping[str, Any]) -> str:
    """Return the text that the scorer may see.

    :param entry: Task from reasoning-gym.
    :raises NotShown: The answer is wrong and must not be shown.
    """
    if len(answer) > MOST_CHARACTERS:
        raise NotShown(f"it has more than {MOST_CHARACTERS} characters")
    if answer in _references(entry):
        return answer
    if _NAN.search(answer) and not _NAN.search(str(entry["answer"])):
        raise NotShown("some scorers treat NaN as equal to any number")
    if dataset in READ_AS_PYTHON:
        return rewritten_list(answer)
    if dataset in READ_AS_ARITHMETIC:
        total = rewritten_sum(answer)
        if dataset == "puzzle24" and Counter(total.numbers) != Counter(entry["metadata"]["numbers"]):
            raise NotShown("it does not use the question's numbers, which the scorer does not check")
        if dataset == "puzzle24" and total.value.denominator != 1:
            raise NotShown("it is not an integer, and the scorer truncates decimals")
        return total.text
    return answer


def rewritten_list(answer: str) -> str:
    """Parse a list of integers, strings and lists, and return it as new text.

    :raises NotShown: The answer has another form.
    """
    try:
        value = ast.literal_eval(answer)
        _check_value(value, MOST_NESTED)
        return repr(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as e:
        raise NotShown(f"it is not a list of numbers or strings ({type(e).__name__})") from None


@dataclass(frozen=True)
class Sum:
    """Parsed arithmetic answer."""

    text: str
    numbers: tuple[int, ...]
    """Numbers in the order of the expression."""
    value: Fraction


def rewritten_sum(answer: str) -> Sum:
    """Parse an expression of integers with ``+ - * /`` and parentheses, and return it as new text.

    :raises NotShown: The answer has another form or divides by 0.
    """
    try:
        # only plain integers: scorers would misread the numbers in 1_0, 1e1, 0x1 and 1.2
        if len(answer) > LONGEST_SUM or not re.fullmatch(r"[0-9\s+\-*/()]+", answer, re.ASCII):
            raise ValueError("other characters")
        tree = ast.parse(answer.strip(), mode="eval").body
        value = _value(tree, MOST_NESTED)
    except (ValueError, SyntaxError, ZeroDivisionError, MemoryError, RecursionError) as e:
        reason = f"{type(e).__name__}: {e}"[:100]
        raise NotShown(f"it is not an expression of integers with + - * / and parentheses ({reason})") from None
    numbers = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return Sum(ast.unparse(tree), tuple(number for number in numbers if isinstance(number, int)), value)


def _references(entry: Mapping[str, Any]) -> set[str]:
    """Return the reference answers, which the scorer compares with the answer first."""
    metadata = entry.get("metadata") or {}
    return {str(right).strip() for right in (entry["answer"], *metadata.get("valid_answers", ()))}


def _check_value(value: Any, depth: int) -> None:
    if depth == 0:
        raise ValueError("nested too deep")
    if isinstance(value, (list, tuple)):
        for item in value:
            _check_value(item, depth - 1)
    elif not isinstance(value, (int, str)):
        raise ValueError(f"it contains a {type(value).__name__}")


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
    """Raised if the scorer also fails on the reference answer."""


class ScorerFailed(ValueError):
    """Raised if the scorer returns no score for an answer."""


def score(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    """Return the scorer's score.

    :raises ScorerFailed: The scorer failed on this answer.
    :raises ScorerBroken: The scorer also fails on the reference answer.
    :raises ForkFailed: The scorer's process could not be started.
    """
    try:
        return _run(dataset, answer, entry)
    except ScorerFailed:
        try:
            _run(dataset, entry["answer"], entry)
        except ScorerFailed as e:
            raise ScorerBroken(f"the scorer also fails on the reference answer: {e}") from e
        raise


def _run(dataset: Any, answer: Any, entry: Mapping[str, Any]) -> float:
    confinement = Confinement(read=library(), cpu_s=CPU_S, memory_mb=address_space_mb() + MEMORY_MB, file_mb=0)
    child = ForkedChild(_child, dataset, answer, entry, confinement=confinement)
    try:
        found = child.call("score", TIMEOUT_S)
    except TimeoutError:
        raise ScorerFailed(f"no result within {TIMEOUT_S} s") from None
    except (EOFError, ValueError) as e:
        raise ScorerFailed(f"no score: {e}") from None
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
            raise ValueError(f"the score is {number}")
    except Exception as e:  # scorers may raise anything on unexpected text
        channel.send({"failed": f"{type(e).__name__}: {e}"[:300]})
    else:
        channel.send({"score": number})


warm = ReasoningGym.warm
