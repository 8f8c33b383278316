"""The invented people and the four kinds of task of a synthetic root, with the tests that go with each.

Everything here is made up; nothing comes from AppWorld's tasks.  Each family has tests that an untouched world fails
(``no_op_fail``) and one that it passes (``no_op_pass``), so that doing nothing is worth something to `pass_fraction`
and nothing to the other reward modes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Person:
    """Somebody with notes in Simple Note and contacts in the phone."""

    number: int
    first_name: str
    last_name: str

    @property
    def email(self) -> str:
        return f"{self.first_name}.{self.last_name}@example.com".lower()

    @property
    def phone_number(self) -> str:
        return f"555010{self.number:04d}"

    @property
    def note_titles(self) -> list[str]:
        topics = ("Garden", "Recipes", "Bicycle", "Holiday", "Books", "Piano", "Attic", "Letters", "Maps", "Kites")
        return [f"{topic} of {self.first_name}" for topic in topics[: 4 + self.number]]

    def password(self, app: str) -> str:
        return f"{app}-{self.first_name}-{self.number}"


PEOPLE = tuple(
    Person(number=number, first_name=first, last_name=last)
    for number, (first, last) in enumerate(
        (("Ada", "Quill"), ("Ben", "Marsh"), ("Cleo", "Ito"), ("Dov", "Lark"), ("Esme", "Rook"), ("Finn", "Oduya"))
    )
)


def contacts_of(person: Person) -> list[Person]:
    return [other for other in PEOPLE if other != person]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of task."""

    code: str
    """The part of a task's id before the underscore."""
    instruction: Callable[[Person], str]
    answer: Callable[[Person], Any]
    public_data: Callable[[Person], dict[str, Any]]
    evaluation: str
    labels: tuple[str, ...]
    """Of the tests, in the order in which the evaluation runs them."""


_HEAD = """\
import json


def evaluate(test, public_data, private_data, main_user, models, ground_truth_answer):
"""

_ANSWER = (
    _HEAD
    + '''\
    with test("""
        assert the answer is right.
        """):
        test.answer(json.loads(models.end.supervisor.Task.all()[0].answer), ground_truth_answer)
    with test("""
        assert nothing was changed.
        """):
        test.case(models.changed_model_names(), "==", set())
'''
)

_ADDED = (
    _HEAD
    + '''\
    added, updated, removed = models.changed_records("simple_note.Note")
    with test("""
        assert one note was added.
        """):
        test.case(len(added), "==", 1)
    with test("""
        assert the new note has the title that was asked for.
        """):
        test.case(added[0].title, "==", public_data.title)
    with test("""
        assert nothing else was changed.
        """):
        test.case(len(updated) + len(removed), "==", 0)
        test.case(models.changed_model_names() - {"simple_note.Note"}, "==", set())
'''
)

_REMOVED = (
    _HEAD
    + '''\
    added, updated, removed = models.changed_records("simple_note.Note")
    with test("""
        assert the note that was named is gone.
        """):
        test.case([note.title for note in removed], "==", [public_data.title])
    with test("""
        assert nothing else was changed.
        """):
        test.case(len(added) + len(updated), "==", 0)
        test.case(models.changed_model_names() - {"simple_note.Note"}, "==", set())
'''
)

FAMILIES = (
    Family(
        code="a0count",
        instruction=lambda person: "How many notes do I keep in Simple Note?",
        answer=lambda person: len(person.note_titles),
        public_data=lambda person: {},
        evaluation=_ANSWER,
        labels=("no_op_fail", "no_op_pass"),
    ),
    Family(
        code="b0phone",
        instruction=lambda person: f"What is the phone number of {contacts_of(person)[0].first_name} in my contacts?",
        answer=lambda person: contacts_of(person)[0].phone_number,
        public_data=lambda person: {},
        evaluation=_ANSWER,
        labels=("no_op_fail", "no_op_pass"),
    ),
    Family(
        code="c0write",
        instruction=lambda person: f"Add a note with the title 'Groceries {person.number}' to Simple Note.",
        answer=lambda person: None,
        public_data=lambda person: {"title": f"Groceries {person.number}"},
        evaluation=_ADDED,
        labels=("no_op_fail", "no_op_fail", "no_op_pass"),
    ),
    Family(
        code="d0erase",
        instruction=lambda person: f"Delete the note '{person.note_titles[1]}' from Simple Note.",
        answer=lambda person: None,
        public_data=lambda person: {"title": person.note_titles[1]},
        evaluation=_REMOVED,
        labels=("no_op_fail", "no_op_pass"),
    ),
)

SPLITS = {"train": PEOPLE[:4], "dev": PEOPLE[4:5], "test_normal": PEOPLE[5:]}
"""Split -> whose tasks are in it."""


def task_id(family: Family, person: Person) -> str:
    return f"{family.code}_{person.number + 1}"
