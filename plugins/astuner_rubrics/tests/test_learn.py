"""Learning rubrics: what is known to be there is found, and what cannot be learned is refused in words."""

import asyncio
import json
import math
from collections import Counter

import pytest

from astuner.contracts.errors import DataError
from astuner.testing import ScriptedModel
from astuner_helpers import HelperFailed, HelperModels
from astuner_helpers.settings import HelperModel
from astuner_rubrics.agreement import Rule, agreement
from astuner_rubrics.grading import Grader, median_of, overall, shown_order
from astuner_rubrics.labels import Mode, read_labels
from astuner_rubrics.learning import (
    Journal,
    NotLearned,
    Settings,
    contradictions,
    for_each,
    learn,
    objections,
    rule_of,
    split,
)
from astuner_rubrics.selection import coding_rate, gram, gram_of_words, most_diverse, select
from tests.table import table

from .true_rubric import TrueRubric, named

WEIGHTS = {"source": 4, "example": 2, "polite": 1}
SCORES = {"source": 2, "example": 1, "polite": 1}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("ASTUNER_HOME", str(tmp_path / "home"))


def labels_of(folder, rows):
    folder.mkdir(exist_ok=True)
    path = folder / "samples.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return read_labels(path)


def journal_at(folder, server, **section):
    section = HelperModel(base_url=server.base_url, model="scripted", max_retries=1, **{"cache": False, **section})
    return Journal(folder / "journal.jsonl", HelperModels.one(section, scope=folder).get("helper", where="test"))


def learned(folder, script, rows, settings=None, embed=False):
    labels = labels_of(folder, rows)
    with ScriptedModel(script) as server:
        journal = journal_at(folder, server)
        said = []
        vectors = journal if embed else None
        return asyncio.run(learn(labels, settings or Settings(), journal, vectors, said.append)), server.requests


def on_new_answers(rubrics, weights, mode, seed):
    """The agreement of the rubrics, read without noise, with the truth on answers that nobody has seen."""
    world = TrueRubric(weights, seed=10_000 + seed, mode=mode)
    right = []
    for row in world.samples(200):
        grades = tuple(tuple(world.grade(r.text, answer, 0, 10) for answer in row["answers"]) for r in rubrics.rubrics)
        a, b = overall(grades, [r.weight for r in rubrics.rubrics])
        right.append((a > b) == (row["preferred"] == 0) and a != b)
    return sum(right) / len(right)


