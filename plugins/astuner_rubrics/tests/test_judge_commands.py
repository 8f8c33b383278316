"""`astuner judge learn` and `check`, as a person types them."""

import json
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from astuner.cli import main
from astuner.testing import ScriptedModel
from astuner_rubrics import measures
from astuner_rubrics.rubric_file import load_rubrics
from tests.table import table

from .true_rubric import TrueRubric

WORLD = {"source": 4, "example": 2, "polite": 1}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ASTUNER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def astuner(folder, capsys):
    def run(*arguments):
        """Exit code, stdout and stderr of a command."""
        with pytest.raises(SystemExit) as e:
            main([str(a) for a in arguments])
        said = capsys.readouterr()
        return e.value.code or 0, said.out, said.err

    return run


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path.name


def options(server):
    return ("--base-url", server.base_url, "--model", "scripted")


def test_the_command_teaches(astuner):
    code, out, err = astuner("judge")
    text = out + err
    assert code in (0, 2)
    for word in ("astuner judge learn SAMPLES.jsonl", "astuner judge check JUDGE", '"preferred": 0', "rubrics.yaml"):
        assert word in text
    code, out, _ = astuner("judge", "learn", "--help")
    assert code == 0
    assert "OUT.journal.jsonl" in out


@pytest.mark.slow
def test_learn_then_check_then_edit(astuner, folder):
    world = TrueRubric(WORLD)
    rows = world.samples(60)
    samples, labels = write(folder / "s.jsonl", rows[:30]), write(folder / "l.jsonl", rows[30:])
    with ScriptedModel(world) as server:
        code, out, err = astuner("judge", "learn", samples, *options(server))
        assert (code, "agreement on held-out examples: 100 %" in out) == (0, True)
        assert "21 pairwise training examples, 9 held out" in err
        code, out, _ = astuner("judge", "check", "rubrics.yaml", "--labels", labels, *options(server),
                               "--strict", "--out", "card.html")  # fmt: skip
        assert out.startswith("# rubrics.yaml: fit\n")
        assert code == 0
        assert "agreement when learned: 100 %" in out
        assert (folder / "card.html").read_text().startswith("<!doctype html>")
        text = (folder / "rubrics.yaml").read_text()
        (folder / "rubrics.yaml").write_text(text.replace("The answer ", "The answer openly "))
        code, out, _ = astuner("judge", "check", "rubrics.yaml", "--labels", labels, *options(server), "--json",
                               "--attacks", "0", "--repeats", "1")  # fmt: skip
        assert "edited after learning" in json.loads(out)["notes"][1]
    assert not list(folder.glob(".*")), "nothing is left behind"


@pytest.mark.slow
def test_labels_that_were_learned_from_are_left_out_of_the_card(astuner, folder):
    world = TrueRubric(WORLD)
    rows = world.samples(50)
    for number, row in enumerate(rows[30:]):
        row["question"] = f"Somebody moves to place{number} and should read this first:"
    samples = write(folder / "s.jsonl", rows[:30])
    quick = ("--attacks", "0", "--repeats", "1", "--json")
    with ScriptedModel(world) as server:
        assert astuner("judge", "learn", samples, *options(server))[0] == 0
        learned = load_rubrics(folder / "rubrics.yaml").learned
        held_out = {int(place.partition(":")[2]) - 1 for place in learned.held_out}
        seen = [row for i, row in enumerate(rows[:30]) if i not in held_out]
        assert len(learned.prints) == len(seen) == 21
        near = [{**row, "answers": [f"{row['answers'][0]} Yes.", row["answers"][1]]} for row in seen[:2]]
        labels = write(folder / "l.jsonl", [*rows, *near])
        code, out, _ = astuner("judge", "check", "rubrics.yaml", "--labels", labels, *options(server), *quick)
        card = json.loads(out)
        assert code == 0
        near_too = card["labels"]["left_out_near"] - 2  # of the nine held out: the same town with another number
        assert 0 <= near_too < 5
        assert card["labels"]["left_out_learned_from"] == 21
        assert card["labels"]["n"] == 52 - 21 - 2 - near_too
        assert f"{23 + near_too} of 52 labels were left out: 21 are training examples" in out
        assert not [body for body in server.requests[-200:] if " Yes." in body["messages"][1]["content"]]

        only_seen = write(folder / "seen.jsonl", [*seen[::-1], *near])
        code, out, err = astuner("judge", "check", "rubrics.yaml", "--labels", only_seen, *options(server), *quick)
        assert (code, out) == (1, "")
        assert "was learned from these labels (or from near duplicates of 2 of them)" in err

        text = (folder / "rubrics.yaml").read_text()
        (folder / "rubrics.yaml").write_text(text[: text.index("  prints:")])
        code, out, _ = astuner("judge", "check", "rubrics.yaml", "--labels", labels, *options(server), *quick)
        assert json.loads(out)["labels"]["n"] == 52
        assert "does not list its training examples" in out


