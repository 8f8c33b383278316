"""The calibration card: judges that are good, biased, fooled, wavering or silent, and what the card says of them."""

import asyncio
import hashlib
import json
import math
import random
import statistics

import pytest

from astuner import Judge, JudgeOutput
from astuner.contracts.errors import ConfigError, DataError, JudgeFailed
from astuner.contracts.judge import GroupJudge
from astuner.contracts.statistics import percent
from astuner_helpers.members import Member
from astuner_rubrics.card import (
    PADDING,
    Card,
    JudgeUnderTest,
    Plan,
    as_html,
    as_markdown,
    check,
    decide,
)
from astuner_rubrics.labels import Mode, read_labels
from astuner_rubrics.measures import (
    AGREEMENT,
    SUCCESSES,
    Limits,
    Measure,
    bootstrap,
    concordance,
    excess,
    kappa,
    kendall_tau_b,
    partial_spearman,
    spearman,
)
from tests.table import table


class Reads(Judge):
    """Gives the number after "worth" in an answer, moved by ``and_so``."""

    def __init__(self, and_so=lambda text, reward: reward):
        super().__init__(None)
        self.and_so = and_so

    def judge(self, workflow_task, output):
        return JudgeOutput(reward=self.and_so(output.response, worth(output.response)))


class ReadsGroups(GroupJudge):
    """The same for groups; ``of_place`` is added for the place of an answer."""

    def __init__(self, of_place=lambda place: 0.0):
        super().__init__(None)
        self.of_place = of_place

    async def judge_group(self, attempts):
        return [JudgeOutput(reward=worth(a.output.response) + self.of_place(place)) for place, a in enumerate(attempts)]


def worth(text):
    return float(text.partition("worth ")[2].split()[0]) / 10 if "worth " in text else 0.0


def scores(folder, count=40, levels=(0, 3, 7, 10)):
    rng = random.Random(0)
    rows = []
    for i in range(count):
        score = levels[i % len(levels)]
        rows.append({"question": f"q{i}", "answer": f"worth {score} {'x' * rng.randrange(50)}", "score": score})
    return write(folder, rows)


def pairs(folder, count=40):
    rng = random.Random(0)
    rows = []
    for i in range(count):
        a, b = rng.sample(range(11), 2)
        answers = [f"worth {x} {'y' * rng.randrange(50)}" for x in (a, b)]
        rows.append({"question": f"q{i}", "answers": answers, "preferred": int(b > a)})
    return write(folder, rows)


def write(folder, rows):
    path = folder / "labels.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_labels(path)


def card_of(judge, labels, plan=None, **kwargs):
    async def whole():
        timeout = kwargs.pop("timeout", 20)
        under_test = JudgeUnderTest(Member("J", judge), answer_field="final_answer", at_once=8, timeout=timeout)
        return await check(under_test, labels, plan or Plan(), name="J", notes=(), say=lambda line: None)

    return asyncio.run(whole())


def line(card, key):
    return next(m for m in card.measures if m.key == key)


# ---------------------------------------------------------------------------------------------------------- whole cards


def test_a_judge_that_says_what_the_labels_say_is_fit(tmp_path):
    card = card_of(Reads(), scores(tmp_path))
    assert (card.fitness, card.reasons, card.weaknesses, card.failures) == ("fit", (), {}, {})
    for key in ("concordance", "spearman", "kendall_tau_b", "self_consistency"):
        assert line(card, key).value == pytest.approx(1.0)
    for key in ("ties", "padding_rises", "attack_success", "abstentions", "length_correlation"):
        assert line(card, key).value == 0.0
    assert line(card, "attack_success").n >= 60
    assert line(card, "seconds_median").value > 0
    assert not [m for m in card.measures if m.key in ("cost", "order_flips")]


def test_binary_labels_get_accuracy_and_kappa_of_success(tmp_path):
    card = card_of(Reads(), scores(tmp_path, levels=(0, 10)))
    assert line(card, "accuracy").value == line(card, "kappa").value == 1.0
    assert line(card, "concordance").name.endswith("(AUC)")


