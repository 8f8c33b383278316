"""What a model may write to break its judge: nothing hangs, nothing is executed, and the next answer is judged."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from astuner import JudgeOutput, Task, WorkflowOutput, WorkflowTask
from astuner.contracts.errors import JudgeFailed
from astuner_math import limited
from astuner_math.judges import MathAnswerAsJudge, MathAnswerConfig
from astuner_math.limited import LimitedEquality

CANARY = "CANARY"
HOSTILE = {
    "power tower": "9**9**9",
    "power tower, LaTeX": "9^{9^{9^{9}}}",
    "big power": "2^{999999999999}",
    "factorial": "factorial(10**9)",
    "factorial, LaTeX": r"(10^{9})!",
    "factorials": "5!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!",
    "binomial": r"\binom{10^{12}}{10^{6}}",
    "import": f"__import__('os').system('touch {CANARY}')",
    "import, text": rf"\text{{__import__('os').system('touch {CANARY}')}}",
    "open": f"open('{CANARY}','w').write('x')",
    "operatorname": rf"\operatorname{{open}}('{CANARY}','w')",
    "class walk": "().__class__.__base__.__subclasses__()",
    "lambda": "(lambda: [0]*10**10)()",
    "write18": rf"\immediate\write18{{touch {CANARY}}}",
    "parentheses": "(" * 900 + "1" + ")" * 900,
    "nested fractions": r"\frac{1}{" * 150 + "2" + "}" * 150,
    "nested roots": r"\sqrt{" * 150 + "2" + "}" * 150,
    "open braces": "{" * 5,
    "backslashes": "\\" * 999,
    "minus signs": "-" * 1500 + "1",
    "sum": r"\sum_{n=1}^{10^{12}} \frac{1}{n}",
    "product": r"\prod_{n=1}^{10^{9}} n",
    "integral": r"\int_0^1 e^{e^{e^{x}}} \sin(x^x) dx",
    "matrix power": r"\begin{pmatrix}1&1\\1&0\end{pmatrix}^{10^{10}}",
    "expand": "(x+y+z+w)^{200}(x-y)^{200}",
    "digits": "1" * 1900 + "x",
    "decimals": "0." + "0" * 1900 + "1x",
    "nulls": "\0\0\0x",
    "surrogate": "\ud800 x",
    "right to left": "\u202e5x",
    "long": "x" * 1_000_000,
    "many boxes": r"\boxed{" * 100_000,
    "unbalanced": "}" * 500_000 + "{" * 500_000,
    "dollars": "$" * 1999,
    "percent": "%" * 1999,
}


def attempt(reference: str, answer: str) -> tuple[WorkflowTask, WorkflowOutput]:
    task = WorkflowTask(task=Task(task_id="t", metadata={"answer": reference}), episode_id="e", group_id="g")
    return task, WorkflowOutput(metadata={"final_answer": rf"\boxed{{{answer}}}"})


@pytest.fixture(scope="module")
def judge():
    judge = MathAnswerAsJudge(MathAnswerConfig(processes=1, cpu_seconds=0.4))
    yield judge
    judge.close()


def ask(judge: MathAnswerAsJudge, reference: str, answer: str) -> JudgeOutput:
    return asyncio.run(judge.judge(*attempt(reference, answer)))


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_answer_is_wrong_and_harmless(judge, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = HOSTILE[name].replace(CANARY, str(tmp_path / CANARY))
    assert ask(judge, "x+1", answer).reward == 0.0
    assert list(tmp_path.iterdir()) == []


def test_after_all_that_the_judge_still_judges(judge):
    assert ask(judge, "x+1", "1+x").reward == 1.0


def test_running_out_of_cpu_time_is_wrong_and_counted(judge):
    verdict = ask(judge, "x+1", HOSTILE["parentheses"])
    assert (verdict.reward, verdict.metrics["timeout"]) == (0.0, 1.0)


@pytest.mark.slow
def test_a_child_killed_from_outside_costs_one_more_try():
    equality = LimitedEquality(processes=1)
    assert equality.submit("x+1", "1+x").result().equal
    (child,) = equality.children
    os.kill(child, signal.SIGKILL)
    assert equality.submit("x+1", "1+x").result() == limited.Comparison(equal=True)
    assert equality.children != (child,)
    equality.close()
    assert equality.children == ()


def test_a_reference_that_kills_the_child_is_not_the_candidates_fault(judge):
    with pytest.raises(JudgeFailed, match=r"task 't'.*parsing the reference.*SIGPROF"):
        ask(judge, HOSTILE["parentheses"], "5")


def test_a_child_that_cannot_start_is_not_the_candidates_fault(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    equality = LimitedEquality(processes=1)
    with pytest.raises(JudgeFailed, match="could not start"):
        equality.submit("x+1", "1+x").result()
    equality.close()


def test_a_child_without_math_verify_says_so(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    equality = LimitedEquality(processes=1)
    with pytest.raises(JudgeFailed, match=r"did not start \(ModuleNotFoundError.*pip install"):
        equality.submit("x+1", "1+x").result()
    assert equality.children == ()
    equality.close()


def test_a_machine_too_slow_to_judge_is_not_the_candidates_fault(monkeypatch):
    equality = LimitedEquality(processes=1, cpu_seconds=30)
    equality.submit("x+1", "1+x").result()
    monkeypatch.setattr(limited, "_WALL_PER_CPU_SECOND", 0.005)
    with pytest.raises(JudgeFailed, match="overloaded"):
        equality.submit("x+1", HOSTILE["parentheses"]).result()
    equality.close()


def test_a_closed_pool_refuses():
    equality = LimitedEquality(processes=1)
    equality.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        equality.submit("x", "y")


PROBE = """
import json, os, subprocess, sys
sys.path.insert(0, {folder!r})
import worker
worker._give_up_rights(1 << 30)
def refused(action):
    try:
        action()
    except (OSError, MemoryError) as e:
        return True
    return False
print(json.dumps([
    refused(lambda: open({file!r}, "w")),
    refused(lambda: os.system("true")),
    refused(lambda: subprocess.run(["true"])),
    refused(lambda: os.remove({kept!r})),
    refused(lambda: __import__("socket").create_connection(("127.0.0.1", 9))),
    refused(lambda: bytearray(2 << 30)) if sys.platform == "linux" else True,
    bool(open({kept!r}).read()),
]))
"""


def test_even_code_that_ran_in_the_child_could_do_nothing(tmp_path):
    """Nothing a model writes is executed; should that ever fail, this is the second wall."""
    kept = tmp_path / "kept"
    kept.write_text("still here")
    folder = str(Path(limited.__file__).parent)
    probe = PROBE.format(folder=folder, file=str(tmp_path / "new"), kept=str(kept))
    done = subprocess.run([sys.executable, "-I", "-B", "-c", probe], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [True] * 7
    assert not (tmp_path / "new").exists()


def test_the_child_sees_no_environment(monkeypatch):
    monkeypatch.setenv("SECRET_API_KEY", "s3cret")
    equality = LimitedEquality(processes=1)
    equality.submit("x+1", "1+x").result()
    if sys.platform == "linux":
        (child,) = equality.children
        assert b"s3cret" not in Path(f"/proc/{child}/environ").read_bytes()
    equality.close()
