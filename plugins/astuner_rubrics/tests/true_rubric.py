"""A world whose true rubric is known, and a scripted helper that is honest about it.

Answers either have or lack plain qualities; a true rubric weighs some of them.  The helper sees what a real one would
see, the messages: it proposes criteria from the answers and the verdict in them, and it grades by the words of each
criterion and nothing else, so one that does not name a quality gets no grade for it.  Noise is a hash of the request
and of how often it came, so that it does not hang on the order in which requests come.
"""

import hashlib
import itertools
import random
import re
import threading
from collections import Counter

from astuner_rubrics.fence import fences_in, without_fences

QUALITIES = {  # name: (what an answer with it has, what a criterion that names it says)
    "source": ("Source: the town's yearbook.", ("names a source for what it claims", "says where its facts are from")),
    "example": ("For example, the mill of 1820.", ("gives a concrete example", "illustrates the point by an example")),
    "polite": ("Thank you for asking.", ("is polite to the person who asks", "has a polite tone")),
    "caution": ("I am not sure of the year.", ("admits what is uncertain", "says openly what is uncertain")),
    "list": ("1. water 2. roads", ("is laid out as a list", "puts its points into a list")),  # in no true rubric
}
_WORDS = {"source": "source|where its facts", "example": "example", "polite": "polite", "caution": "uncertain",
          "list": "list"}  # fmt: skip
JUNK = ("is good", "would be liked by the person who asks", "has the right length")
NOT = "does not do this: it "


class TrueRubric:
    """What answers are worth, and a helper that thinks so too.

    :param weights: quality -> weight.
    :param noise: how likely an answer of the helper is wrong: grades that are the opposite, or proposals that are
        junk, turned round, or about something else.
    :param steady: the same question has the same answer however often it is asked.
    :param grade_noise: how likely each single grade is the opposite, whatever the others in the same answer are.
    """

    def __init__(self, weights, *, noise=0.0, grade_noise=0.0, seed=0, mode="pairwise", steady=False):
        self.weights, self.noise, self.grade_noise, self.seed, self.mode = weights, noise, grade_noise, seed, mode
        self._asked, self._lock, self.steady = Counter(), threading.Lock(), steady

    def worth(self, answer):
        return sum(w for name, w in self.weights.items() if has(answer, name))

    def samples(self, count, *, ties=False):
        """Labelled examples, in the layout of the file."""
        rng = random.Random(self.seed)
        made = []
        while len(made) < count:
            question = f"What is known about the town of {rng.choice(TOWNS)} ({len(made)})?"
            answers = [self._answer(rng) for _ in range({"pointwise": 1, "pairwise": 2, "listwise": 4}[self.mode])]
            worth = [self.worth(a) for a in answers]
            if len(set(answers)) < len(answers) or (not ties and len(set(worth)) < len(worth)):
                continue
            made.append({"question": question, **self._label(answers, worth)})
        return made

    def _label(self, answers, worth):
        if self.mode == "pointwise":
            return {"answer": answers[0], "score": worth[0]}
        if self.mode == "pairwise":
            return {"answers": answers, "preferred": "tie" if worth[0] == worth[1] else worth.index(max(worth))}
        best_first = sorted(set(worth), reverse=True)
        return {"answers": answers, "ranks": [best_first.index(w) + 1 for w in worth]}

    @staticmethod
    def _answer(rng):
        parts = [text for text, _ in QUALITIES.values() if rng.random() < 0.5]
        return " ".join(["It lies on a river.", *rng.sample(parts, len(parts)), f"Population {rng.randrange(9999)}."])

    # ------------------------------------------------------------------------------------------------- the helper

    def __call__(self, body):
        content = body["messages"][-1]["content"]
        blocks = {fence.label: fence.text for fence in fences_in(content)}
        with self._lock:
            self._asked[content] += 1
            asked = 1 if self.steady else self._asked[content]
        rng = random.Random(hashlib.sha256(f"{self.seed} {asked} {content}".encode()).digest())
        answers = [text for label, text in blocks.items() if label.startswith("ANSWER")]
        if "Sort them" in content:
            return self._themes(blocks["CRITERIA"], int(re.search(r"at most (\d+)", content)[1]))
        outside = without_fences(content)
        if "Their verdict" in outside:
            return self._propose(answers, outside, rng)
        low, high = map(float, re.search(r"from (\S+) \(.*to (\S+) \(", outside).groups())
        if rng.random() < self.noise:
            low, high = high, low  # the opposite of everything
        return {
            "grades": [
                {
                    "criterion": number,
                    "reason": "as it says",
                    "grades": [self._noisy(self.grade(text, answer, low, high), low, high, rng) for answer in answers],
                }
                for number, text in numbered(blocks["CRITERIA"])
            ]
        }

    def _noisy(self, grade, low, high, rng):
        return low + high - grade if rng.random() < self.grade_noise else grade

    @staticmethod
    def grade(criterion, answer, low, high):
        """The share of the qualities that a criterion names which the answer has; the middle where it names none."""
        names = named(criterion)
        if not names:
            return (low + high) / 2
        met = [has(answer, name) != (NOT in criterion) for name in names]
        return low + (high - low) * sum(met) / len(met)

    def _propose(self, answers, outside, rng):
        """The quality that explains the verdict best, as somebody would name it who knows what counts."""
        at_most = int(m[1]) if (m := re.search(r"at most (\d+) criteria", outside)) else 1
        if rng.random() < self.noise:
            wrong = rng.choice([*JUNK, *(texts[0] for _, texts in QUALITIES.values())])
            return {"criteria": [{"criterion": f"The answer {rng.choice(['', NOT])}{wrong}.", "weight": 1}]}
        names = self._explaining(answers, outside) or [rng.choice(list(QUALITIES))]
        return {
            "criteria": [
                {"criterion": f"The answer {rng.choice(QUALITIES[name][1])}.", "weight": self.weights.get(name, 1)}
                for name in names[:at_most]
            ]
        }

    def _explaining(self, answers, outside):
        by_weight = sorted(self.weights, key=lambda name: -self.weights[name])
        if self.mode == "pointwise":
            return by_weight
        if self.mode == "listwise":
            return [n for n in by_weight if len({has(a, n) for a in answers}) > 1]
        order = [int(n) - 1 for n in re.findall(r"ANSWER (\d+)", re.search(r"Their verdict: (.*)", outside)[1])]
        first, last = answers[order[0]], answers[order[-1]]
        return [n for n in by_weight if has(first, n) and not has(last, n)]

    def _themes(self, criteria, most):
        by_name = {}
        for number, text in numbered(criteria):
            by_name.setdefault(named(text), []).append((number, text))
        groups = list(by_name.values())
        while len(groups) > most:
            groups[-2:] = [groups[-2] + groups[-1]]
        return {
            "themes": [
                {"theme": "All of this: " + " ".join(t for _, t in group), "tips": ["look for it"],
                 "criteria": [n for n, _ in group]}
                for group in groups
            ]
        }  # fmt: skip


TOWNS = tuple("".join(p) for p in itertools.product(("Al", "Ber", "Cor"), ("ten", "lin", "ham"), ("", "feld")))


def has(answer, name):
    return QUALITIES[name][0] in answer


def named(criterion):
    """The qualities whose words a criterion has."""
    return tuple(name for name, words in _WORDS.items() if re.search(words, criterion))


def numbered(text):
    """Number and text of each criterion, its tips included."""
    parts = re.split(r"^(\d+)\. ", text, flags=re.MULTILINE)[1:]
    return [(int(number), text.strip()) for number, text in zip(parts[::2], parts[1::2], strict=True)]