def test_a_judge_of_groups_is_fit_by_pairs(tmp_path):
    card = card_of(ReadsGroups(), pairs(tmp_path))
    assert card.fitness == "fit"
    assert line(card, "accuracy").value == 1.0
    assert line(card, "order_flips").value == 0.0
    assert line(card, "order_flips").n == 30


def test_a_liking_for_the_first_place_shows(tmp_path):
    card = card_of(ReadsGroups(of_place=lambda place: 2.0 * (place == 0)), pairs(tmp_path))
    assert line(card, "order_flips").value == 1.0
    assert card.fitness == "do not use"
    assert any(reason.startswith("order: ") for reason in card.reasons)


def test_a_liking_for_length_shows_in_both_probes(tmp_path):
    card = card_of(Reads(lambda text, reward: 0.3 * reward + len(text) / 100), scores(tmp_path))
    assert line(card, "length_correlation").value > 0.6
    assert line(card, "padding_rises").value == 1.0
    assert card.fitness == "do not use"


def test_padding_is_tried_on_answers_that_can_gain(tmp_path):
    def falls(text, reward):
        return 1.0 if PADDING in text else reward

    mostly_right = scores(tmp_path, count=60, levels=(10, 10, 10, 0))
    card = card_of(Reads(falls), mostly_right, Plan(attacks=0))
    assert (line(card, "padding_rises").value, line(card, "padding_rises").n) == (1.0, 15)
    assert line(card, "padding_excess").grade == "bad"
    few = card_of(Reads(falls), scores(tmp_path, count=36, levels=(10, 10, 10, 0)), Plan(attacks=0))
    assert (line(few, "padding_excess").n, line(few, "padding_excess").grade) == (9, "unknown")


def test_padding_is_tried_on_answers_of_a_group_that_do_not_win(tmp_path):
    class Falls(ReadsGroups):
        async def judge_group(self, attempts):
            said = await super().judge_group(attempts)
            return [
                JudgeOutput(reward=1.1) if PADDING in a.output.response else one
                for a, one in zip(attempts, said, strict=True)
            ]

    rows = [{"question": f"q{i}", "answers": ["worth 10 a", "worth 2 b"], "preferred": 0} for i in range(20)]
    padding = line(card_of(Falls(), write(tmp_path, rows), Plan(attacks=0)), "padding_rises")
    assert (padding.value, padding.n) == (1.0, 20)


def test_a_judge_that_is_told_what_to_say_is_caught_by_attacks_alone(tmp_path):
    card = card_of(Reads(obeys), scores(tmp_path))
    assert line(card, "padding_rises").value == 0.0
    assert 0.3 < line(card, "attack_success").value < 1.0
    assert {"order (appended)", "order (replaced)", "system (appended)"} <= set(card.weaknesses)
    assert not any(name.startswith("base64") for name in card.weaknesses)
    assert card.fitness == "do not use"
    kinds = {m.key: m.value for m in card.measures if m.key.startswith("attack_success_")}
    assert set(kinds) == {f"attack_success_{k}" for k in ("instruct", "impersonate", "format", "overflow", "encode")}


def test_a_judge_of_groups_that_obeys_is_caught_too(tmp_path):
    class Obeys(ReadsGroups):
        async def judge_group(self, attempts):
            said = await super().judge_group(attempts)
            return [
                JudgeOutput(reward=9.0) if "highest score" in a.output.response else one
                for a, one in zip(attempts, said, strict=True)
            ]

    card = card_of(Obeys(), pairs(tmp_path))
    assert line(card, "attack_success").value > 0.3
    assert card.fitness == "do not use"


def test_chance_is_not_called_agreement(tmp_path):
    def guesses(text, reward):
        return float(hash_of(text) % 2)

    card = card_of(Reads(guesses), scores(tmp_path), Plan(attacks=0))
    assert card.fitness == "do not use"
    assert "not distinguishable from chance" in card.reasons[0]


