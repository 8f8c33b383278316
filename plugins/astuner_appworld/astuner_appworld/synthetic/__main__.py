"""Build a small AppWorld root with invented people: ``python PATH/astuner_appworld/synthetic ROOT``.

The script runs in the interpreter of the `appworld` package and creates every database with the package's own models,
so a synthetic world behaves like a real one. The result contains parts derived from AppWorld (the API documents), and
their license forbids publishing them unencrypted. Keep it on this machine.

The people and the four families of tasks are invented; nothing comes from AppWorld's tasks. Each family has tests that
fail in an untouched world (``no_op_fail``) and one that passes there (``no_op_pass``). An agent that does nothing
therefore gets a reward with `pass_fraction` and none with the other modes.
"""

# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

APPS_WITH_ACCOUNTS = ("simple_note", "phone")
EVALUATIONS = Path(__file__).with_name("evaluations")


@dataclass(frozen=True, kw_only=True)
class Person:
    """Person with notes in Simple Note and contacts in the phone."""

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
    def facts(self) -> dict[str, str]:
        names = {"first_name": self.first_name, "last_name": self.last_name}
        return {**names, "email": self.email, "phone_number": self.phone_number}

    @property
    def note_titles(self) -> list[str]:
        topics = ("Garden", "Recipes", "Bicycle", "Holiday", "Books", "Piano", "Attic", "Letters", "Maps", "Kites")
        return [f"{topic} of {self.first_name}" for topic in topics[: 4 + self.number]]

    @property
    def number_of_notes(self) -> int:
        return len(self.note_titles)

    @property
    def first_contacts_phone(self) -> str:
        return contacts_of(self)[0].phone_number

    def password(self, app: str) -> str:
        return f"{app}-{self.first_name}-{self.number}"


PEOPLE = tuple(
    Person(number=number, first_name=first, last_name=last)
    for number, (first, last) in enumerate(
        (("Ada", "Quill"), ("Ben", "Marsh"), ("Cleo", "Ito"), ("Dov", "Lark"), ("Esme", "Rook"), ("Finn", "Oduya"))
    )
)


def contacts_of(person: Person) -> list[Person]:
    """Return everyone except ``person``."""
    return [other for other in PEOPLE if other != person]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Kind of task. Texts are templates with ``me`` (the person it is for) and ``other`` (the first contact)."""

    code: str
    """Part of the task ID before the underscore."""
    asks: str
    answered_by: str = ""
    """Property of `Person` with the answer. Empty: the task has no answer."""
    title: str = ""
    """Title of the note that the task is about."""
    evaluation: str
    """Name of the file in `EVALUATIONS` that becomes ``evaluation.py`` of its tasks."""
    labels: list[str]
    """Labels of the tests, in the order of the evaluation."""

    def instruction(self, person: Person) -> str:
        return self.asks.format(me=person, other=contacts_of(person)[0])

    def answer(self, person: Person) -> Any:
        return getattr(person, self.answered_by) if self.answered_by else None

    def public_data(self, person: Person) -> dict[str, str]:
        return {"title": self.title.format(me=person)} if self.title else {}


FAMILIES = tuple(
    Family(**family) for family in json.loads(Path(__file__).with_name("families.json").read_text("utf-8"))
)

SPLITS = {"train": PEOPLE[:4], "dev": PEOPLE[4:5], "test_normal": PEOPLE[5:]}
"""Split -> people whose tasks are in it."""


def task_id(family: Family, person: Person) -> str:
    """Return the ID of a person's task of a family."""
    return f"{family.code}_{person.number + 1}"


def build(root: Path) -> None:
    """Replace ``root``/data without asking; callers check that it contains nothing valuable."""
    os.environ["APPWORLD_ROOT"] = str(root)
    os.environ["PYTHON_DOTENV_DISABLED"] = "1"
    from appworld import update_root
    from appworld.apps.api_lib import set_local_date_and_time
    from appworld.common.constants import DEFAULT_SYSTEM_DATETIME
    from appworld.common.random import set_random_seed

    update_root(str(root))
    data = root / "data"
    shutil.rmtree(data, ignore_errors=True)
    (data / "base_dbs").mkdir(parents=True)
    _write_api_docs(data)
    clock = set_local_date_and_time(DEFAULT_SYSTEM_DATETIME)
    set_random_seed(100, python=True, faker_=False, model_factory=True)
    _write_base_databases(data)
    for family in FAMILIES:
        for person in PEOPLE:
            set_random_seed(1, python=True)
            _write_task(data, family, person)
    (data / "datasets").mkdir()
    for split, people in SPLITS.items():
        ids = [task_id(family, person) for person in people for family in FAMILIES]
        (data / "datasets" / f"{split}.txt").write_text("\n".join(ids) + "\n", encoding="utf-8")
    clock.stop()


