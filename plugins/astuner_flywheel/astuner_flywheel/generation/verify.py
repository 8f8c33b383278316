"""Whether a proposed answer is right, as far as somebody else who works it out comes to the same.

Each solution is asked for without showing the proposed answer; agreement of independent solutions is a good sign of a
right answer (self-consistency: Wang et al. 2022, arXiv:2203.11171).  The first that disagrees ends it, so a wrong
answer costs little.
"""

from __future__ import annotations

from dataclasses import dataclass

from astuner_flywheel.generation import prompts
from astuner_flywheel.generation.checks import same_answer
from astuner_flywheel.generation.units import Candidate
from astuner_helpers import Helper

_TEMPERATURE = 0.7
"""Of several solutions, which at 0 would all be one; as in the paper."""


@dataclass(frozen=True)
class Verdict:
    """Why a task is rejected; both empty when it is not."""

    reason: str = ""
    detail: str = ""


async def verify(helper: Helper, candidate: Candidate, solutions: int, secret: str) -> Verdict:
    """Have the answer worked out ``solutions`` times, and compare.

    :raises astuner_helpers.HelperFailed: there is no verdict.
    """
    passage = candidate.unit.chunk.text if candidate.unit.chunk is not None else None
    for number in range(solutions):
        asked = await helper.ask(
            prompts.solve(candidate.question, passage, secret=secret),
            purpose="solve tasks",
            answer=prompts.Solution,
            temperature=0.0 if solutions == 1 else _TEMPERATURE,
            sample=number,
        )
        solution: prompts.Solution = asked.data
        if not solution.found or not solution.answer.strip():
            return Verdict("not answerable", solution.reasoning[:500])
        if same_answer(candidate.answer, solution.answer):
            continue
        compared = await helper.ask(
            prompts.compare(candidate.question, candidate.answer, solution.answer, secret=secret),
            purpose="compare answers",
            answer=prompts.Comparison,
            temperature=0.0,
        )
        comparison: prompts.Comparison = compared.data
        if not comparison.same:
            return Verdict("another answer", f"{solution.answer[:200]!r}: {comparison.reason[:500]}")
    return Verdict()
