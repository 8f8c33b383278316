"""Stands for a large language model that writes tasks and solves them, so that the example needs none.

It is scripted, and knows the eight wordings as a real one knows English; everything else it reads out of the prompts
that `astuner data generate` really sends.  It knows nothing of who is asked in the end.  As a real one it is not always
right: some of what it writes is wrong, makes no sense or repeats what it was shown, it slips when it solves, and a few
questions it always gets wrong, whether it writes or solves.
"""

from __future__ import annotations

import random
import re
import threading
from collections import Counter
from typing import Any

from astuner_local.tiny.problems import LARGEST, SMALLEST, WORDINGS, Problem

FAULTY = 0.10
"""Share of the written tasks that are spoiled; each way of `SPOILED` equally often."""
SPOILED = ("wrong answer", "a number is missing", "a sample again")
SLIPS = 0.02
"""Share of the solutions that are wrong by chance; the next one of the same question need not be."""
ALWAYS_WRONG = 0.01
"""Share of the questions that it gets wrong in the same way each time: no check by the same model can find those."""

NAMES = ("Ida", "Leo", "Noa", "Jan", "Pia", "Kim", "Lou", "Uli")
THINGS = ("cups", "keys", "nuts", "hats", "maps", "rings", "dolls", "stamps")
"""What it makes up."""


def _pattern(text: str) -> re.Pattern[str]:
    found = re.escape(text).replace(r"\{a\}", r"(?P<a>\d+)").replace(r"\{b\}", r"(?P<b>\d+)")
    found = found.replace(r"\{name\}", r"\w+").replace(r"\{things\}", r"(?P<things>\w+)", 1)
    return re.compile(found.replace(r"\{things\}", "(?P=things)"))


_PATTERNS = [_pattern(text) for _, text in WORDINGS]


def understand(question: str) -> Problem | None:
    """Return the problem in a question, or None if its wording is unknown or its answer is not a whole number."""
    for wording, pattern in enumerate(_PATTERNS):
        if match := pattern.fullmatch(question.strip()):
            a, b = int(match["a"]), int(match["b"])
            if WORDINGS[wording][0] != "/":
                return Problem(question, wording, a, b)
            return Problem(question, wording, a // b, b) if b and a % b == 0 else None
    return None


class Writer:
    """Answers one chat request after the other, as `astuner.testing.ScriptedModel` wants it.

    :param seed: of what it writes; the same seed writes the same to the same samples.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._lock = threading.Lock()
        self._solved: Counter[str] = Counter()

    def __call__(self, body: dict[str, Any]) -> dict[str, Any]:
        task, prompt = body["messages"][0]["content"], body["messages"][-1]["content"]
        if task.startswith("You write tasks like the samples"):
            return {"tasks": self._write(prompt)}
        if task.startswith("You answer a question"):
            return self._solve(_fence(prompt, "QUESTION"))
        if task.startswith("You say whether two answers"):
            same = _fence(prompt, "ANSWER-1") == _fence(prompt, "ANSWER-2")
            return {"reason": "the numbers are the same" if same else "the numbers differ", "same": same}
        raise ValueError(f"nobody wrote what to answer to: {task[:100]}")

    def _write(self, prompt: str) -> list[dict[str, str]]:
        samples = re.findall(r"^question: (.*)$", _fence(prompt, "SAMPLES"), re.MULTILINE)
        there = set(re.findall(r"^- (.*)$", _fence(prompt, "EXISTING"), re.MULTILINE))
        asked = re.search(r"Write (one|\d+) tasks?", prompt)
        numbers = re.search(r"from (\d+) to (\d+)", prompt)
        assert asked is not None
        low, high = (int(numbers[1]), int(numbers[2])) if numbers else (SMALLEST, LARGEST)
        known = [problem for sample in samples if (problem := understand(sample)) is not None]
        rng = random.Random(f"{self._seed} {samples}")
        found: list[dict[str, str]] = []
        while known and len(found) < (1 if asked[1] == "one" else int(asked[1])):
            sample = rng.choice(known)
            problem = _like(sample, rng, low, high)
            question, answer = problem.question, self._believed(problem)
            if rng.random() < FAULTY:
                how = rng.choice(SPOILED)
                if how == "wrong answer":
                    answer = str(int(answer) + rng.choice((-2, -1, 1, 10)))
                elif how == "a number is missing":
                    question = re.sub(rf"\b{problem.b}\b", "some", question, count=1)
                else:
                    question, answer = sample.question, sample.answer
            if question not in there:
                found.append({"question": question, "answer": answer})
        return found

    def _solve(self, question: str) -> dict[str, Any]:
        with self._lock:
            self._solved[question] += 1
            time = self._solved[question]
        problem = understand(question)
        if problem is None:
            return {"reasoning": "Something is missing here.", "found": False, "answer": ""}
        answer = self._believed(problem)
        if random.Random(f"{self._seed} {question} {time}").random() < SLIPS:
            answer = str(int(answer) + 1)
        return {"reasoning": f"{problem.left} {problem.operator} {problem.right}", "found": True, "answer": answer}

    def _believed(self, problem: Problem) -> str:
        """Return the answer, which is wrong for a few questions."""
        wrong = random.Random(f"{self._seed} {problem.question}").random() < ALWAYS_WRONG
        return str(int(problem.answer) + 1) if wrong else problem.answer


def _like(sample: Problem, rng: random.Random, low: int, high: int) -> Problem:
    """Return a problem in the same wording with another name, other things and other numbers."""
    operator, text = WORDINGS[sample.wording]
    a, b = rng.randint(low, high), rng.randint(low, high)
    if operator == "-" and a < b:
        a, b = b, a
    shown = a * b if operator == "/" else a
    question = text.format(name=rng.choice(NAMES), things=rng.choice(THINGS), a=shown, b=b)
    return Problem(question, sample.wording, a, b)


def _fence(prompt: str, name: str) -> str:
    """Return the text between the two markers of that name, or an empty string."""
    found = re.search(rf"<<<{name} ([0-9a-f]{{16}})\n(.*?)\n\1>>>", prompt, re.DOTALL)
    return found[2] if found else ""
