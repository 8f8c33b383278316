"""Labelled examples: their layouts, and what is said of lines that are none."""

import json

import pytest

from astuner.contracts.errors import DataError
from astuner.contracts.statistics import wilson_interval
from astuner_rubrics.agreement import Rule, agreement, fewest
from astuner_rubrics.labels import MAX_BYTES, Mode, Sample, read_labels
from tests.table import table


def write(path, *rows):
    path.write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in rows))
    return path


@pytest.fixture
def file(tmp_path):
    return tmp_path / "labels.jsonl"


def sample(*worth, answers=None):
    return Sample("f:1", "q", answers or tuple(f"a{i}" for i in range(len(worth))), tuple(map(float, worth)))


@table(
    ("row", "mode", "answers", "worth"),
    [
        ({"question": "q", "answer": "a", "score": 3}, Mode.POINTWISE, ("a",), (3.0,)),
        ({"query": "q", "response": "a", "label": True}, Mode.POINTWISE, ("a",), (1.0,)),
        ({"main_query": "q", "metadata": {"answer": "a", "score": 0.5}}, Mode.POINTWISE, ("a",), (0.5,)),
        ({"prompt": "q", "answers": ["a", "b"], "preferred": 1}, Mode.PAIRWISE, ("a", "b"), (0.0, 1.0)),
        ({"question": "q", "responses": ["a", "b"], "winner": "tie"}, Mode.PAIRWISE, ("a", "b"), (0.5, 0.5)),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, Mode.PAIRWISE, ("a", "b"), (1.0, 0.0)),
        ({"question": "q", "answers": ["a", "b", "c"], "ranks": [2, 1, 2]}, Mode.LISTWISE, tuple("abc"), (-2, -1, -2)),
        (
            {"main_query": "q", "metadata": {"candidates": [{"answer": "a", "rank": 2}, {"answer": "b", "rank": 1}]}},
            Mode.LISTWISE, ("a", "b"), (-2.0, -1.0),
        ),
    ],
)  # fmt: skip
def test_layouts(file, row, mode, answers, worth):
    labels = read_labels(write(file, row))
    assert labels.mode is mode
    (only,) = labels.samples
    assert (only.question, only.answers, only.worth, only.place) == ("q", answers, worth, "labels.jsonl:1")


