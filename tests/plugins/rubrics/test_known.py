"""Labels that rubrics were learned from are known again, and others are not."""

import random
import re

import pytest

from astuner_rubrics.known import PRINT, Overlap, print_of, without_known
from astuner_rubrics.labels import Sample

WORDS = [f"word{n}" for n in range(400)]


def sample(question, *answers, place="a.jsonl:1", worth=None):
    return Sample(place, question, answers, worth or tuple(float(n) for n in range(len(answers))))


def drawn(rng, count=30):
    return " ".join(rng.choices(WORDS, k=count))


def test_a_print_is_of_the_example_and_not_of_its_place_label_or_order():
    one = print_of(sample("What  is it?", "an apple", "a pear"))
    assert PRINT.fullmatch(one)
    assert one == print_of(sample("What is it?", "a pear", "an apple", place="b.jsonl:9", worth=(5.0, 1.0)))
    assert one != print_of(sample("What is it?", "a pear", "a plum"))
    assert not re.search("apple|pear", one)


def test_the_same_near_and_other_examples_are_told_apart():
    rng = random.Random(0)
    learned = [sample(drawn(rng, 10), drawn(rng), drawn(rng)) for _ in range(20)]
    others = [sample(drawn(rng, 10), drawn(rng), drawn(rng)) for _ in range(20)]
    near = [sample(s.question, f"{s.answers[0]} Indeed.", s.answers[1]) for s in learned[:3]]
    asked = sample(learned[4].question, drawn(rng), drawn(rng))
    turned = sample(learned[5].question, *learned[5].answers[::-1])
    kept, overlap = without_known([*others, *near, asked, turned, learned[6]], [print_of(s) for s in learned])
    assert kept == (*others, asked)
    assert overlap == Overlap(same=2, near=3, same_question=1)
    assert without_known(others, []) == (tuple(others), Overlap(0, 0, 0))


@pytest.mark.parametrize(("replaced", "is_near"), [(1, True), (12, False), (30, False)])
def test_near_is_a_word_or_two_and_not_half_of_them(replaced, is_near):
    found = 0
    for seed in range(20):
        rng = random.Random(seed)
        words = drawn(rng).split()
        changed = [*drawn(rng, replaced).split(), *words[replaced:]]
        learned, other = (sample("What is known about it?", " ".join(w), "Nothing at all.") for w in (words, changed))
        found += without_known([other], [print_of(learned)])[1].near
    assert found == (20 if is_near else 0)
