"""A scripted helper model that writes tasks as a real one would: from the sentences of the text that it is shown."""

from __future__ import annotations

import json
import re
import threading

from astuner_flywheel.near import _features, _jaccard

SENTENCE = re.compile(r"The (\w+) of (\w+) has (\d+) (\w+)\.")


def shown(body, name):
    """What stands in the fence ``name`` of a request; None without one."""
    found = re.search(rf"<<<{name} ([0-9a-f]{{16}})\n(.*?)\n\1>>>", body["messages"][-1]["content"], re.DOTALL)
    return found[2] if found else None


def kind(body):
    system = body["messages"][0]["content"]
    for begins, name in (
        ("You write tasks that test", "write from text"),
        ("You write tasks like", "write from samples"),
        ("You answer", "solve"),
        ("You say whether", "compare"),
    ):
        if system.startswith(begins):
            return name
    raise AssertionError(f"an unknown prompt: {system[:80]}")


def asked_for(body):
    found = re.search(r"Write (one task|(\d+) tasks)", body["messages"][-1]["content"])
    return int(found[2] or 1)


def writer(body):
    """Tasks from sentences "The tower of Arlen has 12 windows."; solves them by the text; compares by equality."""
    what = kind(body)
    text = " ".join((shown(body, "TEXT") or "").split())
    if what == "write from text":
        there = shown(body, "EXISTING") or ""
        tasks = [
            {"question": question(m), "answer": m[3], "evidence": m[0]}
            for m in SENTENCE.finditer(text)
            if question(m) not in there
        ]
        return {"tasks": tasks[: asked_for(body)]}
    if what == "solve":
        for m in SENTENCE.finditer(text):
            if question(m) == shown(body, "QUESTION"):
                return {"reasoning": "", "found": True, "answer": m[3]}
        return {"reasoning": "not in the text", "found": False, "answer": ""}
    if what == "compare":
        return {"reason": "", "same": shown(body, "ANSWER-1") == shown(body, "ANSWER-2")}
    raise AssertionError(what)


def question(m):
    return f"How many {m[4]} does the {m[1]} of {m[2]} have?"


NAMES = "Arlen Brakk Corvo Dunmer Elsby Farrow Gelt Harsk Imber Jorvik Kestle Lorne Mirfield Norrby Ostend".split()  # noqa: SIM905
THINGS = (("tower", "windows"), ("bridge", "arches"), ("library", "rooms"), ("harbour", "cranes"), ("school", "desks"))


def sentences(count, start=0):
    """Sentences that the writer makes tasks from, all different."""
    made = []
    for n in range(start, start + count):
        building, things = THINGS[n % len(THINGS)]
        made.append(f"The {building} of {NAMES[n // len(THINGS) % len(NAMES)]} has {n + 3} {things}.")
    return made


def experiment(folder, base_url, section, **helper):
    """An experiment file whose helper model is at ``base_url``."""
    path = folder / "experiment.yaml"
    about = {
        "astuner": {
            "model": {"path": "tiny-calculator"},
            "task_reader": {"type": "data_generation", "data_generation": {"helper_model": "writer", **section}},
            "helper_models": {"writer": {"base_url": base_url, "model": "scripted", "max_retries": 0, **helper}},
        }
    }
    path.write_text(json.dumps(about), encoding="utf-8")  # JSON is YAML
    return path


def similarity(one, other):
    """The Jaccard index by which near-duplicates are told."""
    return _jaccard(_features(one)[0], _features(other)[0])


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


THING = ("pens", "cards", "stars", "eggs", "coins", "books", "keys", "rings", "cups", "hats", "maps", "shells")


def expander():
    """New problems like the samples; every fourth has a wrong answer, one of them is a sample again."""
    lock, counter = threading.Lock(), [0]

    def reply(body):
        if kind(body) == "write from samples":
            tasks = []
            for _ in range(asked_for(body)):
                with lock:
                    n = counter[0]
                    counter[0] += 1
                one, other, thing = n % 7 + 2, n // 7 + 4, THING[n % len(THING)]
                answer = one * other + (n % 4 == 3)
                tasks.append({"question": f"In {one} bags of Zoe are {other} {thing} each. How many {thing} are there?",
                              "answer": str(answer), "evidence": ""})  # fmt: skip
            tasks.append({"question": "Tom has 2 red boxes with 3 nails. How many nails?", "answer": "6"})
            return {"tasks": tasks}
        if kind(body) == "solve":
            numbers = [int(n) for n in re.findall(r"\d+", shown(body, "QUESTION"))]
            return {"reasoning": "…", "found": True, "answer": str(numbers[0] * numbers[1])}
        return {"reason": "", "same": False}

    return reply