def test_learn_again_pays_for_nothing_and_says_json(astuner, folder):
    world = TrueRubric(WORLD)
    samples = write(folder / "s.jsonl", world.samples(20))
    with ScriptedModel(world) as server:
        first = astuner("judge", "learn", samples, *options(server), "--json")
        asked = len(server.requests)
        again = astuner("judge", "learn", samples, *options(server), "--json")
        assert len(server.requests) == asked
    one, two = json.loads(first[1]), json.loads(again[1])
    assert (one["spent"]["asked"], two["spent"]["asked"]) == (asked, 0)
    assert one["rubrics"] == two["rubrics"]


def test_a_dry_run_asks_nobody_and_is_an_honest_bound(astuner, folder):
    world = TrueRubric(WORLD)
    samples = write(folder / "s.jsonl", world.samples(30))
    code, out, _ = astuner("judge", "learn", samples, "--dry-run", "--json")
    assert code == 0
    estimate = json.loads(out)
    assert "requests of about" in astuner("judge", "learn", samples, "--dry-run")[1]
    with ScriptedModel(world) as server:
        astuner("judge", "learn", samples, *options(server))
        assert estimate["fewest_requests"] <= len(server.requests) <= estimate["most_requests"]


def test_what_cannot_be_learned_leaves_no_file_unless_it_is_forced(astuner, folder):
    world = TrueRubric(WORLD)
    samples = write(folder / "s.jsonl", world.samples(9))
    with ScriptedModel(world) as server:
        code, out, err = astuner("judge", "learn", samples, *options(server))
        assert (code, out) == (1, "")
        assert "add 5 more" in err
        assert not (folder / "rubrics.yaml").exists()
        assert server.requests == []
        code, out, _ = astuner("judge", "learn", samples, *options(server), "--force")
        assert code == 0
        assert "warning: s.jsonl: 9 examples are not enough" in out
    assert "9 examples are not enough" in load_rubrics(folder / "rubrics.yaml").learned.warnings[0]


def test_agreement_that_may_be_chance_is_refused(astuner, folder):
    world = TrueRubric(WORLD)
    rows = world.samples(30)
    for row in rows[::2]:
        row["preferred"] = 1 - row["preferred"]
    samples = write(folder / "s.jsonl", rows)
    with ScriptedModel(world) as server:
        code, _, err = astuner("judge", "learn", samples, *options(server))
    assert code == 1
    assert "chance" in err
    assert "no file was written; pass --force" in err
    assert not (folder / "rubrics.yaml").exists()


