"""Labels that rubrics were learned from are known again, and others are not."""

import itertools
import json
import random
import re

import pytest

from astuner.cli import main
from astuner.testing import ScriptedModel
from astuner_rubrics.agreement import Agreement
from astuner_rubrics.labels import PRINT, Overlap, Sample, places_of_same, print_of, read_labels, without_known
from astuner_rubrics.rubric_file import Learned, Rubric, RubricFile, load_rubrics, save_rubrics
from tests.table import table

from .true_rubric import TrueRubric

WORDS = ["".join(letters) for letters in itertools.product("bdfgklmnrs", "aeiou", "bdfgklmn")]


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


@table(("replaced", "is_near"), [(1, True), (12, False), (30, False)])
def test_near_is_a_word_or_two_and_not_half_of_them(replaced, is_near):
    found = 0
    for seed in range(20):
        rng = random.Random(seed)
        words = drawn(rng).split()
        changed = [*drawn(rng, replaced).split(), *words[replaced:]]
        learned, other = (sample("What is known about it?", " ".join(w), "Nothing at all.") for w in (words, changed))
        found += without_known([other], [print_of(learned)])[1].near
    assert found == (20 if is_near else 0)


def word_problem(a, b):
    return sample(
        f"A baker fills {a} trays every hour, and each of the trays holds {b} rolls. How many rolls in an hour?",
        f"Each tray holds {b} rolls and there are {a} trays, so we multiply the two and get {a * b} rolls in an hour.",
        f"Each tray holds {b} rolls and there are {a} trays, so we add the two and get {a + b} rolls in an hour.",
    )


def test_other_numbers_make_another_example():
    learned = [print_of(word_problem(a, 7)) for a in range(20, 50)]
    others = [word_problem(a, 7) for a in range(50, 80)] + [word_problem(7, 20)]
    assert without_known(others, learned) == (tuple(others), Overlap(0, 0, 0))
    again = word_problem(20, 7)
    reworded = sample(again.question, *(f"{answer} Indeed." for answer in again.answers[::-1]))
    assert without_known([reworded], learned) == ((), Overlap(0, 1, 0))


def test_prints_of_older_files_lack_the_numbers_and_are_still_read(tmp_path):
    one, thumbs = word_problem(20, 7), sample("Good?", "\U0001f44d", "\U0001f44e")
    older = [print_of(one).rpartition("-")[0], print_of(thumbs).rpartition("-")[0]]
    save_rubrics(tmp_path / "r.yaml", rubrics(older))
    prints = load_rubrics(tmp_path / "r.yaml").learned.prints
    assert list(prints) == older
    near = sample(one.question, *(f"{answer} Indeed." for answer in one.answers))
    assert without_known([one, near, sample("Good?", "!", "?")], prints)[1] == Overlap(same=1, near=1, same_question=1)


def test_a_print_goes_on_as_an_older_version_made_it():
    one = sample("A mill on the river makes 12 sacks. How many in 3 days?", "It makes 36 sacks.", "Nobody knows.")
    older = "108ff7591b9c-dcf41b98c236-0fe857ff907f90b625e4e56a46cc1202-43b9463082b891d408c11756746ea8ba"
    assert print_of(one).rpartition("-")[0] == older


def test_what_has_no_words_is_near_an_exact_repeat_only():
    question = "Should somebody who has had nothing to eat since the early morning take these pills before a meal?"
    learned = [print_of(sample(question, "\U0001f44d", "\U0001f44e"))]
    others = [sample(question, "\u2705", "!"), sample(question, "\U0001f44d", "\u2705"), sample("?", "\U0001f44d", "!")]
    assert without_known(others, learned)[1] == Overlap(same=0, near=0, same_question=2)
    repeat = sample(f"{question} Please?", " \U0001f44e", "\U0001f44d")
    assert without_known([repeat], learned)[1] == Overlap(same=0, near=1, same_question=0)


def rubrics(prints):
    """As if learned from the examples with those prints."""
    agreement = Agreement(share=1.0, low=0.8, high=1.0, n=20, chance=0.5)
    file = RubricFile(
        mode="pairwise", scale=(0, 1), rubrics=(Rubric(criterion="The answer names a source for what it claims."),)
    )
    learned = Learned(
        date="2026-11-22", model="m", file="s.jsonl", sha256="0" * 64, prompts={}, train=len(prints),
        agreement=agreement, agreement_in_training=agreement, digest=file.digest, prints=tuple(prints),
    )  # fmt: skip
    return file.model_copy(update={"learned": learned})


def test_labels_that_are_all_near_are_measured_with_a_note(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ASTUNER_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    rows = TrueRubric({"source": 1}).samples(12)
    near = [{**row, "answers": [f"{row['answers'][0]} Yes.", row["answers"][1]]} for row in rows]

    def check(rows, learned):
        (tmp_path / "l.jsonl").write_text("".join(json.dumps(row) + "\n" for row in learned))
        prints = [print_of(s) for s in read_labels(tmp_path / "l.jsonl").samples]
        save_rubrics(tmp_path / "r.yaml", rubrics(prints))
        (tmp_path / "l.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = ["judge", "check", "r.yaml", "--labels", "l.jsonl", "--base-url", server.base_url, "--model", "m"]
        with pytest.raises(SystemExit) as e:
            main([*command, "--attacks", "0", "--repeats", "1", "--json"])
        said = capsys.readouterr()
        return e.value.code or 0, said.out, said.err

    with ScriptedModel(TrueRubric({"source": 1})) as server:
        code, out, err = check(near, rows)
        assert code == 0, err
        card = json.loads(out)
        assert (card["labels"]["n"], card["labels"]["left_out_near"]) == (12, 0)
        assert "all 12 labels are near duplicates" in " ".join(card["notes"])

        code, out, err = check([*near[:5], *rows[5:]], rows)
        assert (code, out) == (1, "")
        assert "was learned from these labels (or from near duplicates of 5 of them)" in " ".join(err.split())
        places = "l.jsonl:6, l.jsonl:7, l.jsonl:8, l.jsonl:9, l.jsonl:10 and 2 more"
        assert f"remove {places}" in " ".join(err.split())


def test_the_places_of_the_same_are_not_those_of_the_near():
    one = word_problem(20, 7)
    near = sample(one.question, f"{one.answers[0]} Indeed.", one.answers[1], place="a.jsonl:2")
    assert places_of_same([near, one], [print_of(one)]) == ["a.jsonl:1"]
