"""Scripted judges that like or dislike a style, or only waver: what the card must name, and what it must not."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import Callable

import pytest

from astuner import Judge, JudgeOutput
from astuner.contracts.judge import GroupJudge
from astuner_helpers.members import Member
from astuner_rubrics.card import JudgeUnderTest, Plan, Probe, as_html, as_markdown, check
from astuner_rubrics.changes import CHANGES, ERROR_RATE, MOST_ANSWERS, PADDING, Effect, filled
from astuner_rubrics.labels import Labels, read_labels
from astuner_rubrics.measures import Judged, holm, sign_test
from tests.table import table

Grade = Callable[[str], float]
NAMES = {change.name for change in CHANGES}


def worth(text: str) -> float:
    return float(text.partition("worth ")[2].split()[0]) / 10 if "worth " in text else 0.0


def share_of_text(text: str, salt: object) -> float:
    """Return a number from 0 to 1 that is the text's own."""
    return int(hashlib.sha256(f"{salt}{text}".encode("utf-8", "backslashreplace")).hexdigest()[:8], 16) / 2**32


class Grades(Judge):
    def __init__(self, grade: Grade) -> None:
        super().__init__(None)
        self.grade = grade

    def judge(self, workflow_task, output):
        return JudgeOutput(reward=self.grade(output.response))


class GradesGroups(GroupJudge):
    """Grades each answer, the first ones better by ``first``; ``winner`` gives 1 to the best and 0 to the others."""

    def __init__(self, grade: Grade, first: float = 0.0, winner: bool = False) -> None:
        super().__init__(None)
        self.grade, self.first, self.winner = grade, first, winner

    async def judge_group(self, attempts):
        rewards = [self.grade(a.output.response) + self.first * (place == 0) for place, a in enumerate(attempts)]
        rewards = [float(r == max(rewards)) for r in rewards] if self.winner else rewards
        return [JudgeOutput(reward=r) for r in rewards]


def scores(folder, count=100, levels=(0, 3, 7, 10), seed=0) -> Labels:
    rng = random.Random(seed)
    rows = [
        {"question": f"q{i}", "answer": f"worth {level} {'x' * rng.randrange(50)}", "score": level}
        for i in range(count)
        for level in [levels[i % len(levels)]]
    ]
    return write(folder, rows)


def pairs(folder, count=100) -> Labels:
    rng = random.Random(0)
    rows = []
    for i in range(count):
        a, b = rng.sample(range(11), 2)
        answers = [f"worth {x} {'y' * rng.randrange(50)}" for x in (a, b)]
        rows.append({"question": f"q{i}", "answers": answers, "preferred": int(b > a)})
    return write(folder, rows)


def write(folder, rows) -> Labels:
    path = folder / "labels.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_labels(path)


def effects_of(judge: Judge | GroupJudge, labels: Labels, seed: int = 0) -> tuple[tuple[Effect, ...], int]:
    """Return the effects of all changes, and how many questions they took."""

    async def whole() -> tuple[tuple[Effect, ...], int]:
        asked = JudgeUnderTest(Member("J", judge), answer_field="final_answer", at_once=8, timeout=20)
        verdicts = await asyncio.gather(*(asked.verdict(s, s.answers) for s in labels.samples))
        judged = [Judged(s, v) for s, v in zip(labels.samples, verdicts, strict=True) if v is not None]
        before = asked.asked
        found = await Probe(asked, judged, seed).effects(CHANGES)
        return found, asked.asked - before

    return asyncio.run(whole())


def card_of(judge, labels, plan=None):
    async def whole():
        under_test = JudgeUnderTest(Member("J", judge), answer_field="final_answer", at_once=8, timeout=20)
        return await check(under_test, labels, plan or Plan(), name="J", notes=(), say=lambda line: None)

    return asyncio.run(whole())


def likes(*words: str, reward: float = 1.0) -> Grade:
    return lambda text: reward if any(word in text for word in words) else worth(text)


def flips(grade: Grade, salt: object, share: float = 0.1) -> Grade:
    return lambda text: 1 - grade(text) if share_of_text(text, salt) < share else grade(text)


def jitters(grade: Grade, salt: object, most: float = 0.3) -> Grade:
    return lambda text: (1 - most) * grade(text) + most * share_of_text(text, salt)


def wavers(grade: Grade, seed: int, share: float) -> Grade:
    rng = random.Random(seed)
    return lambda text: 1 - grade(text) if rng.random() < share else grade(text)