@table(
    ("arguments", "says"),
    [
        (("learn", "s.jsonl"), "--base-url URL --model NAME"),
        (("learn", "s.jsonl", "--model", "m"), "--base-url URL is missing"),
        (("learn", "s.jsonl", "--base-url", "http://127.0.0.1:1/v1"), "--model NAME is missing"),
        (("learn", "s.jsonl", "--base-url", "ftp://x", "--model", "m"), "--base-url: "),
        (("learn", "s.jsonl", "--base-url", "http://127.0.0.1:1/v1", "--model", "m", "--api-key-env", "sk-secret"),
         "--api-key-env: "),
        (("learn", "no.jsonl", "--dry-run"), "no.jsonl: cannot read"),
        (("learn", "s.jsonl", "--dry-run", "--scale", "5", "1"), "the worst grade must be below the best"),
        (("check", "nothing", "--labels", "s.jsonl"), "unknown judge 'nothing'"),
        (("check", "math_answr", "--labels", "s.jsonl"), "unknown judge 'math_answr'; did you mean math_answer?"),
        (("check", "r.yaml", "--labels", "s.jsonl"), "--base-url URL --model NAME"),
        (("check", "llm_judge", "--labels", "s.jsonl"), "--base-url URL --model NAME"),
        (("check", "llm_judge", "--labels", "s.jsonl", "--base-url", "http://127.0.0.1:1/v1", "--model", "m"),
         "criteria is required; pass --set astuner.task_judge.llm_judge.criteria=VALUE or --config FILE"),
        (("learn", "s.jsonl", "--out", "s.jsonl", "--overwrite", "--base-url", "http://127.0.0.1:1/v1", "--model", "m"),
         "--out s.jsonl: is an input of this command"),
        (("learn", "s.jsonl", "--out", "r.yaml", "--base-url", "http://127.0.0.1:1/v1", "--model", "m"),
         "was written manually; use another file, or add --overwrite"),
        (("check", "no.yaml", "--labels", "s.jsonl"), "no.yaml: cannot read"),
        (("check", "math_answer", "--labels", "s.jsonl", "--out", "c.pdf"), ".md, .html or .json"),
        (("check", "rubrics", "--labels", "s.jsonl"), "file is required"),
    ],
)  # fmt: skip
def test_mistakes_are_said_with_what_to_type(astuner, folder, arguments, says):
    write(folder / "s.jsonl", TrueRubric(WORLD).samples(20))
    (folder / "r.yaml").write_text("mode: pairwise\nscale: [0, 1]\nrubrics:\n- criterion: The answer has a source.\n")
    code, out, err = astuner("judge", *arguments)
    assert code in (1, 2)
    assert says in err
    assert out == ""
    assert "sk-secret" not in err
    assert "astuner-judge-" not in err, "no file is named that the person did not write"


@pytest.mark.slow
def test_rubrics_are_not_written_over_what_a_person_made(astuner, folder):
    world = TrueRubric(WORLD)
    samples = write(folder / "s.jsonl", world.samples(20))
    with ScriptedModel(world) as server:
        models = {"one": {"base_url": server.base_url, "model": "m"}}
        (folder / "e.yaml").write_text(json.dumps({"astuner": {"model": {"path": "unused"}, "helper_models": models}}))
        (folder / "notes.txt").write_text("mine")
        for out, more, says in (
            (samples, ("--overwrite",), "is an input of this command"),
            ("e.yaml", ("--overwrite",), "is an input of this command"),
            ("notes.txt", (), "exists and is not a rubric file; use another file, or add --overwrite"),
        ):
            before = (folder / out).read_bytes()
            code, _, err = astuner("judge", "learn", samples, "--config", "e.yaml", "--out", out, *more)
            assert (code, says in err) == (2, True), err
            assert (folder / out).read_bytes() == before
        assert server.requests == []
        rubrics = folder / "rubrics.yaml"
        for _ in range(2):
            assert astuner("judge", "learn", samples, "--config", "e.yaml")[0] == 0, "unedited rubrics are replaced"
        learned = rubrics.read_text()
        rubrics.write_text(learned.replace("The answer ", "The answer openly "))
        code, _, err = astuner("judge", "learn", samples, "--config", "e.yaml")
        assert (code, "was edited after learning; use another file, or add --overwrite" in err) == (2, True)
        assert "openly" in rubrics.read_text()
        assert astuner("judge", "learn", samples, "--config", "e.yaml", "--overwrite")[0] == 0
        assert rubrics.read_text() == learned
        code, out, err = astuner("judge", "check", "rubrics.yaml", "--labels", samples, "--config", "e.yaml")
        assert (code, out) == (1, "")
        assert "was learned from these labels" in err
        code, out, err = astuner("judge", "check", "rubrics", "--labels", samples, "--config", "e.yaml", "--set",
                                 "astuner.task_judge.rubrics.file=rubrics.yaml", "--set",
                                 "astuner.task_judge.rubrics.helper_model=one")  # fmt: skip
        assert (code, "was learned from these labels" in err) == (1, True)


def test_ctrl_c_says_how_to_go_on(astuner, folder, monkeypatch):
    async def stopped(*arguments):
        raise KeyboardInterrupt

    samples = write(folder / "s.jsonl", TrueRubric(WORLD).samples(20))
    monkeypatch.setattr("astuner_rubrics.learning.learn", stopped)
    code, _, err = astuner("judge", "learn", samples, "--base-url", "http://127.0.0.1:1/v1", "--model", "m")
    assert code != 0
    assert "stopped; to continue, repeat the command\n" in err