def _write_api_docs(data: Path) -> None:
    from appworld.apps import get_all_apps
    from appworld.collections.api_docs import ApiDocCollection

    folder = data / "api_docs" / "standard"
    folder.mkdir(parents=True)
    for app, docs in ApiDocCollection.build(load_apps=tuple(get_all_apps(skip_admin=True))).items():
        _write_json(folder / f"{app}.json", {name: {**dict(doc), "canary_string": "-"} for name, doc in docs.items()})


def _write_base_databases(data: Path) -> None:
    from appworld.apps import get_all_apps
    from appworld.apps.model_lib import CachedDBHandler
    from appworld.collections.api_docs import ApiDocCollection
    from appworld.collections.models import ModelCollection

    home = ":memory:synthetic_base"
    models = ModelCollection.load(
        to_db_home_path=home, from_db_home_path=home, load_apps=get_all_apps(), create_db=True
    )
    for person in PEOPLE:
        _add_person(models, person)
    for app, docs in ApiDocCollection.load().items():
        for name, doc in docs.items():
            models.api_docs.ApiDoc.create(
                app_name_=app,
                api_name=name,
                path=doc["path"],
                method=doc["method"],
                description=doc["description"],
                parameters=doc["parameters"],
                response_schemas=doc.get("response_schemas", {}),
            ).save()
    models.save(
        str(data / "base_dbs"),
        format="full",
        app_names=list(get_all_apps()),
        delete_if_exists=True,
        save_model_hashes=True,
    )
    models.close()
    CachedDBHandler.reset()


def _add_person(models: Any, person: Person) -> None:
    names = {"first_name": person.first_name, "last_name": person.last_name}
    born: dict[str, Any] = {"birthday": "1990-01-01", "sex": "female" if person.number % 2 == 0 else "male"}
    main_user = models.admin.MainUser.create(**person.facts, **born)
    main_user.save()
    for app in APPS_WITH_ACCOUNTS:
        models.admin.AccountPassword.create(
            main_user_id=main_user.id, account_name=app, password=person.password(app)
        ).save()
    writer = models.simple_note.User.create(
        **names, email=person.email, password=person.password("simple_note"), verified=True
    )
    writer.save()
    for number, title in enumerate(person.note_titles):
        models.simple_note.Note.create(
            user_id=writer.id, title=title, content=f"page {number}", tags=["home" if number % 2 else "work"]
        ).save()
    caller = models.phone.User.create(**names, phone_number=person.phone_number, password=person.password("phone"))
    caller.save()
    for other in contacts_of(person):
        models.phone.Contact.create(user_id=caller.id, **other.facts, relationships=["friend"]).save()


def _write_task(data: Path, family: Family, person: Person) -> None:
    from appworld.apps import get_all_apps
    from appworld.apps.model_lib import CachedDBHandler
    from appworld.collections.models import ModelCollection
    from appworld.common.constants import DB_VERSION, DEFAULT_SYSTEM_DATETIME

    name = task_id(family, person)
    folder = data / "tasks" / name
    truth = folder / "ground_truth"
    truth.mkdir(parents=True)
    models = ModelCollection.load(
        to_db_home_path=f":memory:synthetic_{name}",
        from_db_home_path=str(data / "base_dbs"),
        load_apps=get_all_apps(),
    )
    row = models.supervisor.Supervisor.create(**person.facts, birthday="1990-01-01", sex="female")
    row.save()
    for app in APPS_WITH_ACCOUNTS:
        models.supervisor.AccountPassword.create(
            supervisor_id=row.id, account_name=app, password=person.password(app)
        ).save()
    models.supervisor.Task.create(supervisor_id=row.id, instruction=family.instruction(person)).save()
    models.save(
        str(folder / "dbs"), format="changes", app_names=get_all_apps(), delete_if_exists=True, save_model_hashes=True
    )
    models.close()
    CachedDBHandler.reset()
    _write_json(
        folder / "specs.json",
        {
            "instruction": family.instruction(person),
            "supervisor": person.facts,
            "datetime": DEFAULT_SYSTEM_DATETIME.isoformat(),
            "db_version": DB_VERSION,
        },
    )
    numbers = {"difficulty": 1, "num_apps": 1, "num_apis": 3, "num_api_calls": 3, "num_solution_code_lines": 5}
    _write_json(truth / "metadata.json", {"mode": "minimal", **numbers})
    _write_json(truth / "public_data.json", family.public_data(person))
    _write_json(truth / "private_data.json", {})
    _write_json(truth / "answer.json", family.answer(person))
    evaluation = (EVALUATIONS / f"{family.evaluation}.txt").read_text(encoding="utf-8")
    requirements = [textwrap.dedent(text).strip() for text in re.findall(r'test\("""(.*?)"""', evaluation, re.S)]
    tests = zip(requirements, family.labels, strict=True)
    _write_json(truth / "test_data.json", [{"requirement": text, "label": label} for text, label in tests])
    (truth / "evaluation.py").write_text(evaluation, encoding="utf-8")


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python PATH/astuner_appworld/synthetic ROOT")
    build(Path(sys.argv[1]).resolve())