@table(
    ("grade", "raises", "lowers"),
    [
        (worth, set(), set()),
        (lambda text: float(round(2 * worth(text)) / 2), set(), set()),  # coarse
        (lambda text: 0.5, set(), set()),
        (likes("professor"), {"authority"}, set()),
        (likes("peer-reviewed", "expert"), {"authority"}, set()),
        (likes("**"), {"bold"}, set()),
        (likes("**", "professor"), {"bold", "authority"}, set()),
        (likes("definitely", "without any doubt"), {"confidence"}, set()),
        (likes("wonderful"), {"flattery"}, set()),
        (likes("🎉"), {"emojis"}, set()),
        (likes("```"), {"code_fence"}, set()),
        (likes("99.73%"), {"numbers"}, set()),
        (likes("1,204"), {"numbers"}, set()),
        (likes("Esta es"), {"other_language"}, set()),
        (likes("Therefore"), {"reasoning"}, set()),
        (likes("# "), {"heading"}, set()),
        (likes("Sure"), {"preface"}, set()),
        (lambda text: worth(text) * ("**" not in text), set(), {"bold"}),
        (lambda text: worth(text) * ("professor" not in text), set(), {"authority"}),
        (lambda text: worth(text) * ("wonderful" not in text and "🎉" not in text), set(), {"flattery", "emojis"}),
        (lambda text: 0.3 * worth(text) + len(text) / 300, {"length"}, set()),
        (lambda text: 0.3 * worth(text) - len(text) / 300, set(), {"length"}),
        (flips(likes("professor"), 1), {"authority"}, set()),
        (flips(likes("**", "professor"), 2), {"bold", "authority"}, set()),
        (jitters(likes("**", "professor"), 3), {"bold", "authority"}, set()),
        (wavers(likes("professor"), 4, 0.05), {"authority"}, set()),
        (lambda text: worth(text) + 0.2 * ("professor" in text), {"authority"}, set()),
        (lambda text: 1 - likes("professor", reward=0.0)(text), {"authority"}, set()),  # wrong about everything else
    ],
)
@pytest.mark.slow
def test_a_preference_is_named_and_no_other(tmp_path, grade, raises, lowers):
    found, _ = effects_of(Grades(grade), scores(tmp_path))
    assert {effect.change.name for effect in found if effect.direction == "raises"} == raises
    assert {effect.change.name for effect in found if effect.direction == "lowers"} == lowers


@table(
    ("judge", "raises"),
    [
        (GradesGroups(worth), set()),
        (GradesGroups(worth, first=0.3), set()),
        (GradesGroups(worth, first=2.0), set()),
        (GradesGroups(worth, winner=True), set()),
        (GradesGroups(likes("professor", reward=2.0)), {"authority"}),
        (GradesGroups(likes("**", "professor", reward=2.0), winner=True), {"bold", "authority"}),
        (GradesGroups(jitters(worth, 5)), set()),
    ],
)
@pytest.mark.slow
def test_a_preference_of_a_judge_of_groups_is_named(tmp_path, judge, raises):
    found, _ = effects_of(judge, pairs(tmp_path))
    assert {effect.change.name for effect in found if effect.direction == "raises"} == raises


def test_a_judge_that_falls_for_bold_and_authority_is_not_called_noisy(tmp_path):
    card = card_of(Grades(likes("**", "professor")), scores(tmp_path))
    assert card.fitness == "do not use"
    assert any(reason.startswith("style: bold raises") for reason in card.reasons)
    assert any(reason.startswith("style: authority raises") for reason in card.reasons)
    assert not any("noisy" in reason for reason in card.reasons)
    measures = card.as_dict()["measures"]
    assert measures["neutral_moves"]["value"] == measures["attack_baseline"]["value"] == 0.0
    assert card.as_dict()["changes"]["bold"]["direction"] == "raises"
    assert "style: authority raises the verdict" in as_markdown(card)
    assert "style: authority raises the verdict" in as_html(card)


def test_a_judge_that_lowers_for_bold_may_be_used_with_care(tmp_path):
    card = card_of(Grades(lambda text: worth(text) * ("**" not in text)), scores(tmp_path))
    assert card.fitness == "use with care"
    assert card.reasons == ("style: the verdict is lowered by bold",)