def test_a_helper_that_is_down_says_that_nothing_is_lost(astuner, folder):
    samples = write(folder / "s.jsonl", TrueRubric(WORLD).samples(20))
    with ScriptedModel(lambda body: (401, {"error": {"message": "who are you"}})) as server:
        code, _, err = astuner("judge", "learn", samples, *options(server))
    assert code == 1
    assert "the helper model cannot be used (" in err
    assert "stopped after 0 of 10 answers and 2 failures" in err
    assert "repeat the command" in err
    assert "journal" not in err, "there is none yet"
    assert ": 10 of 10" not in err
    assert not (folder / "rubrics.yaml").exists()


def test_over_budget_stops_and_a_larger_budget_goes_on_without_paying_twice(astuner, folder):
    world = TrueRubric(WORLD)
    samples = write(folder / "s.jsonl", world.samples(20))
    with ScriptedModel(world) as server:

        def learn(budget):
            helper = {"base_url": server.base_url, "model": "m", "concurrency": 1, "budget_tokens": budget,
                      "max_tokens": 64, "cache": False}  # fmt: skip
            experiment = {"model": {"path": "unused"}, "helper_models": {"small": helper}}
            (folder / "e.yaml").write_text(json.dumps({"astuner": experiment}))
            return astuner("judge", "learn", samples, "--config", "e.yaml")

        code, _, err = learn(6_000)
        assert code == 2
        assert "budget" in err
        assert "repeat the command" in err
        paid = len(server.requests)
        assert 0 < paid < 40
        kept = len((folder / "rubrics.yaml.journal.jsonl").read_text().splitlines())
        assert kept == paid
        code, _, err = learn(10_000_000)
        assert code == 0
        assert f", {kept} from the journal" in err
    bodies = [json.dumps(body) for body in server.requests]
    assert len(set(bodies)) == len(bodies)