@table(
    ("row", "says"),
    [
        (b"{", "Expecting property name"),
        (b"[1]", "not an object"),
        (b"\xff{}", "not UTF-8"),
        ({"answer": "a", "score": 1}, "question is missing"),
        ({"question": " ", "answer": "a", "score": 1}, "question is empty"),
        ({"question": "q", "score": 1}, "answers are missing"),
        ({"question": "q", "answer": "a"}, "answer has no score"),
        ({"question": "q", "answer": 3, "score": 1}, "answer must be a text, not a number"),
        ({"question": "q", "answer": "a", "score": "5"}, "score must be a number, not a text"),
        ({"question": "q", "answer": "a", "score": 10**400}, "must be a finite number"),
        ({"question": "q", "answer": "a", "score": 1, "rating": 2}, "score and rating have the same meaning"),
        ({"question": "q", "answers": ["a"], "preferred": 0}, "1 answers cannot be compared"),
        ({"question": "q", "answers": ["a", " a "], "preferred": 0}, "are identical"),
        ({"question": "q", "answers": ["a", "b"], "preferred": 2}, 'preferred must be 0, 1 or "tie", not 2'),
        ({"question": "q", "answers": ["a", "b"], "preferred": True}, "not true"),
        ({"question": "q", "answers": ["a", "b", "c"], "preferred": 0}, "use ranks for more"),
        ({"question": "q", "answers": ["a", "b"], "ranks": [1]}, "one rank for each of the 2 answers, not 1"),
        ({"question": "q", "answers": ["a", "b"]}, "preferred or ranks are missing"),
        ({"question": "q", "chosen": "a"}, "chosen and rejected are both required"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(file, row, says):
    good = {"question": "q", "answer": "a", "score": 1}
    with pytest.raises(DataError, match=r"labels\.jsonl:2: ") as e:
        read_labels(write(file, good, row))
    assert says in str(e.value)


def test_all_bad_lines_are_named_up_to_ten(file):
    with pytest.raises(DataError) as e:
        read_labels(write(file, *[{"question": "q"}] * 12))
    assert str(e.value).count("labels.jsonl:") == 10
    assert "and 2 more" in str(e.value)


def test_empty_missing_and_enormous_files(file, tmp_path):
    file.write_text("\n\n")
    with pytest.raises(DataError, match="no examples"):
        read_labels(file)
    with pytest.raises(DataError, match="cannot read the file: No such file"):
        read_labels(tmp_path / "nothing")
    with pytest.raises(DataError, match="cannot read the file"):
        read_labels(tmp_path)
    with file.open("wb") as f:
        f.truncate(MAX_BYTES + 1)
    with pytest.raises(DataError, match="exceed the limit of 64 MiB"):
        read_labels(file)


def test_mixed_files_are_refused_with_the_reason(file):
    rows = [{"question": "q", "answer": "a", "score": 1}] * 2 + [{"question": "q", "chosen": "a", "rejected": "b"}]
    with pytest.raises(DataError, match=r"2 pointwise \(first labels.jsonl:1\), 1 pairwise \(first labels.jsonl:3\)"):
        read_labels(write(file, *rows))


def test_a_repeated_example_counts_once_whatever_its_order(file):
    rows = [
        {"question": "q", "answers": ["a", "b"], "preferred": 0},
        {"question": " q", "answers": ["b", "a\n"], "preferred": 1},
        {"question": "q", "answers": ["a", "b"], "preferred": 1},  # says the opposite: no repetition
    ]
    labels = read_labels(write(file, *rows))
    assert labels.repeated == ("labels.jsonl:2",)
    assert [s.place for s in labels.samples] == ["labels.jsonl:1", "labels.jsonl:3"]


def test_a_reference_and_metadata_are_kept_and_a_byte_order_mark_is_not(file):
    row = {"question": "q", "answer": "a", "score": 1, "gold": "4", "metadata": {"level": 2}}
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(row).encode())
    (only,) = read_labels(file).samples
    assert (only.reference, only.metadata) == ("4", {"level": 2})


# ----------------------------------------------------------------------------------------------------------- agreement


def test_a_score_agrees_when_no_other_label_is_nearer():
    rule = Rule.of(Mode.POINTWISE, [sample(1), sample(2), sample(5)], (1, 5))
    assert rule.near == 0.5
    assert rule.is_right((2.0,), (2.4,))
    assert not rule.is_right((2.0,), (2.5,))
    assert rule.is_wrong((1.0,), (3.0,))
    assert not rule.is_wrong((1.0,), (2.5,))


def test_an_order_agrees_pair_by_pair_and_ties_have_room_only_if_labels_tie():
    strict = Rule.of(Mode.LISTWISE, [sample(3, 2, 1)], (0, 10))
    assert strict.is_right((3, 2, 1), (9.0, 8.9, 1.0))
    assert strict.parts((3, 2, 1), (9.0, 9.0, 10.0)) == (0.5, 0.0, 0.0)
    tied = Rule.of(Mode.PAIRWISE, [sample(0.5, 0.5), sample(1, 0)], (0, 10))
    assert tied.is_right((0.5, 0.5), (5.0, 5.5))
    assert tied.is_wrong((0.5, 0.5), (5.0, 5.6))
    assert not tied.is_right((1, 0), (5.5, 5.0))


def test_the_interval_counts_examples_and_chance_is_the_best_guess():
    rule = Rule.of(Mode.POINTWISE, [sample(0), sample(1)], (0, 1))
    samples = [sample(0)] * 7 + [sample(1)] * 3
    found = agreement(rule, samples, [(0.0,)] * 10)
    assert (found.share, found.chance, found.n) == (0.7, 0.7, 10)
    assert not found.is_beyond_chance
    assert agreement(rule, samples, [s.worth for s in samples]).share == 1.0
    lists = [sample(3, 2, 1)] * 4
    assert agreement(Rule.of(Mode.LISTWISE, lists, (0, 10)), lists, [(3.0, 2.0, 1.0)] * 4).n == 4


def test_the_fewest_examples_are_those_whose_interval_can_leave_chance():
    for level in (0.3, 0.5, 0.8):
        n = fewest(level)
        assert wilson_interval(n, n)[0] > level
    assert wilson_interval(fewest(0.8) - 1, fewest(0.8) - 1)[0] <= 0.8