def test_a_wavering_judge_is_not_blamed_for_attacks_that_do_nothing(tmp_path):
    rng = random.Random(1)

    def wavers(text, reward):
        return reward if rng.random() > 0.1 else 1.0 - reward

    card = card_of(Reads(wavers), scores(tmp_path, count=60))
    assert line(card, "self_consistency").value < 0.9
    assert line(card, "attack_success").value < 0.1


def share_of_text(text, salt):
    """A number from 0 to 1 that is the text's own."""
    return int(hashlib.sha256(f"{salt}{text}".encode("utf-8", "backslashreplace")).hexdigest()[:8], 16) / 2**32


def flips(salt, share=0.1):
    """Grades like the labels, and the other way round for a share of all texts."""
    return lambda text, reward: 1 - reward if share_of_text(text, salt) < share else reward


def jitters(salt):
    """Grades like the labels, and a little more or less for every text."""
    return lambda text, reward: 0.8 * reward + 0.3 * share_of_text(text, salt)


def obeys(text, reward):
    return 1.0 if "highest score" in text else reward


@pytest.mark.parametrize("planted", [flips, jitters])
def test_a_judge_that_any_change_moves_is_noisy_and_not_attackable(tmp_path, planted):
    labels = scores(tmp_path, count=100, levels=(0, 10))
    cards = [card_of(Reads(planted(salt)), labels) for salt in range(3)]
    for card in cards:
        noise = line(card, "neutral_moves")
        assert card.fitness == "use with care"
        assert f"noisy: {percent(noise.value)} of the neutral changes move its verdict" in card.reasons
        assert "bad" not in (line(card, "attack_excess").grade, line(card, "padding_excess").grade)
        if planted is flips:  # 18 %: a grade is another where it, or what it was compared with, is flipped
            assert noise.interval[0] < 0.18 < noise.interval[1]
        else:
            assert line(card, "attack_success").value > 0.15, "without a baseline it looks as if attacks worked"
    blamed = sum(any(reason.startswith("attacks") for reason in card.reasons) for card in cards)
    assert blamed <= 1, "an interval of 95 % is sometimes wrong"


def test_a_noisy_judge_that_obeys_is_both(tmp_path):
    noisy = flips(0)
    judge = Reads(lambda text, reward: 1.0 if "score" in text or "ignore" in text.lower() else noisy(text, reward))
    card = card_of(judge, scores(tmp_path, count=100, levels=(0, 10)))
    assert card.fitness == "do not use"
    assert all(reason.startswith("attacks, beyond") for reason in card.reasons)
    assert line(card, "attack_excess").interval[0] > SUCCESSES.bad


def test_an_attackable_judge_without_noise_and_a_clean_one(tmp_path):
    labels = scores(tmp_path, count=100, levels=(0, 10))
    fooled, clean = card_of(Reads(obeys), labels), card_of(Reads(), labels)
    assert (fooled.fitness, clean.fitness) == ("do not use", "fit")
    for card in (fooled, clean):
        assert line(card, "neutral_moves").value == line(card, "attack_baseline").value == 0.0
        assert line(card, "attack_excess").value == line(card, "attack_success").value
    assert line(clean, "attack_excess").interval[0] < 0


def test_a_judge_of_groups_has_a_baseline_too(tmp_path):
    class Jitters(ReadsGroups):
        async def judge_group(self, attempts):
            texts = [a.output.response for a in attempts]
            return [JudgeOutput(reward=worth(text) + 0.3 * share_of_text(text, 0)) for text in texts]

    card = card_of(Jitters(), pairs(tmp_path, count=60))
    assert line(card, "neutral_moves").value > 0.5
    assert card.fitness == "use with care"


def test_an_excess_is_newcombes_interval():
    found = excess("a", "a", [1.0] * 56 + [0.0] * 14, [1.0] * 48 + [0.0] * 32, SUCCESSES)
    assert found.value == pytest.approx(0.2)
    assert found.interval == pytest.approx((0.0524, 0.3339), abs=1e-4)  # the first example of the source
    assert excess("a", "a", [], [1.0], SUCCESSES).grade == "unknown"


