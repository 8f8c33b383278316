"""What can be said against a proposed task: without asking anybody, and by having its answer worked out again.

The evidence is looked for in the passage without regard to white space, typography and line-end hyphens, which models
do not copy, and as a fence showed it; what is found is its exact place in the original text.  Each solution is asked
for without showing the proposed answer; agreement of independent solutions is a good sign of a right answer
(self-consistency: Wang et al. 2022, arXiv:2203.11171).  The first that disagrees ends it, so a wrong answer costs
little.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from astuner_flywheel.generation import prompts
from astuner_flywheel.generation.material import Candidate
from astuner_flywheel.generation.prompts import has_marker
from astuner_flywheel.near import words
from astuner_helpers import Helper
from astuner_helpers.untrusted import neutralise

_TEXT_WORDS = "text|passage|document|excerpt|paragraph|article|section|chapter|table|figure|author|extract"
_REFERS = re.compile(
    rf"\b(?:the|this|that|these|given|provided|above|following)\s+(?:{_TEXT_WORDS})s?\s+(?:above|below|say|state|mention|"
    rf"describe|provide|give)|\baccording to (?:the|this) (?:{_TEXT_WORDS})\b|"
    rf"\b(?:in|from|by|of) (?:the|this) (?:text|passage|excerpt|paragraph|document|extract)\b|"
    r"\b(?:mentioned|described|stated|given|shown|listed) (?:above|below|in the (?:text|passage|document|samples?))\b|"
    r"\b(?:laut|gemäß|im|in dem|aus dem) (?:dem |diesem )?(?:text|abschnitt|dokument|auszug)\b|"
    r"\b(?:selon|dans|d'après) (?:le|ce|l') ?(?:texte|passage|document|extrait)\b|"
    r"\b(?:según|en) (?:el|este) (?:texto|pasaje|documento|fragmento)\b|(?:根据|依据|文中|上文|本文)",
    re.IGNORECASE,
)
_QUOTES = str.maketrans({"’": "'", "‘": "'", "‚": "'", "“": '"', "”": '"', "„": '"', "«": '"', "»": '"'})
_CUT = re.compile(r"-[ \t]*\n\s*(?=[a-zà-ÿ])")
"""A word cut in two at the end of a line."""
_DASHES = re.compile("[\u2010-\u2015\u2212]")

SHORTEST_QUOTE = 6
"""Characters of evidence; fewer are found everywhere."""


def fault(question: str, answer: str, *, longest_question: int, longest_answer: int) -> str | None:
    """Why a question and its answer are no task, whatever they are about."""
    if not question.strip() or not answer.strip():
        return "empty"
    if len(question) > longest_question or len(answer) > longest_answer:
        return "too long"
    if has_marker(question) or has_marker(answer):
        return "repeats the prompt"
    if not words(question):
        return "no words"
    return None


def refers_to_text(question: str) -> bool:
    """Whether it asks about "the text above", which nobody will see."""
    return _REFERS.search(question) is not None


def locate(quote: str, text: str) -> tuple[int, int] | None:
    """Where ``quote`` is in ``text``: ``text[start:end]`` says the same; None when it is not, or is too short."""
    found = _find(_plain(quote), _plain(text))
    if found is None and neutralise(text) != text:  # then the quote may be of what was shown instead
        found = _find(_tight(quote), _tight(text))
    return found


def _find(quote: tuple[str, list[int]], text: tuple[str, list[int]]) -> tuple[int, int] | None:
    whole = quote[0].strip()
    plain, places = text
    for wanted in (whole, whole.strip(" .\"'")):  # a model may end a quote with a full stop of its own
        if len(wanted) < min(SHORTEST_QUOTE, len(plain.strip())):
            continue
        if (at := plain.find(wanted)) >= 0:
            return places[at], places[at + len(wanted) - 1] + 1
    return None


def same_answer(one: str, other: str) -> bool:
    """Whether two answers are the same beyond doubt: the same words, or the same number."""
    if words(one) and words(one) == words(other):
        return True
    first, second = _number(one), _number(other)
    return first is not None and first == second


def _plain(text: str) -> tuple[str, list[int]]:
    """The text as it is compared, and for each of its characters the place in the original."""
    letters: list[str] = []
    places: list[int] = []
    i = 0
    while i < len(text):
        char = text[i]
        if char == "\u00ad":  # a soft hyphen
            i += 1
        elif char == "-" and (end := _CUT.match(text, i)):
            i = end.end()
        elif char.isspace():
            if letters and letters[-1] != " ":
                letters.append(" ")
                places.append(i)
            i += 1
        else:
            plain = _DASHES.sub("-", unicodedata.normalize("NFKC", char).translate(_QUOTES)).casefold()
            letters.extend(plain)
            places.extend([i] * len(plain))
            i += 1
    return "".join(letters), places


def _tight(text: str) -> tuple[str, list[int]]:
    """As `_plain`, without the spaces that break a control token, or any, and without what cannot be seen."""
    plain, places = _plain(text)
    kept = [i for i, char in enumerate(plain) if char != " " and neutralise(char)]
    return "".join(plain[i] for i in kept), [places[i] for i in kept]


def _number(text: str) -> float | None:
    """The one number that a text is, thousands separated or not; None when it is something else."""
    match = re.fullmatch(r"[\s$€£]*([-+]?\d+(?:,\d{3})*(?:\.\d+)?)[\s.%]*", text.replace("−", "-"))
    return float(match[1].replace(",", "")) if match else None


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
