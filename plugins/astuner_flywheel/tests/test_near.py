"""Near-duplicates: what counts as one, what does not, and that hashing misses next to nothing."""

import random

import pytest

from astuner_flywheel.near import NearDuplicates, NearVectors, words
from tests.table import table

from ._writer import similarity

LONG = "Tom has 12 red apples in a basket and Anna gives him 7 green ones from her own garden. How many has he now?"


def test_the_same_but_for_typography_is_a_duplicate():
    near = NearDuplicates(0.9)
    assert near.add("a", "What is Tom's  age? He is “old”.") is None
    assert near.add("c", "WHAT IS TOM'S AGE? HE IS OLD!") == "a"
    assert len(near) == 1


def test_one_word_of_many_is_a_duplicate_and_another_question_is_not():
    near = NearDuplicates(0.8)
    assert near.add("a", LONG) is None
    assert near.add("b", LONG.replace("basket", "bag")) == "a"
    assert near.add("c", "Which river flows through the town, and where does it end?") is None
    assert len(near) == 2


def test_numbers_tell_apart_where_that_is_wanted():
    other = LONG.replace("12", "13")
    assert NearDuplicates(0.8).add("a", LONG) is None
    loose, strict = NearDuplicates(0.8), NearDuplicates(0.8, numbers_tell_apart=True)
    for near in (loose, strict):
        near.keep("a", LONG)
    assert loose.add("b", other) == "a"
    assert strict.add("b", other) is None
    assert strict.add("c", LONG.replace(" 7", "")) == "a", "a number that is merely missing does not make another task"


def test_operators_and_decimals_are_words():
    assert words("12-7=5") == ["12", "-", "7", "=", "5"]
    assert words("3.5 is not 35.") == ["3.5", "is", "not", "35"]
    assert similarity("12 - 7", "12 + 7") < 0.5


def test_text_without_spaces_is_compared_by_characters():
    assert words("今日は良い天気") == list("今日は良い天気")
    assert similarity("東京の人口は何人ですか", "東京の人口は何人ですか。") == 1.0


def test_texts_without_a_word_are_alike_and_nothing_else():
    near = NearDuplicates()
    assert near.add("a", "") is None
    assert near.add("b", " ?! ") == "a"
    assert near.add("c", "word") is None


def test_the_nearest_comes_first_and_keys_may_repeat():
    near = NearDuplicates(0.5)
    near.keep("same", "one two three four five six seven")
    near.keep("same", "one two three four five six eight")
    assert near.near("one two three four five six eight") == [("same", 1.0), ("same", pytest.approx(11 / 15))]


def test_a_half_surrogate_is_no_reason_to_fail():
    near = NearDuplicates()
    assert near.add("a", "caf\ud83d") is None
    assert near.add("b", "caf\ud83d") == "a"


def test_hashing_misses_next_to_nothing():
    rng = random.Random(5)
    vocabulary = [f"w{i}" for i in range(400)]
    near = NearDuplicates(0.8)
    found = 0
    for n in range(150):
        text = rng.choices(vocabulary, k=40)
        near.keep(str(n), " ".join(text))
        text[rng.randrange(1, 39)] = "changed"
        found += str(n) in [key for key, alike in near.near(" ".join(text)) if alike > 0.9]
    assert found >= 148


@table("threshold", [0, -1, 1.1])
def test_a_threshold_out_of_range_is_refused(threshold):
    with pytest.raises(ValueError, match="threshold"):
        NearDuplicates(threshold)
    with pytest.raises(ValueError, match="threshold"):
        NearVectors(threshold)


def test_vectors_by_their_angle():
    near = NearVectors(0.95)
    assert near.near([1.0, 0.0]) is None
    near.keep("a", [1.0, 0.0])
    assert near.near([5.0, 0.1]) == "a"
    assert near.near([0.0, 2.0]) is None
    near.keep("c", [0.0, 2.0])
    assert near.near([0.0, 2.0]) == "c"
    with pytest.raises(ValueError, match="has 3 numbers, but earlier ones have 2"):
        near.near([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="zeros"):
        near.keep("f", [0.0, 0.0])