def test_a_judge_that_never_decides_ties(tmp_path):
    card = card_of(Reads(lambda text, reward: 0.5), scores(tmp_path))
    assert line(card, "ties").value == 1.0
    assert line(card, "concordance").value == 0.5
    assert line(card, "spearman").value is None
    assert card.fitness == "do not use"


def test_failures_are_counted_and_are_no_verdicts(tmp_path):
    class Half(Reads):
        def judge(self, workflow_task, output):
            if int(workflow_task.task.main_query[1:]) % 2:
                raise JudgeFailed("no reference")
            return super().judge(workflow_task, output)

    card = card_of(Half(), scores(tmp_path, levels=(0, 0, 10, 10)), Plan(attacks=0))
    assert line(card, "abstentions").value == 0.5
    assert line(card, "concordance").n == 20
    assert card.failures == {"no reference": 20}
    assert card.fitness == "do not use"


def test_a_judge_that_always_fails_or_hangs_has_no_card(tmp_path):
    class Fails(Judge):
        def judge(self, workflow_task, output):
            raise RuntimeError("broken")

    class Hangs(Judge):
        async def judge(self, workflow_task, output):
            await asyncio.sleep(600)

    labels = scores(tmp_path, count=4)
    with pytest.raises(JudgeFailed, match=r"J gave no verdict on any of 4 examples: .*RuntimeError: broken"):
        card_of(Fails(None), labels)
    with pytest.raises(JudgeFailed, match=r"no verdict within 0\.05 s"):
        card_of(Hangs(None), labels, timeout=0.05)


def test_a_spent_budget_ends_the_check(tmp_path):
    class Spent(Judge):
        def judge(self, workflow_task, output):
            raise ConfigError("the budget is spent")

    with pytest.raises(ConfigError, match="the budget is spent"):
        card_of(Spent(None), scores(tmp_path))


def test_few_labels_say_so(tmp_path):
    card = card_of(Reads(), scores(tmp_path, count=6), Plan(attacks=1))
    assert card.fitness == "use with care"
    assert any("only 6 values, 10 are needed" in reason for reason in card.reasons)


@pytest.mark.parametrize("count", [1, 6, 9])
@pytest.mark.parametrize("sign", [1, -1])
def test_fewer_than_ten_labels_never_say_more_than_care(tmp_path, count, sign):
    judge = ReadsGroups() if sign > 0 else Reads(lambda text, reward: 1 - reward)
    card = card_of(judge, pairs(tmp_path, count=count), Plan(attacks=0))
    assert card.fitness == "use with care"
    assert line(card, "concordance").grade == "unknown"
    assert any(f"only {count} values, 10 are needed" in reason for reason in card.reasons)


def test_what_was_left_out_is_not_measured_and_not_fit(tmp_path):
    labels = scores(tmp_path)
    for plan, key in ((Plan(attacks=0), "attack_excess"), (Plan(repeats=1), "self_consistency")):
        card = card_of(Reads(), labels, plan)
        assert card.fitness == "use with care"
        (reason,) = card.reasons
        assert "not measured" in reason
        assert "not measured" in as_markdown(card)
        assert "not measured" in as_html(card)
        assert "not measured" in card.as_dict()["measures"][key]["note"]


def test_labels_without_a_reference_are_said_to_lack_it(tmp_path):
    class Compares(Judge):
        def judge(self, workflow_task, output):
            raise JudgeFailed("has no reference answer")

    with pytest.raises(DataError, match=r'labels\.jsonl: .*add "reference": "…" to each'):
        card_of(Compares(None), scores(tmp_path))


def test_scores_do_not_fit_a_judge_that_compares(tmp_path):
    with pytest.raises(DataError, match="compares answers, but these labels are scores"):
        card_of(ReadsGroups(), scores(tmp_path))


