"""Asking a helper model for one verdict, as all judges here do.

Invariant: the system message is made of the person's own settings alone, so whatever an agent wrote, it is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

from pydantic import BaseModel

from astuner.contracts.errors import JudgeFailed
from astuner_helpers import Helper, HelperFailed
from astuner_rubrics.fence import EXPLAINED, fences

Verdict = TypeVar("Verdict", bound=BaseModel)


def system_message(task: str, criteria: str, form: str) -> dict[str, str]:
    """The system message: what to do, by which criteria, what fences are, and the form of the answer."""
    criteria = f"The criteria:\n{criteria.strip()}"
    return {"role": "system", "content": "\n\n".join([task.strip(), criteria, EXPLAINED, form])}


def user_message(texts: Mapping[str, str], question: str, *, limit: int) -> dict[str, str]:
    """The user message: fenced texts, and what is asked about them."""
    return {"role": "user", "content": f"{fences(texts, limit=limit)}\n\n{question}"}


async def ask(
    helper: Helper,
    messages: Sequence[Mapping[str, str]],
    answer: type[Verdict],
    *,
    purpose: str,
    temperature: float | None = None,
    sample: int = 0,
) -> Verdict:
    """One verdict of the wanted form; the helper is asked again where it is not of that form.

    :raises JudgeFailed: there is none.
    :raises BudgetSpent: the helper's budget is spent.
    """
    try:
        found = await helper.ask(messages, purpose=purpose, answer=answer, temperature=temperature, sample=sample)
    except HelperFailed as e:
        raise JudgeFailed(f"no verdict: {e}") from e
    return cast(Verdict, found.data)
