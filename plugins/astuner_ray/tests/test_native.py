"""What backbones share that hand an experiment to somebody else's trainer: a person's keys, rows, lengths."""

import importlib
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from astuner.contracts.errors import ConfigError
from astuner.contracts.places import Place
from astuner_ray.native import gpu_memory
from astuner_ray.native.host import host_plan
from astuner_ray.native.keys import EngineSection, flat, get, nearest, place_of, put, refuse, spelled
from astuner_ray.native.table import UNSET, Table
from tests.table import table


def test_nested_and_dotted_keys_are_one_thing():
    section = EngineSection.model_validate({"a.b": 1, "a": {"c": {"d": [2]}, "+e": None}, "empty": {}})
    assert section.keys() == {"a.b": 1, "a.c.d": [2], "a.+e": None, "empty": {}}
    assert EngineSection().keys() == {}


@table(
    ("data", "says"),
    [
        ({"a": {"b": 1}, "a.b": 2}, "a.b is written twice"),
        ({"+a.b": 1, "a": {"+b": 2}}, "written twice"),
        ({"a.b": 3, "a.b.c": 4}, "a.b.c is below b, which also has a value"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(data, says):
    with pytest.raises(ValidationError, match=says):
        EngineSection.model_validate(data)


def test_a_plus_is_at_the_last_name():
    assert [spelled(key) for key in ("+a.b", "a.+b", "a.b")] == ["a.+b", "a.+b", "a.b"]


def test_put_and_get():
    data = {}
    put(data, "a.b", {})
    put(data, "a.b.c", 1)
    put(data, "a.b", {})  # an empty section empties nothing
    assert data == {"a": {"b": {"c": 1}}}
    assert (get(data, "a.b.c"), get(data, "a.x.c"), get(data, "a.b.c.d", 5)) == (1, None, 5)
    assert dict(flat(data)) == {"a.b.c": 1}


def test_a_key_is_found_however_it_was_spelled():
    places = {"verl.+a.b": Place("f", 3, 1), "verl.a.c.d": Place("f", 2, 1), "other.a.c": Place("f", 1, 1)}
    config = SimpleNamespace(origins=places, path="f")
    assert place_of(config, "verl", "a.+b").line == 3
    assert place_of(config, "verl", "a.c").line == 2, "of a section the first key below it"
    assert str(place_of(config, "verl", "zzz")) == "f"


def test_problems_come_in_the_order_of_the_file():
    refuse([])
    with pytest.raises(ConfigError) as e:
        refuse([(Place("command line"), "last"), (Place("f", 9, 1), "second"), (Place("f", 2, 5), "first")])
    assert [problem.rpartition(" ")[2] for problem in e.value.problems] == ["first", "second", "last"]


def test_the_nearest_key_is_of_the_nearest_section():
    known = ["trainer.device", "rollout.device", "rollout.name"]
    assert nearest("rollout.devise", known) == "rollout.device"
    assert nearest("rollout.zzz", known) == ""


KEYS = """
words:
  - &sizes [data.size, data.more]
told:
  batch.size: {ours: data.size}
  +batch.seed: {ours: seed, free: true}
  batch.kind: {always: ours, why: there is one kind}
  batch.sizes: {ours: [*sizes, seed], says: all of them}
  batch.betas: {ours: optim.betas}
locked:
  batch: write data instead
  batch.more: more
honours: {rollout: "`session`"}
refused:
  rollout.top_k: {but: [-1, null], instead: lower the temperature}
  model.revision: {instead: none}
"""


@pytest.fixture
def keys(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text(KEYS)
    return Table(file, {"batch.sizes": lambda facts: UNSET})


def test_why_a_key_is_locked(keys):
    why = {key: keys.why_locked(key) for key in ("batch.size", "batch.seed", "batch.kind", "batch.x", "c")}
    assert why == {
        "batch.size": "write astuner.data.size instead",
        "batch.seed": "",
        "batch.kind": "there is one kind",
        "batch.x": "write data instead",
        "c": "",
    }
    assert keys.why_locked("batch.more.x") == "more"


def test_a_row_takes_the_value_of_ours(keys):
    facts = SimpleNamespace(a=SimpleNamespace(optim=SimpleNamespace(betas=(0.9, 0.99)), seed=3))
    rows = {row.native: row for row in keys.rows}
    assert rows["batch.betas"].value(facts) == [0.9, 0.99]
    assert rows["+batch.seed"].value(facts) == 3
    assert rows["batch.kind"].value(facts) == rows["batch.kind"].says == "ours"
    assert rows["batch.sizes"].value(facts) is UNSET
    assert rows["batch.sizes"].ours == ("data.size", "data.more", "seed")


def test_what_a_backbone_honours_is_what_it_tells_its_engine_and_what_it_acts_on(keys):
    capabilities = keys.capabilities
    assert capabilities.honours == {"data.size", "data.more", "seed", "optim.betas", "rollout"}
    assert capabilities.only == {"rollout.top_k": (-1, None)}
    assert capabilities.instead == {"rollout.top_k": "lower the temperature", "model.revision": "none"}


def test_sizes_are_said_as_people_say_them():
    assert [gpu_memory.gib(size) for size in (36 * 2**20, 2**30 / 2, 1.25 * 2**34)] == ["36 MiB", "0.5 GiB", "20.0 GiB"]


def test_the_plan_says_which_processes_there_are_and_what_they_take(tmp_path, monkeypatch):
    plan = host_plan({"training": 4, "serving": 2, "lent": 0}, cpus=22)
    assert plan["processes"] == "15: 1 for the command, 4 training, 2 serving, 8 of Ray; Ray must count 22 CPUs"
    assert plan["host memory"].startswith("about 2.7 GiB ")
    (tmp_path / "vllm").mkdir()  # a folder of that name is none
    monkeypatch.syspath_prepend(tmp_path)
    assert host_plan({"training": 6}, cpus=22)["host memory"] == plan["host memory"]
    (tmp_path / "vllm" / "__init__.py").touch()
    importlib.invalidate_caches()
    assert host_plan({"training": 6}, cpus=22)["host memory"].startswith("about 3.9 GiB ")