def test_a_judge_of_exact_texts_is_lowered_by_any_change_and_not_attackable(tmp_path):
    labels = scores(tmp_path, levels=(0, 10))
    right = {sample.answers[0] for sample in labels.samples if sample.worth[0] == max(sample.worth) == 10}
    card = card_of(Grades(lambda text: float(text in right)), labels)
    assert card.fitness == "use with care"
    (reason,) = card.reasons
    assert reason.startswith("style: the verdict is lowered by ")


def test_too_few_answers_with_a_low_label_are_not_enough_to_find_a_preference(tmp_path):
    few = scores(tmp_path, count=32, levels=(10, 10, 10, 0))
    for labels, is_enough in ((few, False), (scores(tmp_path, count=32), True)):
        card = card_of(Grades(worth), labels, Plan(attacks=0, repeats=1))
        said = any(reason.startswith("style: kinds") and "only 8 values" in reason for reason in card.reasons)
        assert said is not is_enough
        assert card.as_dict()["measures"]["repeat_moves"]["value"] == 0.0


def test_the_traffic_of_the_changes_is_bounded(tmp_path):
    labels = scores(tmp_path, count=200)
    _, quiet = effects_of(Grades(worth), labels)
    assert quiet == 12 * len(CHANGES)
    _, loud = effects_of(Grades(jitters(likes("**", "professor", "🎉", "Sure", "# ", "- "), 1, 0.8)), labels)
    assert loud <= 4 * MOST_ANSWERS * len(CHANGES) + MOST_ANSWERS


@pytest.mark.slow
def test_noisy_but_fair_judges_are_seldom_blamed(tmp_path):
    """Measured with 400 of them on 100 labels: 4 blamed (1 %)."""
    blamed = 0
    labels = {levels: scores(tmp_path, levels=levels) for levels in ((0, 10), (0, 3, 7, 10))}
    for salt in range(30):
        for grade in (flips(worth, salt, 0.2), jitters(worth, salt, 0.4), wavers(worth, salt, 0.2)):
            found, _ = effects_of(Grades(grade), labels[(0, 10) if salt % 2 else (0, 3, 7, 10)], salt)
            blamed += any(effect.direction for effect in found)
    assert blamed <= 2 * ERROR_RATE * 90  # at most 4.5 are expected, and more than 9 in 1.5 % of such tests


@pytest.mark.slow
@pytest.mark.parametrize(("strength", "fewest"), [(0.5, 15), (0.75, 18), (1.0, 20)])
def test_a_preference_for_some_answers_is_found(tmp_path, strength, fewest):
    """Measured on 100 labels, 20 judges each: 19 at a half, 20 at three quarters, 20 at all."""
    labels = scores(tmp_path)
    hits = 0
    for salt in range(20):

        def grade(text: str, salt: int = salt) -> float:
            return 1.0 if "professor" in text and share_of_text(text, salt) < strength else worth(text)

        found, _ = effects_of(Grades(grade), labels, salt)
        hits += any(effect.direction == "raises" and effect.change.name == "authority" for effect in found)
    assert hits >= fewest


def test_changes_say_nothing_of_any_question():
    assert len(NAMES) == len(CHANGES) >= 15
    for change in CHANGES:
        text = change.apply("worth 5 xx")
        assert text != "worth 5 xx"
        assert "worth 5" in text.replace("  ", " ")
        assert not any(word in text.lower() for word in ("score", "verdict", "correct", "ignore", "criteria"))


@table(("length", "added"), [(3, 3), (10, 10), (400, 400)])
def test_a_filler_has_the_length_of_what_it_stands_for(length, added):
    text = filled("ab", 2 + length)
    assert (len(text), text[:3]) == (2 + added, "ab ")
    assert text.split()[1] == PADDING.split()[0][: len(text.split()[1])]


@table(
    ("ways", "p"),
    [
        ([], 1.0),
        ([0, 0], 1.0),
        ([1] * 10, 2 / 1024),
        ([-1] * 10, 2 / 1024),
        ([1, -1, 0], 1.0),
        ([1] * 5 + [0] * 9, 2 / 32),
    ],
)
def test_the_sign_test_counts_ways_and_not_ties(ways, p):
    assert sign_test(ways) == pytest.approx(p)


@table(
    ("p_values", "rejected"),
    [
        ([0.01, 0.04, 0.03, 0.005], [True, False, False, True]),
        ([0.02, 0.03], [True, True]),
        ([0.03, 0.03], [False, False]),
        ([], []),
        ([1.0], [False]),
    ],
)
def test_holms_method(p_values, rejected):
    assert holm(p_values, 0.05) == rejected
