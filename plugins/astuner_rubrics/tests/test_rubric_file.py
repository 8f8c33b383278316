"""Rubric files: what is written is read, what is wrong is named with its line, and an edit is seen."""

import pytest

from astuner.contracts.errors import ConfigError
from astuner_rubrics.agreement import Agreement
from astuner_rubrics.labels import Mode
from astuner_rubrics.rubric_file import Learned, Rubric, RubricFile, load_rubrics, save_rubrics
from tests.table import table

LEAST = """\
mode: pointwise
scale: [1, 5]
rubrics:
- criterion: It names a source.
"""


def file_of(*rubrics, **more):
    return RubricFile(mode=Mode.PAIRWISE, scale=(0, 10), rubrics=rubrics, **more)


def learned(digest):
    a = Agreement(share=0.9, low=0.8, high=0.95, n=40, chance=0.5)
    return Learned(
        date="2026-01-01", model="m", file="s.jsonl", sha256="0", prompts={"grade": "grade-1"}, train=10,
        held_out=("s.jsonl:1",), agreement=a, agreement_in_training=a, digest=digest,
    )  # fmt: skip


def test_what_is_written_is_read_again_whatever_the_criteria_hold(tmp_path):
    awkward = ["a: b # c", "${oc.env:HOME} ${", "- dash", "line\nline", "‘Ünïcode’ 答", "*a &b !c", "yes", "1"]
    rubrics = file_of(*(Rubric(criterion=text, tips=(text,), samples=("s:1",)) for text in awkward))
    rubrics = rubrics.model_copy(update={"learned": learned(rubrics.digest)})
    save_rubrics(tmp_path / "r.yaml", rubrics)
    assert load_rubrics(tmp_path / "r.yaml") == rubrics
    assert not rubrics.is_edited
    assert [p.name for p in tmp_path.iterdir()] == ["r.yaml"]


def test_the_least_that_a_person_writes_by_hand_is_enough(tmp_path):
    (tmp_path / "r.yaml").write_text(LEAST)
    rubrics = load_rubrics(tmp_path / "r.yaml")
    assert (rubrics.votes, rubrics.rubrics[0].weight, rubrics.learned) == (1, 1.0, None)
    assert [rubrics.scaled(x) for x in (0, 1, 3, 5, 9)] == [0, 0, 0.5, 1, 1]


def test_an_edit_of_what_grades_changes_the_digest_and_a_note_does_not():
    before = file_of(Rubric(criterion="a"), Rubric(criterion="b"))
    kept = before.model_copy(update={"learned": learned(before.digest)})
    assert kept.digest == before.digest
    for edited in (
        {"rubrics": (Rubric(criterion="a"), Rubric(criterion="B"))},
        {"rubrics": (Rubric(criterion="a", weight=2), Rubric(criterion="b"))},
        {"rubrics": (Rubric(criterion="a", tips=("t",)), Rubric(criterion="b"))},
        {"scale": (0.0, 5.0)},
        {"votes": 3},
        {"mode": Mode.LISTWISE},
    ):
        assert kept.model_copy(update=edited).is_edited, edited
    same = kept.model_copy(update={"rubrics": (Rubric(criterion="a", samples=("x",)), Rubric(criterion="b"))})
    assert not same.is_edited


@table(
    ("text", "says"),
    [
        ("", "the file is empty; `astuner judge learn`"),
        ("- a\n", ":1: expected `key: value` lines"),
        ("mode: [\n", ": not YAML"),
        (LEAST.replace("mode", "moed"), ":1: unknown key moed; did you mean mode?"),
        (LEAST + "  wieght: 2\n", ":5: unknown key rubrics.0.wieght; did you mean weight?"),
        (LEAST + "  weight: 0\n", ":5: rubrics.0.weight: input should be greater than 0, got 0"),
        (LEAST + "  weight: .nan\n", ":5: rubrics.0.weight"),
        (LEAST.replace("[1, 5]", "[5, 1]"), "the worst grade 5 must be below the best 1"),
        (LEAST.replace("pointwise", "pontwise"), ":1: mode: "),
        (LEAST.partition("rubrics")[0], ": rubrics is required"),
        (LEAST + "votes: 1\nvotes: 2\n", ":6: votes is set twice (first in line 5)"),
        (LEAST.replace("It names a source.", "''"), ":4: rubrics.0.criterion"),
        ("a: &a [x]\nb: *a\n", ":2: aliases (*a) are not supported"),
        ("mode: !!python/object:os.system x\n", ":1: not YAML: could not determine a constructor"),
        ("a: " + "[" * 500 + "]" * 500, "nesting is too deep"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path, text, says):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as e:
        load_rubrics(path)
    assert says in str(e.value)
    assert str(path) in str(e.value)


def test_everything_wrong_is_said_at_once_in_order(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(LEAST.replace("scale: [1, 5]", "scale: 3") + "  weight: no\nextra: 1\n")
    with pytest.raises(ConfigError) as e:
        load_rubrics(path)
    assert [p.split(":")[1] for p in e.value.problems] == ["2", "5", "6"]


def test_files_that_are_no_text(tmp_path):
    path = tmp_path / "r.yaml"
    with pytest.raises(ConfigError, match="cannot read the file: No such file"):
        load_rubrics(path)
    path.write_bytes(b"mode: a\nscale: \xff\n")
    with pytest.raises(ConfigError, match=r"r\.yaml:2: is not UTF-8"):
        load_rubrics(path)
    with path.open("wb") as f:
        f.truncate(2 << 20)
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        load_rubrics(path)