# ------------------------------------------------------------------------------------------------------- what is found


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_known_rubric_is_recovered_through_a_helper_that_is_wrong_one_time_in_ten(tmp_path, seed):
    """One grading in ten says the opposite, one proposal in ten is something else; three votes make up for it."""
    world = TrueRubric(WEIGHTS, noise=0.1, seed=seed)
    result, _ = learned(tmp_path, world, world.samples(140), Settings(votes=3, held_out=0.4, seed=seed))
    assert result.held_out.n >= 50
    assert result.held_out.share >= 0.9
    assert result.held_out.is_beyond_chance
    assert on_new_answers(result.rubrics, WEIGHTS, "pairwise", seed) >= 0.9
    assert result.objections == ()
    found = Counter()
    for rubric in result.rubrics.rubrics:
        for name in named(rubric.text):
            found[name] += rubric.weight
    assert [name for name, _ in found.most_common(2)] == ["source", "example"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_is_recovered_when_one_in_ten_of_all_single_grades_is_the_opposite(tmp_path, seed):
    """Both answers' grades of all criteria err, each for itself; five votes, of which the median counts, stand it."""
    world = TrueRubric(WEIGHTS, grade_noise=0.1, seed=seed)
    result, _ = learned(tmp_path, world, world.samples(140), Settings(votes=5, held_out=0.4, seed=seed))
    assert result.held_out.share >= 0.95
    assert on_new_answers(result.rubrics, WEIGHTS, "pairwise", seed) >= 0.95


def test_of_three_votes_one_that_is_far_off_moves_nothing():
    assert median_of([((1.0, 9.0),), ((2.0, 8.0),), ((10.0, 0.0),)]) == ((2.0, 8.0),)
    assert median_of([((1.0, 9.0),), ((2.0, 8.0),)]) == ((1.5, 8.5),), "two votes, of two orders, weigh the same"


def test_a_helper_that_does_not_read_criteria_teaches_nothing(tmp_path):
    """The counter-proof: the same proposals, graded whatever they say, agree with nothing."""
    world = TrueRubric(WEIGHTS)

    def careless(body):
        said = world(body)
        for row in said.get("grades", []):
            row["grades"] = [5.0] * len(row["grades"])
        return said

    with pytest.raises(NotLearned, match="no criterion gave any of the 28 examples its label after 3 revisions each"):
        learned(tmp_path, careless, world.samples(40))


def test_scores_are_learned_with_their_weights(tmp_path):
    world = TrueRubric(SCORES, mode="pointwise")
    result, _ = learned(tmp_path, world, world.samples(40))
    assert result.held_out.share == 1.0
    assert result.rubrics.scale == (0.0, 4.0)
    weights = Counter()
    for rubric in result.rubrics.rubrics:
        for name in named(rubric.text):
            weights[name] += rubric.weight
    assert weights["source"] == 2 * weights["example"] == 2 * weights["polite"] > 0
    assert set(weights) == set(SCORES)


def test_orders_are_learned_and_embeddings_may_say_what_is_alike(tmp_path):
    world = TrueRubric(WEIGHTS, mode="listwise")
    result, requests = learned(tmp_path, world, world.samples(30), embed=True)
    assert result.held_out.share >= 0.9
    assert result.rubrics.mode is Mode.LISTWISE
    assert any("input" in body for body in requests)


def test_ties_are_learned_with_room_for_them(tmp_path):
    world = TrueRubric({"source": 1}, seed=3)
    result, _ = learned(tmp_path, world, world.samples(40, ties=True))
    assert result.rubrics.tie == 0.5
    assert result.held_out.share == 1.0


def test_themes_merge_criteria_and_keep_weights_and_origins(tmp_path):
    world = TrueRubric(WEIGHTS, seed=1)
    rows = world.samples(40)
    plain, _ = learned(tmp_path / "plain", world, rows)
    result, _ = learned(tmp_path / "themes", TrueRubric(WEIGHTS, seed=1), rows, Settings(themes=3))
    assert len(plain.rubrics.rubrics) > 3 >= len(result.rubrics.rubrics)
    assert sum(r.weight for r in result.rubrics.rubrics) == sum(r.weight for r in plain.rubrics.rubrics)
    origins = [{place for r in one.rubrics.rubrics for place in r.samples} for one in (plain, result)]
    assert origins[0] == origins[1]
    assert all(r.tips for r in result.rubrics.rubrics if "All of this" in r.criterion)
    assert result.held_out.is_beyond_chance


def test_what_is_held_out_is_only_measured(tmp_path):
    world = TrueRubric(WEIGHTS)
    result, requests = learned(tmp_path, world, world.samples(30))
    held = set(result.rubrics.learned.held_out)
    assert len(held) == result.held_out.n == 9
    assert not held & {s for r in result.rubrics.rubrics for s in r.samples}
    labels = read_labels(tmp_path / "samples.jsonl")
    towns = [s.question for s in labels.samples if s.place in held]
    contents = [body["messages"][-1]["content"] for body in requests]
    for town in towns:
        about = [i for i, content in enumerate(contents) if town in content]
        assert len(about) == 1, "a held-out example was asked about more than once"
        assert about[0] >= len(contents) - len(held), "and before the rubrics were final"


def test_the_grader_is_never_shown_the_label(tmp_path):
    world = TrueRubric(WEIGHTS)
    _, requests = learned(tmp_path, world, world.samples(20))
    grading = [b for b in requests if "You grade answers" in b["messages"][0]["content"]]
    assert grading
    assert not [b for b in grading if "verdict:" in b["messages"][1]["content"]]
    systems = {b["messages"][0]["content"] for b in requests}
    assert len(systems) == 2, "the system messages hold nothing of the examples"


def test_a_proposal_that_fails_is_revised_with_what_was_expected_and_what_came(tmp_path):
    world = TrueRubric({"source": 1})
    asked = []

    def stubborn(body):
        content = body["messages"][-1]["content"]
        if "Their verdict" in content and "CRITERIA SO FAR" not in content:
            return {"criteria": [{"criterion": "The answer is laid out as a list.", "weight": 1}]}
        if "CRITERIA SO FAR" in content:
            asked.append(content)
        return world(body)

    result, _ = learned(tmp_path, stubborn, world.samples(20))
    assert asked
    assert all("the answers got: ANSWER" in content for content in asked)
    assert all("| 1. The answer is laid out as a list." in content for content in asked)
    assert {name for r in result.rubrics.rubrics for name in named(r.text)} == {"source"}


# ----------------------------------------------------------------------------------------------------- what is refused


def test_too_few_examples_are_refused_with_how_many_more(tmp_path):
    world = TrueRubric(WEIGHTS)

    def nobody(body):
        raise AssertionError("nobody is asked")

    with pytest.raises(NotLearned, match="add 5 more: 4 must be held out"):
        learned(tmp_path, nobody, world.samples(9))
    with pytest.raises(NotLearned, match="add 13 more"):
        learned(tmp_path, nobody, world.samples(1))
    with pytest.raises(NotLearned, match="1 examples cannot be split"):
        learned(tmp_path, nobody, world.samples(1), Settings(force=True))
    labels = labels_of(tmp_path, world.samples(14))
    assert objections(labels, rule_of(labels, Settings()), Settings()) == []


@table(
    ("row", "says"),
    [
        ({"answer": "a {}", "score": 3}, "all 20 labels are the same \\(3\\)"),
        ({"answers": ["a {}", "b {}"], "preferred": "tie"}, "all 20 labels are ties"),
        ({"answers": ["a {}", "b {}"], "ranks": [1, 1]}, "all 20 labels are ties"),
    ],
)
def test_labels_that_are_all_the_same_are_refused(tmp_path, row, says):
    rows = [{"question": f"q{i}", **json.loads(json.dumps(row).replace("{}", str(i)))} for i in range(20)]
    with pytest.raises(NotLearned, match=says):
        learned(tmp_path, lambda body: "", rows, Settings(force=True))


def test_opposite_labels_of_the_same_answers_are_refused_with_their_lines(tmp_path):
    rows = TrueRubric(WEIGHTS).samples(20)
    turned = {**rows[4], "answers": rows[4]["answers"][::-1]}  # the same preference would be the other index
    with pytest.raises(NotLearned, match=r"contradict each other: samples\.jsonl:5 and samples\.jsonl:21"):
        learned(tmp_path, lambda body: "", [*rows, turned])


def test_scores_contradict_when_they_are_half_the_scale_apart(tmp_path):
    rows = [{"question": "q", "answer": "a", "score": s} for s in (1, 2, 3, 5)]
    labels = labels_of(tmp_path, rows)
    found = contradictions(labels.samples, rule_of(labels, Settings()))
    assert found == [("samples.jsonl:1", "samples.jsonl:3"), ("samples.jsonl:1", "samples.jsonl:4"),
                     ("samples.jsonl:2", "samples.jsonl:4"), ("samples.jsonl:3", "samples.jsonl:4")]  # fmt: skip


def test_examples_that_are_judged_by_opposite_rubrics_are_refused_with_the_pairs(tmp_path):
    """Half of the examples want a source, half want none: no pair of lines contradicts, and no rubric fits both."""
    world = TrueRubric({"source": 1})
    rows = world.samples(40)
    for row in rows[::2]:
        row["preferred"] = 1 - row["preferred"]

    def torn(body):
        said = world(body)
        if "criteria" in said:
            content = body["messages"][-1]["content"]
            wants = content.index("ANSWER 2 is better") if "ANSWER 2 is better" in content else -1
            better = content.partition("BEGIN ANSWER 2" if wants >= 0 else "BEGIN ANSWER 1")[2].partition("END ")[0]
            does = "names a source for what it claims" if "Source:" in better else "does not do this: it names a source"
            return {"criteria": [{"criterion": f"The answer {does}.", "weight": 1}]}
        return said

    result, _ = learned(tmp_path, torn, rows)
    text = "\n".join(result.objections)
    assert "the examples contradict each other" in text
    assert "judge each other wrongly: samples.jsonl:" in text
    assert "'The answer names a source for what it claims.'" in text
    assert "not distinguishable from chance" in text


# ------------------------------------------------------------------------------------------------- helpers that fail


class Killed(Exception):
    pass


def test_learning_goes_on_where_it_was_stopped_and_asks_nothing_twice(tmp_path):
    world = TrueRubric(WEIGHTS, noise=0.1, steady=True)  # what was on its way when it died is asked again
    rows = world.samples(30)
    whole, requests = learned(tmp_path / "whole", TrueRubric(WEIGHTS, noise=0.1, steady=True), rows)

    labels = labels_of(tmp_path / "cut", rows)
    with ScriptedModel(world) as server:
        for stop_after in (7, 40, 1000):
            journal = journal_at(tmp_path / "cut", server, concurrency=1, cache=True)
            ask, left = journal._helper.ask, iter(range(stop_after))

            async def dying(*args, ask=ask, left=left, **kwargs):
                if next(left, None) is None:
                    raise Killed
                return await ask(*args, **kwargs)

            journal._helper.ask = dying
            try:
                result = asyncio.run(learn(labels, Settings(), journal, None, lambda line: None))
            except Killed:
                with journal.path.open("ab") as file:
                    file.write(b'{"key": "cut off in the mid')  # as a crash would leave it
        assert len(server.requests) <= len(requests) + 2  # what was on its way when it died
    assert result.rubrics.rubrics == whole.rubrics.rubrics
    assert result.held_out == whole.held_out
    assert journal.spent["remembered"] >= 30


def test_a_journal_that_is_none_is_refused(tmp_path):
    (tmp_path / "journal.jsonl").write_text('{"some": "thing"}\n')
    with ScriptedModel(lambda body: "") as server, pytest.raises(DataError, match=r"journal\.jsonl:1: .*journal"):
        journal_at(tmp_path, server)


def test_a_helper_that_is_down_ends_learning_and_says_so(tmp_path):
    rows = TrueRubric(WEIGHTS).samples(20)
    says = r"proposing criteria .*: the helper model cannot be used .*; stopped after 0 of 10 answers and 2 failures"
    with pytest.raises(HelperFailed, match=says):
        learned(tmp_path, lambda body: (400, {"error": {"message": "down"}}), rows)


def test_one_example_that_the_helper_cannot_do_is_left_out(tmp_path):
    world = TrueRubric(WEIGHTS)
    rows = world.samples(30)
    bad = rows[3]["question"]

    def script(body):
        return (400, {"error": {"message": "no"}}) if bad in body["messages"][-1]["content"] else world(body)

    result, _ = learned(tmp_path, script, rows)
    assert result.train.n + result.held_out.n == 29
    assert result.held_out.share >= 0.8


def test_when_one_question_ends_everything_nothing_goes_on(tmp_path):
    running = []

    async def work(item):
        if item == 0:
            await asyncio.sleep(0.01)
            raise ZeroDivisionError
        running.append(item)
        try:
            await asyncio.sleep(60)
        finally:
            running.remove(item)

    async def all_of_it():
        with pytest.raises(ZeroDivisionError):
            await for_each(range(5), work, what="working", say=lambda line: None)
        return list(running)

    assert asyncio.run(all_of_it()) == []


# ------------------------------------------------------------------------------------------------------------ the parts


def test_questions_do_not_stand_on_both_sides_of_the_split(tmp_path):
    rows = [{"question": f"q{i // 3}", "answers": [f"a{i}", f"b{i}"], "preferred": i % 2} for i in range(30)]
    labels = labels_of(tmp_path, rows)
    train, held_out = split(labels.samples, 0.3, seed=1)
    assert {s.question for s in train}.isdisjoint(s.question for s in held_out)
    assert 6 <= len(held_out) <= 12
    assert split(labels.samples, 0.3, seed=1) == (train, held_out)
    assert split(labels.samples, 0.3, seed=2) != (train, held_out)
    one_question = labels_of(tmp_path, [{**row, "question": "q"} for row in rows])
    assert len(split(one_question.samples, 0.3, seed=1)[1]) == 9


def test_every_vote_shows_the_answers_in_another_order():
    first, second = (shown_order("q", ["a", "b"], vote) for vote in (0, 1))
    assert first == second[::-1]
    assert len({tuple(shown_order("q", list("abcd"), vote)) for vote in range(6)}) == 6
    texts = ["x", "y", "z"]
    shown = [texts[i] for i in shown_order("q", texts, 0)]
    turned = [texts[::-1][i] for i in shown_order("q", texts[::-1], 0)]
    assert shown == turned, "the order given, in which the better one may always be first, does not show"


def test_grades_come_back_to_the_answers_they_were_given_for():
    async def ask(messages, *, purpose, answer, sample):
        texts = messages[1]["content"].split("| answer-")[1:]
        grades = [float(text[0]) for text in texts]
        return answer.model_validate({"grades": [{"criterion": 1, "reason": "", "grades": grades}]})

    grader = Grader(ask, 0.0, 9.0)
    for vote in range(4):
        found = asyncio.run(grader.grade("q", ["answer-3", "answer-9", "answer-1"], ["c"], purpose="p", vote=vote))
        assert found == ((3.0, 9.0, 1.0),)


@table(
    "grades",
    [
        [],
        [{"criterion": 1, "reason": "", "grades": [1.0]}],
        [{"criterion": 2, "reason": "", "grades": [1.0, 2.0]}],
        [{"criterion": 1, "reason": "", "grades": [1.0, 2.0]}] * 2,
        [{"criterion": 1, "reason": "", "grades": [1.0, "high"]}],
        [{"criterion": 1, "reason": "", "grades": [1.0, 10.5]}],
        [{"criterion": 1, "reason": "", "grades": [-0.5, 1.0]}],
        [{"criterion": 1, "reason": "", "grades": [1.0, "nan"]}],
    ],
)
def test_grades_that_are_not_whole_are_no_grades(tmp_path, grades):
    with ScriptedModel(lambda body: {"grades": grades}) as server:
        grader = Grader(journal_at(tmp_path, server).ask, 0, 10)
        with pytest.raises(HelperFailed):
            asyncio.run(grader.grade("q", ["a", "b"], ["c"], purpose="p"))
        assert len(server.requests) == 2


def test_a_grade_outside_of_the_scale_is_asked_for_again(tmp_path):
    replies = iter([[100.0, 2.0], [4.0, 2.0], [11.0, 2.0], [-1.0, 2.0]])
    with ScriptedModel(lambda body: {"grades": [{"criterion": 1, "reason": "", "grades": next(replies)}]}) as server:
        grader = Grader(journal_at(tmp_path, server).ask, 0, 10)
        assert asyncio.run(grader.grade("q", ["a", "b"], ["c"], purpose="p")) in (((4.0, 2.0),), ((2.0, 4.0),))
        assert len(server.requests) == 2
        assert "from 0 (does not meet it at all) to 10" in server.requests[0]["messages"][1]["content"]
        with pytest.raises(HelperFailed, match="the scale is 0 to 10"):
            asyncio.run(grader.grade("q", ["a", "b"], ["other"], purpose="p"))


def test_another_helper_is_not_answered_from_the_journal(tmp_path):
    def asked(server, **section):
        journal = journal_at(tmp_path, server, **section)
        asyncio.run(Grader(journal.ask, 0, 10).grade("q", ["a"], ["c"], purpose="p"))
        return journal.spent["asked"]

    with ScriptedModel(lambda body: {"grades": [{"criterion": 1, "reason": "", "grades": [1]}]}) as server:
        others = [{}, {"temperature": 0.7}, {"max_tokens": 99}, {"extra": {"top_p": 0.5}}, {"structured": "none"}]
        assert [asked(server, **other) for other in others] == [1] * 5
        assert [asked(server, **other) for other in others] == [0] * 5
        with ScriptedModel(lambda body: {"grades": [{"criterion": 1, "reason": "", "grades": [2]}]}) as elsewhere:
            assert asked(elsewhere) == 1


def test_the_coding_rate_is_that_of_the_paper():
    """Against the formula written out with a determinant: R = 1/2 log det(I + d / (n eps^2) Z Z^T)."""
    vectors = [[1.0, 0.0], [0.6, 0.8], [0.0, 2.0]]
    units = [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]
    a = 2 / (3 * 0.25)
    zz = [[sum(u[i] * u[j] for u in units) for j in range(2)] for i in range(2)]
    det = (1 + a * zz[0][0]) * (1 + a * zz[1][1]) - (a * zz[0][1]) ** 2
    assert coding_rate(gram(vectors), [0, 1, 2], dimensions=2) == pytest.approx(0.5 * math.log(det))
    assert coding_rate(gram(vectors), [], dimensions=2) == 0.0


def test_the_most_diverse_criteria_are_those_that_say_different_things():
    texts = ["names a source", "names a good source", "is polite", "names the source", "gives an example"]
    assert sorted(most_diverse(gram_of_words(texts), 3, dimensions=64))[-2:] == [2, 4]
    with pytest.raises(ValueError, match="zero"):
        gram([[0.0, 0.0]])


def test_selection_weighs_criteria_and_leaves_out_those_that_add_nothing(tmp_path):
    """Two criteria decide, 2 : 1; a copy of one and one that says nothing are there too."""
    rows = [(a, b) for a in (0, 1) for b in (0, 1)]
    pairs = [(x, y) for x in rows for y in rows if 2 * x[0] + x[1] > 2 * y[0] + y[1]]
    labels = labels_of(
        tmp_path, [{"question": f"q{i}", "answers": [f"a{i}", f"b{i}"], "preferred": 0} for i in range(len(pairs))]
    )
    rule = Rule.of(Mode.PAIRWISE, labels.samples, (0, 10))
    grades = [(*(tuple(10.0 * answer[k] for answer in pair) for k in (0, 1)), (5.0, 5.0)) for pair in pairs]
    cosines = gram_of_words(["one thing", "other matter", "nothing at all"])
    found = select(rule, labels.samples, grades, cosines, 64, 10)
    assert set(found) == {0, 1}
    assert found[0] > found[1]
    said = [overall(row[:2], [found[0], found[1]]) for row in grades]
    assert agreement(rule, labels.samples, said).share == 1.0