@pytest.mark.slow
def test_killed_in_the_middle_it_goes_on_from_there(astuner, folder):
    world = TrueRubric(WORLD)
    samples = write(folder / "s.jsonl", world.samples(30))
    enough = threading.Event()

    def script(body):
        if len(server.requests) > 40:
            enough.set()
        return world(body)

    with ScriptedModel(script) as server:
        command = [sys.executable, "-m", "astuner", "judge", "learn", samples, *options(server)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            assert enough.wait(120)
            process.kill()
        assert not (folder / "rubrics.yaml").exists()
        asked = len(server.requests)
        code, _, err = astuner("judge", "learn", samples, *options(server), "--json")
        assert code == 0
    bodies = [json.dumps(body) for body in server.requests]
    assert len(bodies) - len(set(bodies)) <= 8, "only what was on its way when it was killed is asked again"
    assert load_rubrics(folder / "rubrics.yaml").learned.agreement.share == 1.0
    assert asked < len(bodies)
    assert " from the journal" in err


def test_a_judge_without_a_helper_model_is_checked_as_well(astuner, folder):
    rows = []
    for i in range(24):
        right = i % 2
        rows.append({"question": f"{i} + 1?", "answer": f"\\boxed{{{i + 1 if right else i}}}", "score": right,
                     "reference": str(i + 1)})  # fmt: skip
    labels = write(folder / "l.jsonl", rows)
    code, out, _ = astuner("judge", "check", "math_answer", "--labels", labels, "--json", "--out", "card.md")
    card = json.loads(out)
    assert code == 0
    assert card["measures"]["accuracy"]["value"] == 1.0
    assert card["measures"]["attack_success"]["value"] == card["measures"]["attack_excess"]["value"] == 0.0
    assert card["measures"]["neutral_moves"]["value"] == 0.0
    assert card["verdict"] == "fit"
    assert (folder / "card.md").read_text().startswith("# math_answer: fit")


@pytest.mark.slow
def test_strict_fails_for_code_of_the_users_own_that_is_not_fit(astuner, folder):
    (folder / "mine.py").write_text(
        "from astuner import Judge, JudgeOutput\n"
        "class Longest(Judge):\n"
        "    def judge(self, workflow_task, output):\n"
        "        return JudgeOutput(reward=len(output.response) / 1000)\n"
    )
    labels = write(folder / "l.jsonl", TrueRubric({"polite": 1}).samples(30))
    code, out, _ = astuner("judge", "check", "mine.py->Longest", "--labels", labels, "--strict")
    assert code == 1
    assert "do not use" in out.splitlines()[0]
    code, _, _ = astuner("judge", "check", "mine.py->Longest", "--labels", labels)
    assert code == 0


def test_a_rubric_file_is_checked_with_the_models_of_an_experiment(astuner, folder):
    world = TrueRubric({"source": 1}, mode="pointwise")
    labels = write(folder / "l.jsonl", world.samples(30))
    (folder / "r.yaml").write_text(
        "mode: pointwise\nscale: [0, 1]\nrubrics:\n- criterion: The answer names a source for what it claims.\n"
    )
    with ScriptedModel(world) as server:
        models = {name: {"base_url": server.base_url, "model": name} for name in ("one", "two")}
        for used in (("one",), ("one", "two")):
            experiment = {"model": {"path": "unused"}, "helper_models": {name: models[name] for name in used}}
            (folder / "e.yaml").write_text(json.dumps({"astuner": experiment}))
            code, out, err = astuner("judge", "check", "r.yaml", "--labels", labels, "--config", "e.yaml", "--json",
                                     "--attacks", 0, "--repeats", 1)  # fmt: skip
            if used == ("one",):
                assert code == 0
                assert "written manually" in json.loads(out)["notes"][1]
        assert code == 2
        assert "available: one, two" in err
        code, out, _ = astuner(
            "judge", "check", "r.yaml", "--labels", labels, "--config", "e.yaml", "--json", "--attacks", 0,
            "--repeats", 1, "--set", "astuner.task_judge.rubrics.helper_model=two",
        )  # fmt: skip
        assert code == 0
        assert {body["model"] for body in server.requests} == {"one", "two"}


PAGE = Path(__file__).parents[3] / "docs" / "rubrics_judge.md"


@pytest.mark.slow
def test_the_commands_of_the_page_run(astuner, folder):
    """Every command in a block of the page, in its order, against a helper that reads."""
    page = PAGE.read_text(encoding="utf-8")
    commands = [line for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    world = TrueRubric(WORLD)
    rows = world.samples(50)
    write(folder / "samples.jsonl", rows[:30])
    write(folder / "labels.jsonl", [{**row, "reference": "4"} for row in rows[30:]])

    def helper(body):
        content = body["messages"][-1]["content"]
        return {"reason": "", "score": 1 if "Source:" in content else 0} if "criteria?" in content else world(body)

    assert len(commands) == 6
    with ScriptedModel(helper) as server:
        experiment = {
            "model": {"path": "unused"},
            "task_judge": {"judge": "llm_judge", "llm_judge": {"helper_model": "checker", "criteria": "a source"}},
            "helper_models": {"checker": {"base_url": server.base_url, "model": "NAME"}},
        }
        (folder / "experiment.yaml").write_text(json.dumps({"astuner": experiment}))
        for command in commands:
            words = shlex.split(command.replace("http://127.0.0.1:8000/v1", server.base_url))
            code, out, err = astuner(*words[1:])
            is_fit = ": fit" in out.partition("\n")[0]
            assert code == (1 if "--strict" in words and not is_fit else 0), (command, err)
            assert out, command
    assert {"rubrics.yaml", "card.html", "card.md"} <= {p.name for p in folder.iterdir()}


def test_the_file_of_the_page_and_its_limits_are_those_there_are(folder):
    page = PAGE.read_text(encoding="utf-8")
    (folder / "r.yaml").write_text(re.search(r"<!-- file: rubrics.yaml -->\n```yaml\n(.*?)```", page, re.DOTALL)[1])
    assert [r.weight for r in load_rubrics(folder / "r.yaml").rubrics] == [2.0, 1.0]
    found = re.findall(r"^\| (\w[^|]*) \|[^|]*\|([^|]*)\|([^|]*)\|$", page, re.MULTILINE)
    rows = {name: (care, bad) for name, care, bad in found}
    limits = {"agreement": measures.AGREEMENT, "length": measures.LENGTH, "order": measures.FLIPS,
              "padding": measures.RISES, "self-consistency": measures.CONSISTENCY, "attacks": measures.SUCCESSES,
              "no verdict": measures.ABSTENTIONS}  # fmt: skip
    for name, limit in limits.items():
        for said, meant in zip(rows[name], (limit.care, limit.bad), strict=True):
            number = re.search(r"[\d.]+( %)?", said)
            assert float(number[0].rstrip(" %")) / (100 if number[1] else 1) == pytest.approx(meant), name