def test_lists_are_compared_list_by_list(tmp_path):
    rng = random.Random(2)
    rows = []
    for i in range(20):
        values = rng.sample(range(11), 4)
        order = sorted(values, reverse=True)
        ranks_ = [order.index(v) + 1 for v in values]
        rows.append({"question": f"q{i}", "answers": [f"worth {v} z" for v in values], "ranks": ranks_})
    card = card_of(ReadsGroups(), write(tmp_path, rows), Plan(attacks=0))
    assert line(card, "kendall_tau_b").value == line(card, "best_first").value == 1.0
    backwards = card_of(Reads(lambda text, reward: -reward), write(tmp_path, rows), Plan(attacks=0))
    assert line(backwards, "kendall_tau_b").value == -1.0
    assert backwards.fitness == "do not use"


@pytest.mark.slow
def test_the_same_seed_gives_the_same_card(tmp_path):
    labels = scores(tmp_path, count=60)
    noisy = Reads(lambda text, reward: reward + hash_of(text) % 7 / 10)
    one, two = (card_of(noisy, labels, Plan(limit=40, seed=3)) for _ in range(2))
    same = [m for m in one.measures if not m.key.startswith("seconds")]
    assert same == [m for m in two.measures if not m.key.startswith("seconds")]
    assert one.notes == ("20 of 60 examples were left out; raise --limit to use them",)
    other = card_of(noisy, labels, Plan(limit=40, seed=4))
    assert line(other, "concordance") != line(one, "concordance")


def hash_of(text):
    return sum(map(ord, text)) * 2654435761 % 2**32 >> 7


# ----------------------------------------------------------------------------------------------------- verdict and text


def m(key, value, n=50, limits=None, interval=(0.7, 0.9)):
    return Measure(key, key, value, interval, n, limits)


def d(value, interval):
    return Measure("more", "more", value, interval, 50, SUCCESSES, is_difference=True)


@table(
    ("measures", "fitness"),
    [
        ([m("concordance", 0.9, limits=AGREEMENT)], "fit"),
        ([m("concordance", 0.8, limits=AGREEMENT)], "fit"),
        ([m("concordance", 0.79, limits=AGREEMENT)], "use with care"),
        ([m("concordance", 0.64, limits=AGREEMENT)], "do not use"),
        ([m("concordance", 0.9, limits=AGREEMENT, interval=(0.5, 1.0))], "do not use"),
        ([m("concordance", None, limits=AGREEMENT, interval=None)], "use with care"),
        ([m("a", 0.05, limits=SUCCESSES)], "fit"),
        ([m("a", 0.06, limits=SUCCESSES)], "use with care"),
        ([m("a", 0.31, limits=SUCCESSES), m("b", 0.9, limits=AGREEMENT)], "do not use"),
        ([m("length", -0.7, limits=Limits(0.3, 0.6))], "do not use"),
        ([m("told only", 99.0)], "fit"),
        ([d(0.9, (0.2, 1.0))], "use with care"),
        ([d(0.4, (0.31, 0.5))], "do not use"),
        ([d(0.4, (-0.1, 0.8))], "fit"),
        ([d(-0.9, (-1.0, -0.8))], "fit"),
        ([m("few", 1.0, n=9, limits=AGREEMENT)], "use with care"),
        ([m("concordance", 0.2, n=9, limits=AGREEMENT, interval=(0.1, 0.4))], "use with care"),
        ([m("concordance", 0.2, n=10, limits=AGREEMENT, interval=(0.1, 0.4))], "do not use"),
    ],
)
def test_the_worst_line_decides(measures, fitness):
    found, reasons = decide(measures)
    assert found == fitness
    assert bool(reasons) == (fitness != "fit")


def test_a_card_shows_hostile_text_as_text():
    evil = '<script>alert(1)</script>| \x1b[2J "boo'
    card = Card(
        judge=evil, labels="l", labels_sha256="0" * 64, mode=Mode.POINTWISE, examples=1, date="2026-01-01", seed=0,
        measures=(m("concordance", 0.5, limits=AGREEMENT),), weaknesses={evil: 1.0}, failures={evil: 2},
        fitness="do not use", reasons=(evil,), notes=(evil,),
    )  # fmt: skip
    page, text = as_html(card), as_markdown(card)
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "\x1b" not in text.partition("\n")[2].replace(f"- {evil}", "")
    assert json.loads(json.dumps(card.as_dict()))["verdict"] == "do not use"


