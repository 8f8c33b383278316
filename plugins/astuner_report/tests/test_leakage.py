"""Are validation tasks held out, does a prompt tell its answer: planted faults, false alarms, where it is said."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from astuner import RunDir, run
from astuner.contracts.errors import ConfigError
from astuner.contracts.rows import FieldMap
from astuner.contracts.types import Task
from astuner_report.leakage import find_leakage
from astuner_report.run_report import to_markdown
from astuner_report.run_report.facts import gather
from tests.table import table

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SHIPPED = [
    ("math_agent", "heldout"), ("word_problems", "validation"), ("word_problems", "test"),
    ("shop_lookup", "validation"), ("shop_lookup", "test"), ("ticket_triage", "validation"),
    ("ticket_triage", "test"), ("werewolves", "validation"), ("learning_to_ask", "validation"),
    ("learning_to_ask", "test"), ("countdown", "validation"), ("countdown", "test"),
    ("search_documents", "validation"), ("search_documents", "test"),
]  # fmt: skip
STORY = (
    "Mrs Miller bakes {a} loaves of bread every morning in the small bakery behind the church, sells {b} of them to "
    "the school before noon, and gives what is left to her neighbours in the evening. How many do the neighbours get?"
)


def read(example: str, name: str) -> list[Task]:
    lines = (EXAMPLES / example / "data" / f"{name}.jsonl").read_text().splitlines()
    return [FieldMap().task(json.loads(line), f"{name}:{i}") for i, line in enumerate(lines, start=1)]


def texts(*queries: str, name: str = "t") -> list[Task]:
    return [Task(task_id=f"{name}{i}", main_query=query) for i, query in enumerate(queries)]


def stories(count: int) -> list[str]:
    """Questions of 30 words each, with nothing in common but common words."""
    rng, vowels = random.Random(0), "aeiou"
    vocabulary = [f"{c}{v}{d}{w}" for c in "bdfgklm" for v in vowels for d in "nprst" for w in vowels]
    return [" ".join(rng.choices(vocabulary, k=30)) + "?" for _ in range(count)]


@table(("example", "validation"), SHIPPED)
def test_no_shipped_example_raises_an_alarm(example: str, validation: str) -> None:
    found = find_leakage(read(example, "train"), read(example, validation))
    assert (found["alarms"], found["overlap"]["tasks"]) == ([], 0)
    assert found["plan"]["held out"].startswith("yes, none of ")


@table(("example", "validation"), SHIPPED)
def test_validating_on_what_is_trained_on_is_named_in_every_example(example: str, validation: str) -> None:
    train = read(example, "train")
    found = find_leakage(train, read(example, validation)[:20] + train[:5])
    assert found["overlap"]["exact"] == 5
    (alarm,) = found["alarms"]
    assert alarm["rule"] == "train_validation_overlap"
    assert "5 of 25 tasks are also training tasks" in alarm["message"]
    assert json.loads(json.dumps(found)) == found


def test_case_and_spacing_are_no_difference_and_brackets_and_numbers_are() -> None:
    train = texts(*stories(50), "What is (2 + 3) * 4?", "Tom has 3 apples, and   eats 1.")
    same = texts("WHAT is  (2 + 3) * 4?", "Tom has 3 apples, and eats 1.", name="v")
    other = texts("What is 2 + (3 * 4)?", "Tom has 3 apples, and eats 2.", "Tom has 1 apples, and eats 3.", name="v")
    assert find_leakage(train, same)["overlap"]["exact"] == 2
    assert find_leakage(train, other)["overlap"]["tasks"] == 0


def test_nearly_the_same_is_found_and_another_question_of_the_same_template_is_not() -> None:
    asked = [*stories(300), STORY.format(a=70, b=25)]
    renamed = STORY.format(a=70, b=25).replace("Miller", "Smith").replace("small", "little")
    shuffled = [story.replace(" ", " really ", 1) for story in asked[:40]]
    found = find_leakage(texts(*asked), texts(renamed, STORY.format(a=71, b=25), *shuffled, *stories(400)[350:]))
    assert (found["overlap"]["exact"], found["overlap"]["near"]) == (0, 41)
    assert "41 of 92 tasks are also training tasks (in nearly the same words)" in found["alarms"][0]["message"]
    template = "You are the clerk of a shop with many shelves. Read the list, and be brief. Where do we keep the {}?"
    things = sorted({word for story in stories(5) for word in story.strip("?").split()})
    clerk = texts(*(template.format(thing) for thing in things))
    assert find_leakage(clerk[::2], clerk[1::2])["overlap"]["tasks"] == 0


def test_tasks_of_environments_and_questions_in_the_metadata_are_told_apart_by_the_rest() -> None:
    worlds = [Task(task_id=f"lake:{i}", env_type="lake", metadata={"split": "train"}) for i in range(60)]
    assert find_leakage(worlds[:40], worlds[40:])["overlap"]["tasks"] == 0
    again = [replace(world, metadata={"split": "validation"}) for world in worlds[30:50]]
    assert find_leakage(worlds[:40], again)["overlap"]["exact"] == 10
    rows = [Task(task_id=f"r{i}", main_query="Sort it.", metadata={"text": s}) for i, s in enumerate(stories(60))]
    assert find_leakage(rows[:40], rows[40:])["overlap"]["tasks"] == 0
    moved = [replace(row, task_id="other", metadata={**row.metadata, "id": 7}) for row in rows[:10]]
    assert find_leakage(rows[:40], moved + rows[40:])["overlap"]["exact"] == 10


def test_messages_are_part_of_the_question_whatever_they_hold() -> None:
    def asked(n: int, task_id: str) -> Task:
        parts = [{"type": "text", "text": f"picture {n}"}, {"type": "image_url", "image_url": {"url": f"{n}.png"}}]
        return Task(task_id=task_id, init_messages=({"role": "user", "content": parts}, {"role": "user"}))

    train, validation = [asked(n, f"t{n}") for n in range(30)], [asked(n, f"v{n}") for n in range(28, 40)]
    assert find_leakage(train, validation)["overlap"]["exact"] == 2
    assert find_leakage([], [])["plan"] == {}
    assert find_leakage(train, [])["overlap"] is None


# ------------------------------------------------------------------------------------------------------------- answers


def sums(count: int, form: str = "{q}", seed: int = 0) -> list[Task]:
    rng, tasks = random.Random(seed), []
    for i in range(count):
        a, b = rng.randrange(2, 60), rng.randrange(2, 60)
        q = f"What is {a} + {b}?"
        tasks.append(Task(task_id=f"{seed}-{i}", main_query=form.format(q=q, r=a + b), metadata={"answer": str(a + b)}))
    return tasks


@table(
    "form", ["{q} Answer: {r}", "{q} The correct answer is {r}.", "{q} #### {r}", "\\boxed{{{r}}} {q}", "{q} (key={r})"]
)
def test_an_answer_that_the_prompt_announces_is_named(form: str) -> None:
    told = find_leakage(sums(100) + sums(8, form, seed=3), sums(50, seed=1))
    (alarm,) = told["alarms"]
    assert alarm["rule"] == "answer_in_prompt"
    assert "8 of 108 train prompts announce their own reference answer (e.g. 3-0), " in alarm["message"]
    assert find_leakage(sums(50, seed=1), sums(100) + sums(8, form, seed=3))["alarms"] != []


def test_an_answer_in_any_words_is_named_where_one_split_alone_has_it() -> None:
    told = find_leakage(sums(100, "{r} will do. {q}"), sums(50, seed=1))
    assert (
        "100 % of the train prompts contain their own reference answer, compared with 0 % of the"
        in told["plan"]["answers"]
    )
    assert find_leakage(sums(100, "{r} will do. {q}"), sums(50, "{r} will do. {q}", seed=1))["plan"].keys() == {
        "held out"
    }


def labelled(form: str, labels: Sequence[str], count: int, seed: int) -> list[Task]:
    rng = random.Random(seed)
    label = [rng.choice(labels) for _ in range(count)]
    asked = [
        f"{form} {' '.join(rng.sample(['red', 'blue', 'dog', 'cat', 'sun', 'sea', 'hat', 'box'], 5))} {seed}{i}"
        for i in range(count)
    ]
    return [
        Task(task_id=f"{seed}-{i}", main_query=q, metadata={"answer": a})
        for i, (q, a) in enumerate(zip(asked, label, strict=True))
    ]


@table(
    ("form", "labels"),
    [
        ("Answer yes or no:", ("yes", "no")),
        ("The answer is yes if it is good, else no:", ("yes", "no")),
        ("Label: spam, ham or news. Example: result is spam.", ("spam", "ham", "news")),
        ("Answer: A, B, C or D?", tuple("abcd")),
    ],
)
def test_labels_that_a_prompt_lists_are_no_alarm_over_twenty_seeds(form: str, labels: Sequence[str]) -> None:
    alarms = [
        find_leakage(labelled(form, labels, 200, s), labelled(form, labels, 60, s + 99))["alarms"] for s in range(20)
    ]
    assert alarms == [[]] * 20


def test_answers_that_stand_in_a_passage_of_both_splits_are_no_alarm() -> None:
    passages = [s.strip("?").split() for s in stories(120)]
    tasks = [
        Task(task_id=str(i), main_query=f"{' '.join(p)}. Which?", metadata={"answer": p[7]})
        for i, p in enumerate(passages)
    ]
    assert find_leakage(tasks[:80], tasks[80:])["alarms"] == []


# --------------------------------------------------------------------------------------------------------------- a run

EXAMPLE = EXAMPLES / "math_agent" / "math_agent.yaml"
SAME = "astuner.task_reader.jsonl.validation.file_path=data/train.jsonl"


def test_the_plan_says_it_and_refuse_refuses() -> None:
    plan = run(EXAMPLE, [SAME], backbone="local", dry_run=True).plan
    assert plan is not None
    assert plan.lines["held out"].startswith(
        "NO. Validation is not held out: 2,000 of 2,000 tasks are also training tasks"
    )
    with pytest.raises(ConfigError, match=r"2,000 of 2,000 tasks .*, or set astuner\.data\.leakage=allow"):
        run(EXAMPLE, [SAME, "astuner.data.leakage=refuse"], backbone="local", dry_run=True)


@pytest.mark.slow
def test_a_run_says_it_at_its_start_in_its_files_and_in_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = {"total_steps": 1, "test_freq": 1, "val_before_train": "true", "resume_freq": 1}
    given = [
        SAME,
        f"astuner.experiment_dir={tmp_path}",
        "astuner.experiment_name=run",
        "astuner.data.train_batch_size=2",
    ]
    given += [f"astuner.trainer_common.{key}={value}" for key, value in common.items()]
    given += ["astuner.rollout.num_repeat=2", "astuner.data.max_validation_tasks=8"]
    told = run(EXAMPLE, given, backbone="local").summary()
    err = capsys.readouterr().err
    warned = err.index("WARNING (train_validation_overlap) step 0: Validation is not held out: 8 of 8 tasks are also")
    assert warned < err.index("validation success")
    run_dir = RunDir(tmp_path / "run")
    assert json.loads(run_dir.tasks.read_text())["overlap"]["exact"] == 8
    (alarm,) = [json.loads(line) for line in run_dir.alarms.read_text().splitlines()]
    assert (alarm["step"], alarm["rule"], alarm["severity"]) == (0, "train_validation_overlap", "warning")
    report = run_dir.report_md.read_text() + run_dir.report_html.read_text()
    assert "Validation success (8 of 8 tasks are also training tasks)" in report
    assert "held-out" not in (report + told).lower()
    assert "train_validation_overlap since step 0" in told
    allowed = [*given, "astuner.data.leakage=allow", "astuner.experiment_name=allowed"]
    run(EXAMPLE, allowed, backbone="local")
    assert not RunDir(tmp_path / "allowed").alarms.exists()
    assert "Validation success (8 of 8 tasks" in RunDir(tmp_path / "allowed").report_md.read_text()


@table(
    ("overlap", "verdict", "heading"),
    [
        (
            {"tasks": 0},
            "Learned: +50 points, p < 0.001 (held-out success 25.0 % to 75.0 %, 100 tasks)",
            "Held-out success |",
        ),
        (
            {"tasks": 40, "near": 3},
            "100 tasks); 40 of 100 tasks are also training tasks (3 of them in nearly the same words), so this",
            "Validation success (40 of 100 tasks are also training tasks (3 of them in nearly the same words)) |",
        ),
    ],
)
def test_held_out_is_earned_in_the_report(tmp_path: Path, overlap: dict[str, Any], verdict: str, heading: str) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.start()
    run_dir.resolved.write_text("astuner: {trainer_common: {optim: {lr: 0.001}}}")
    ends = [(0, 0.25), (1, 0.75)]
    rows = [
        {"step": s, "val/success": v, "val/success_ci_low": v - 0.1, "val/success_ci_high": v + 0.1, "val/tasks": 100.0}
        for s, v in ends
    ]
    rows.insert(
        1, {"step": 1, "reward/mean": 0.5, "tokens/trained": 9.0, "tokens/generated": 9.0, "tokens/trainable": 9.0}
    )
    run_dir.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_dir.tasks.write_text(json.dumps({"overlap": {"validation": 100, "near": 0, **overlap}}))
    facts = gather(run_dir)
    assert verdict in facts["verdict"]["text"]
    assert facts["verdict"]["level"] == ("warning" if overlap["tasks"] else "good")
    page = to_markdown(facts)
    assert heading in page.replace("\\", "")
    assert ("held-out" in page) is not bool(overlap["tasks"])