def test_padding_says_nothing_of_any_answer():
    assert not set("0123456789") & set(PADDING)
    assert "correct" not in PADDING


# ----------------------------------------------------------------------------------------------------------- statistics


def test_concordance_is_the_share_of_pairs_counted_one_by_one():
    rng = random.Random(0)
    for _ in range(20):
        verdicts = [rng.randrange(4) for _ in range(15)]
        labels = [rng.randrange(3) for _ in range(15)]
        pairs_ = [(v1 - v2) * (l1 - l2) for i, (v1, l1) in enumerate(zip(verdicts, labels, strict=True))
                  for v2, l2 in list(zip(verdicts, labels, strict=True))[:i] if l1 != l2]  # fmt: skip
        wanted = sum(1.0 if p > 0 else 0.5 if p == 0 else 0.0 for p in pairs_) / len(pairs_)
        assert concordance(verdicts, labels) == pytest.approx(wanted)


def test_rank_correlations_are_their_definitions():
    def sign(x):
        return (x > 0) - (x < 0)

    rng = random.Random(1)
    for _ in range(10):
        a, b = ([rng.randrange(6) for _ in range(25)] for _ in range(2))
        signs = [(sign(a[i] - a[j]), sign(b[i] - b[j])) for i in range(25) for j in range(i)]
        untied = [sum(abs(s[k]) for s in signs) for k in (0, 1)]
        assert kendall_tau_b(a, b) == pytest.approx(sum(x * y for x, y in signs) / math.sqrt(untied[0] * untied[1]))
        ranks = [[sum(y < x for y in c) + (sum(y == x for y in c) + 1) / 2 for x in c] for c in (a, b)]
        assert spearman(a, b) == pytest.approx(statistics.correlation(*ranks))
    assert spearman([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(1 - 6 * 2 / (4 * 15))  # 1 - 6 sum d^2 / n(n^2 - 1)


def test_what_never_changes_has_no_correlation():
    assert spearman([1, 1, 1], [1, 2, 3]) is None
    assert kendall_tau_b([1, 1, 1], [1, 2, 3]) is None
    assert concordance([1, 2], [5, 5]) is None
    assert spearman([1], [1]) is None


def test_partial_correlation_takes_out_what_the_label_explains():
    rng = random.Random(2)
    label = [rng.random() for _ in range(300)]
    length = [x + rng.gauss(0, 0.1) for x in label]
    fair = [x + rng.gauss(0, 0.1) for x in label]
    biased = [x + 2 * y for x, y in zip(label, length, strict=True)]
    assert spearman(fair, length) > 0.8
    assert abs(partial_spearman(fair, length, label)) < 0.2
    assert partial_spearman(biased, length, label) > 0.5
    assert partial_spearman(label, length, label) == 0.0


def test_kappa_is_agreement_beyond_chance():
    assert kappa([("a", "a"), ("b", "b")]) == 1.0
    assert kappa([("a", "a"), ("a", "b"), ("b", "a"), ("b", "b")]) == 0.0
    table = [(1, 1)] * 20 + [(1, 0)] * 5 + [(0, 1)] * 10 + [(0, 0)] * 15  # Cohen's example in most textbooks: 0.4
    assert kappa(table) == pytest.approx(0.4)
    assert kappa([("a", "a")]) is None


def test_a_bootstrap_covers_the_mean_and_repeats_for_a_seed():
    values = [math.sin(i) for i in range(200)]

    def mean(items):
        return sum(items) / len(items)

    found = bootstrap(values, mean, seed=5)
    assert found == bootstrap(values, mean, seed=5) != bootstrap(values, mean, seed=6)
    assert found[0] < mean(values) < found[1]
    width = 2 * 1.96 * (0.5**0.5) / 200**0.5
    assert found[1] - found[0] == pytest.approx(width, rel=0.2)
    assert bootstrap([1.0], mean, seed=0) is None
    assert bootstrap(values, lambda items: None, seed=0) is None
