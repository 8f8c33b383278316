"""What a newcomer gets wrong: each mistake is answered with what it is, where it stands in their files, and what next.

The mistakes of files are found by `astuner config check`, those of running code by `astuner run --backbone debug`.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from astuner.cli import main

YAML = """\
astuner:
  model:
    path: tiny-calculator
  task_reader:
    type: jsonl
    jsonl:
      training:
        file_path: data/train.jsonl
  data:
    train_batch_size: 2
  rollout:
    workflow: workflow.py->MyAgent
    num_repeat: 4
    temperature: 1.0
    max_model_len: 512
    max_response_length_in_one_turn: 16
    episode_timeout: 120
  task_judge:
    judge: null
"""
WORKFLOW = """\
from astuner import Workflow, WorkflowOutput


class MyAgent(Workflow):
    async def execute(self, workflow_task, model_tuner):
        task = workflow_task.task
        reply = await model_tuner.chat([{"role": "user", "content": task.main_query}])
        right = task.metadata["answer"] in reply.text
        return WorkflowOutput(reward=float(right))
"""
JUDGE = """\
from astuner import Judge, JudgeOutput


class MyJudge(Judge):
    def judge(self, workflow_task, output):
        return JudgeOutput(reward=1.0)
"""
DATA = "".join(json.dumps({"question": f"What is {n} + {n}?", "answer": str(2 * n)}) + "\n" for n in range(1, 5))
LAST = "        return WorkflowOutput(reward=float(right))\n"
JUDGED = {
    "my.yaml": ("judge: null", "judge: judge.py->MyJudge"),
    "workflow.py": (LAST, LAST.replace("reward=float(right)", "")),
}


def body(text: str) -> dict[str, tuple[str, str]]:
    """The workflow's last line, in other words."""
    return {"workflow.py": (LAST, "".join(f"        {line}\n" for line in text.split("\n")))}


@dataclass(frozen=True)
class Mistake:
    what: str
    edits: Mapping[str, str | bytes | tuple[str, str] | None]
    """File -> its whole text, None for no such file, or (old text, new text)."""
    says: tuple[str, ...]
    at: tuple[str, str] = ("", "")
    """The file and the text of the line that is to be named."""
    arguments: tuple[str, ...] = ("config", "check", "my.yaml")


RUN = ("run", "my.yaml", "--backbone", "debug", "astuner.debug.debug_first_n_tasks=1")
LOCAL = ("config", "check", "my.yaml", "--backbone", "local")


FILES = (
    Mistake(
        "a misspelt key",
        {"my.yaml": ("num_repeat:", "num_repeats:")},
        ("unknown key astuner.rollout.num_repeats", "did you mean num_repeat?"),
        ("my.yaml", "num_repeats"),
    ),
    Mistake(
        "a misspelt section",
        {"my.yaml": ("  rollout:", "  rolout:")},
        ("astuner.rolout", "did you mean rollout?"),
        ("my.yaml", "rolout:"),
    ),
    Mistake(
        "a key in the wrong place",
        {"my.yaml": ("  rollout:", "  num_repeat: 8\n  rollout:")},
        ("unknown key astuner.num_repeat", "astuner.rollout.num_repeat"),
        ("my.yaml", "num_repeat: 8"),
    ),
    Mistake(
        "everything one level too high",
        {"my.yaml": YAML.replace("astuner:\n", "").replace("\n  ", "\n").removeprefix("  ")},
        ("section astuner: is missing", "below astuner:"),
        ("my.yaml", ""),
    ),
    Mistake(
        "a word for a number",
        {"my.yaml": ("num_repeat: 4", "num_repeat: four")},
        ("astuner.rollout.num_repeat should be an integer, got 'four'",),
        ("my.yaml", "four"),
    ),
    Mistake(
        "a number out of range",
        {"my.yaml": ("temperature: 1.0", "temperature: -1")},
        ("astuner.rollout.temperature should be at least 0, got -1",),
        ("my.yaml", "-1"),
    ),
    Mistake(
        "yes for a number",
        {"my.yaml": ("num_repeat: 4", "num_repeat: yes")},
        ("astuner.rollout.num_repeat should be", "got True"),
        ("my.yaml", "yes"),
    ),
    Mistake("a tab in YAML", {"my.yaml": ("    num_repeat", "\tnum_repeat")}, ("tab", "spaces"), ("my.yaml", "\tnum")),
    Mistake(
        "a quote that is not closed",
        {"my.yaml": ("path: tiny-calculator", "path: 'tiny-calculator")},
        ("quote",),
        ("my.yaml", "'tiny"),
    ),
    Mistake(
        "a colon without a space",
        {"my.yaml": ("num_repeat: 4", "num_repeat:4")},
        ("not YAML", "with a space after the colon"),
        ("my.yaml", "num_repeat:4"),
    ),
    Mistake(
        "a key twice",
        {"my.yaml": ("    num_repeat: 4", "    num_repeat: 4\n    num_repeat: 8")},
        ("num_repeat", "twice"),
        ("my.yaml", "num_repeat: 8"),
    ),
    Mistake("an empty file", {"my.yaml": ""}, ("file is empty", "astuner new experiment NAME")),
    Mistake(
        "a file that is not there",
        {},
        ("mine.yaml", "no such file", "files in .: my.yaml"),
        arguments=("config", "check", "mine.yaml"),
    ),
    Mistake(
        "a misspelt backbone",
        {},
        ("unknown backbone 'locl'", "did you mean local?"),
        arguments=("config", "check", "my.yaml", "--backbone", "locl"),
    ),
    Mistake(
        "a misspelt judge",
        {"my.yaml": ("judge: null", "judge: weigthed")},
        ("unknown judge 'weigthed'", "did you mean weighted?"),
        ("my.yaml", "weigthed"),
    ),
    Mistake(
        "a misspelt reader",
        {"my.yaml": ("type: jsonl", "type: jsnl")},
        ("unknown task reader 'jsnl'", "did you mean jsonl?"),
        ("my.yaml", "jsnl"),
    ),
    Mistake(
        "a misspelt model",
        {"my.yaml": ("tiny-calculator", "tiny-calculater")},
        ("astuner.model.path", "tiny-calculater", "did you mean tiny-calculator?"),
        ("my.yaml", "tiny-calculater"),
    ),
    Mistake(
        "a model folder that is not there",
        {"my.yaml": ("tiny-calculator", "./models/mine")},
        ("astuner.model.path", "models/mine", "no such folder"),
        ("my.yaml", "models/mine"),
    ),
    Mistake(
        "a model folder without a model",
        {"my.yaml": ("tiny-calculator", "./data")},
        ("astuner.model.path", "config.json"),
        ("my.yaml", "./data"),
    ),
    Mistake(
        "more context than the model has",
        {"my.yaml": ("max_model_len: 512", "max_model_len: 13000")},
        ("astuner.rollout.max_model_len is 13000", "2048 tokens", "2048 or less"),
        ("my.yaml", "13000"),
    ),
    Mistake(
        "nothing to compare in a group",
        {"my.yaml": ("num_repeat: 4", "num_repeat: 1")},
        ("astuner.rollout.num_repeat is 1", "set 2 or more"),
        ("my.yaml", "num_repeat: 1"),
        LOCAL,
    ),
    Mistake(
        "data that is not there",
        {"my.yaml": ("data/train", "data/tran")},
        ("cannot read the train tasks in", "data/tran.jsonl", "did you mean train.jsonl?"),
        ("my.yaml", "data/tran"),
    ),
    Mistake(
        "data that is not at home",
        {"my.yaml": ("data/train.jsonl", "~/no_such_tasks.jsonl")},
        ("file_path: cannot read the train tasks in", "/no_such_tasks.jsonl", "correct file_path"),
        ("my.yaml", "~/no_such"),
    ),
    Mistake(
        "a folder for data",
        {"my.yaml": ("data/train.jsonl", "data")},
        ("set file_path to a file, not a folder",),
        ("my.yaml", "path: data"),
    ),
    Mistake(
        "data without a line",
        {"data/train.jsonl": ""},
        ("data/train.jsonl contains no tasks", "empty"),
        ("my.yaml", "data/train"),
    ),
    Mistake(
        "a broken line",
        {"data/train.jsonl": ('"4"}', '"4"')},
        ("not JSON at column", "one JSON object in UTF-8", "astuner.data.on_bad_line: skip"),
        ("data/train.jsonl", '"4"'),
    ),
    Mistake(
        "an empty line",
        {"data/train.jsonl": ('"4"}', '"4"}\n')},
        ("the line is empty", "on_bad_line: skip"),
        ("data/train.jsonl", "\n"),
    ),
    Mistake(
        "a line without a question",
        {"data/train.jsonl": ('"question": "What is 2', '"frage": "What is 2')},
        ("query_field", "frage"),
        ("data/train.jsonl", "frage"),
    ),
    Mistake(
        "a list for a task",
        {"data/train.jsonl": ('{"question": "What is 2 + 2?", "answer": "4"}', "[1, 2]")},
        ("object",),
        ("data/train.jsonl", "[1, 2]"),
    ),
    Mistake(
        "NaN in the data",
        {"data/train.jsonl": ('"answer": "4"', '"answer": NaN')},
        ("NaN is not valid JSON", "write null"),
        ("data/train.jsonl", "NaN"),
    ),
    Mistake(
        "data in another encoding",
        {"data/train.jsonl": '{"question": "Wie spät?"}\n'.encode("latin-1")},
        ("is not UTF-8",),
        ("data/train.jsonl", "Wie"),
    ),
    Mistake(
        "no workflow",
        {"my.yaml": ("    workflow: workflow.py->MyAgent\n", "")},
        ("astuner.rollout.workflow is required", "path/to/file.py->Class"),
        ("my.yaml", "num_repeat"),
    ),
    Mistake(
        "a workflow file that is not there",
        {"my.yaml": ("workflow.py", "workflw.py")},
        ("no such file", "workflw.py", "did you mean workflow.py"),
        ("my.yaml", "workflw.py"),
    ),
    Mistake(
        "a misspelt class",
        {"my.yaml": ("->MyAgent", "->MyAgnet")},
        ("has no 'MyAgnet'", "did you mean MyAgent?"),
        ("my.yaml", "->MyAgnet"),
    ),
    Mistake(
        "a misspelt method",
        {"workflow.py": ("execute", "excute")},
        ("MyAgent has no method execute", "Rename excute to execute"),
        ("workflow.py", "def excute"),
    ),
    Mistake(
        "a method with too few arguments",
        {"workflow.py": ("(self, workflow_task, model_tuner)", "(self, workflow_task)")},
        ("execute", "(self, workflow_task, model_tuner)"),
        ("workflow.py", "def execute"),
    ),
    Mistake(
        "a method without self",
        {"workflow.py": ("(self, workflow_task, model_tuner)", "(workflow_task, model_tuner)")},
        ("execute", "(self, workflow_task, model_tuner)"),
        ("workflow.py", "def execute"),
    ),
    Mistake(
        "a constructor with arguments",
        {
            "workflow.py": (
                "    async def execute",
                "    def __init__(self, url, key):\n        pass\n\n    async def execute",
            )
        },
        ("MyAgent requires url, key", "Add a default", "from_config"),
        ("workflow.py", "def __init__"),
    ),
    Mistake(
        "a syntax error",
        {"workflow.py": ("model_tuner):", "model_tuner)")},
        ("SyntaxError", "expected ':'"),
        ("workflow.py", "model_tuner)"),
    ),
    Mistake(
        "an import of what is not installed",
        {"workflow.py": ("from astuner", "import numpyy\nfrom astuner")},
        ("No module named 'numpyy'", "is numpyy installed"),
        ("workflow.py", "numpyy"),
    ),
    Mistake(
        "a name that astuner has not",
        {"workflow.py": ("import Workflow,", "import Workflwo,")},
        ("Workflwo", "did you mean Workflow?"),
        ("workflow.py", "Workflwo"),
    ),
    Mistake(
        "a module that raises",
        {"workflow.py": ("class MyAgent", "KEY = {}['key']\n\n\nclass MyAgent")},
        ("KeyError: 'key'",),
        ("workflow.py", "KEY ="),
    ),
    Mistake(
        "a misspelt method of the judge",
        {**JUDGED, "judge.py": ("def judge", "def juge")},
        ("MyJudge has no method judge", "juge"),
        ("judge.py", "def juge"),
    ),
    Mistake(
        "a judge that cannot be made",
        {
            **JUDGED,
            "judge.py": ("    def judge", "    def __init__(self):\n        self.key = {}['key']\n\n    def judge"),
        },
        ("KeyError: 'key'",),
        ("judge.py", "self.key"),
    ),
)

ROWS = [{"question": f"What is {n}?", "answer": str(n)} for n in range(1, 5)]
CSV = "question,answer\nWhat is 1?,1\nWhat is 2?,2\n"
READ = "astuner.task_reader.type: huggingface and astuner.task_reader.huggingface.dataset_path: data/train"
SWAPPED = "with swapped parameters, because it is called with self, workflow_task, "
FUNCTION = {"my.yaml": ("judge: null", "judge: judge.py->mine")}


def data(name: str, content: str | bytes) -> dict[str, str | bytes | tuple[str, str]]:
    """Return edits that use another data file."""
    return {"my.yaml": ("data/train.jsonl", f"data/{name}"), f"data/{name}": content}


FILES_OF_OTHERS = (
    Mistake(
        "swapped parameters of a judge",
        {**JUDGED, "judge.py": ("workflow_task, output", "output, workflow_task")},
        (SWAPPED + "output", "def judge(self, workflow_task, output)"),
        ("judge.py", "def judge"),
    ),
    Mistake(
        "swapped annotations of a judge",
        {**JUDGED, "judge.py": ("workflow_task, output", "a: 'astuner.WorkflowOutput', b: 'WorkflowTask'")},
        (SWAPPED + "output",),
        ("judge.py", "def judge"),
    ),
    Mistake(
        "swapped parameters of a workflow",
        {"workflow.py": ("workflow_task, model_tuner", "model_tuner, workflow_task")},
        (SWAPPED + "model_tuner",),
        ("workflow.py", "async def execute"),
    ),
    Mistake(
        "a judge function with swapped parameters",
        {**FUNCTION, "judge.py": "def mine(response, task):\n    return 1.0\n"},
        ("with swapped parameters", "def mine(task, response)"),
        ("judge.py", "def mine"),
    ),
    Mistake(
        "a judge function with one parameter",
        {**FUNCTION, "judge.py": "def mine(response):\n    return 1.0\n"},
        ("mine takes (response), but is called with task, response",),
        ("judge.py", "def mine"),
    ),
    Mistake(
        "a workflow that returns text only",
        body("return reply.text"),
        ("no episode would have a reward", "Set astuner.task_judge.judge"),
        ("workflow.py", "async def execute"),
        LOCAL,
    ),
    Mistake(
        "a JSON list",
        data("train.json", json.dumps(ROWS, indent=2)),
        ("is a JSON list, not JSON Lines", f"Read it with {READ}.json", "or convert it: python -c"),
        ("my.yaml", "data/train.json"),
    ),
    Mistake(
        "a JSON list on one line that is skipped",
        {"data/train.jsonl": json.dumps(ROWS), "my.yaml": ("  data:\n", "  data:\n    on_bad_line: skip\n")},
        ("is a JSON list, not JSON Lines", "data/train.converted.jsonl"),
        ("my.yaml", "data/train.json"),
    ),
    Mistake(
        "a JSON object with rows",
        data("train.json", json.dumps({"version": 1, "data": ROWS}, indent=1)),
        ("a JSON object with the rows in its field 'data'", "['data']"),
    ),
    Mistake(
        "indented JSON objects",
        data("train.json", "\n".join(json.dumps(row, indent=1) for row in ROWS)),
        ("a sequence of JSON objects over several lines", "jq -c ."),
    ),
    Mistake("CSV", data("train.csv", CSV), ("is a CSV file", f"{READ}.csv", "csv.DictReader"), ("my.yaml", ".csv")),
    Mistake("CSV as JSONL", data("train.jsonl", CSV), ("Rename it to train.csv and read it with",)),
    Mistake("TSV", data("train.tsv", CSV.replace(",", "\t")), ("is a TSV file", f"{READ}.tsv"), ("my.yaml", ".tsv")),
    Mistake("Parquet", data("train.parquet", b"PAR1\x15\x04"), ("is a Parquet file", f"{READ}.parquet")),
    Mistake("YAML", data("train.yaml", "- question: 1\n- question: 2\n"), ("is a YAML list", "yaml.safe_load")),
    Mistake(
        "gzip", data("train.jsonl.gz", b"\x1f\x8b\x08\x00"), ("compressed with gzip", "gzip -dc data/train.jsonl.gz")
    ),
    Mistake("Git LFS", data("train.jsonl", "version https://git-lfs.github.com/spec/v1\n"), ("git lfs pull",)),
    Mistake("a web page", data("train.jsonl", "<!DOCTYPE html>\n<html></html>\n"), ("is a web page",)),
    Mistake(
        "a GPU by another name",
        {"my.yaml": ("path: tiny-calculator", "path: tiny-calculator\n    device: gpu")},
        ("astuner.model.device should be auto or cpu or cuda or cuda:0, got 'gpu'; did you mean cuda?",),
        ("my.yaml", "device"),
    ),
    Mistake(
        "a key of another tool",
        {"my.yaml": ("max_response_length_in_one_turn:", "max_tokens:")},
        ("unknown key astuner.rollout.max_tokens; did you mean astuner.rollout.max_response_length_in_one_turn?",),
        ("my.yaml", "max_tokens"),
    ),
)
VALIDATED = (
    "file_path: data/train.jsonl",
    "file_path: data/train.jsonl\n      validation:\n        file_path: data/train.jsonl",
)
WARNINGS = (
    Mistake(
        "validation on the training file",
        {"my.yaml": VALIDATED},
        ("warning: my.yaml:10:9: Validation is not held out: 4 of 4 tasks", "Validate on tasks that are not in the"),
    ),
    Mistake(
        "a batch larger than the data set",
        {"my.yaml": ("train_batch_size: 2", "train_batch_size: 64")},
        ("train_batch_size is 64, but there are only 4 training tasks", "Set it to at most 4", "1 warning"),
        ("my.yaml", "train_batch_size"),
    ),
    Mistake(
        "a workflow that may lack a reward",
        body("if not task:\n    return WorkflowOutput()\nreturn make_output(task)"),
        ("astuner.task_judge.judge is not set", "may return no reward"),
        ("workflow.py", "async def execute"),
        LOCAL,
    ),
)

AGENTSCOPE = """\
from agentscope.agent import Agent
from agentscope.message import UserMsg

from astuner import Workflow, WorkflowOutput


class MyAgent(Workflow):
    async def execute(self, workflow_task, model_tuner):
        agent = Agent(name="me", system_prompt="Calculate.", model=None)
        reply = await agent.reply(UserMsg("user", workflow_task.task.main_query))
        return WorkflowOutput(reward=float("4" in reply.get_text_content()))
"""

EPISODES = (
    Mistake(
        "NaN for a reward",
        body("return WorkflowOutput(reward=float('nan'))"),
        ("returned the reward nan; it must be a finite number",),
        ("workflow.py", "async def execute"),
        RUN,
    ),
    Mistake(
        "nothing returned",
        body("float(right)"),
        ("returned None; it must return a WorkflowOutput",),
        ("workflow.py", "async def execute"),
        RUN,
    ),
    Mistake(
        "text for a reward",
        body("return WorkflowOutput(reward='1.0')"),
        ("returned the reward '1.0'; it must be a finite number",),
        ("workflow.py", "async def execute"),
        RUN,
    ),
    Mistake(
        "no reward and no judge",
        body("return WorkflowOutput(response=reply)"),
        ("returned no reward and no judge is configured", "return WorkflowOutput(reward=…)"),
        ("workflow.py", "async def execute"),
        RUN,
    ),
    Mistake(
        "a key that the data has not",
        {"workflow.py": ('["answer"]', '["anwser"]')},
        ("KeyError: 'anwser'",),
        ("workflow.py", '["anwser"]'),
        RUN,
    ),
    Mistake(
        "no await",
        {"workflow.py": ("await model_tuner", "model_tuner")},
        ("is an `await` missing",),
        ("workflow.py", "reply.text"),
        RUN,
    ),
    Mistake(
        "sys.exit()", body("import sys\nsys.exit(3)"), ("called sys.exit(3)",), ("workflow.py", "sys.exit(3)"), RUN
    ),
    Mistake(
        "while True",
        body("while True:\n    pass"),
        ("rollout.episode_timeout = 1 s",),
        ("workflow.py", "while True"),
        (*RUN, "astuner.rollout.episode_timeout=1"),
    ),
    Mistake(
        "a coroutine that waits for ever",
        body("import asyncio\nawait asyncio.sleep(1000)"),
        ("rollout.episode_timeout = 1 s",),
        ("workflow.py", "sleep(1000)"),
        (*RUN, "astuner.rollout.episode_timeout=1"),
    ),
    Mistake(
        "a plain def that waits for ever",
        {
            "workflow.py": WORKFLOW.replace("async def", "def").replace(
                "        reply = await", "        import time\n\n        time.sleep(1000)\n        reply ="
            )
        },
        ("rollout.episode_timeout = 1 s", "and was then at"),
        ("workflow.py", "time.sleep(1000)"),
        (*RUN, "astuner.rollout.episode_timeout=1"),
    ),
    Mistake(
        "a judge that returns a word",
        {**JUDGED, "judge.py": ("JudgeOutput(reward=1.0)", "'good'")},
        ("the judge MyJudge returned 'good'; it must return a JudgeOutput",),
        ("judge.py", "def judge"),
        RUN,
    ),
    Mistake(
        "a reward for an agent who is not there",
        body("return WorkflowOutput(reward={'nobody': 1.0})"),
        ("returned rewards for nobody", "agent 'default'", "Add its name or role"),
        ("workflow.py", "async def execute"),
        RUN,
    ),
    Mistake(
        "a judge that returns NaN",
        {**JUDGED, "judge.py": ("reward=1.0", "reward=float('nan')")},
        ("a reward must be a finite number", "nan"),
        ("judge.py", "reward=float"),
        RUN,
    ),
    Mistake(
        "a judge that raises",
        {**JUDGED, "judge.py": ("reward=1.0", "reward=output.rewrd")},
        ("AttributeError", "rewrd"),
        ("judge.py", "output.rewrd"),
        RUN,
    ),
    Mistake(
        "None for a model",
        {"workflow.py": AGENTSCOPE},
        ("model=model_tuner",),
        ("workflow.py", "await agent.reply"),
        RUN,
    ),
)


@pytest.fixture
def answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[Mistake], Iterator[str]]:
    """What of a mistake's answer is missing."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def ask(mistake: Mistake, refused: bool = True) -> Iterator[str]:
        folder = tmp_path / re.sub(r"\W+", "_", mistake.what)
        texts = {"my.yaml": YAML, "workflow.py": WORKFLOW, "judge.py": JUDGE, "data/train.jsonl": DATA}
        (folder / "data").mkdir(parents=True)
        for name, text in texts.items():
            (folder / name).write_text(text)
        for name, edit in mistake.edits.items():
            if isinstance(edit, tuple):
                before = (folder / name).read_text()
                assert edit[0] in before, (mistake.what, edit[0])
                edit = before.replace(*edit, 1)
            if edit is None:
                (folder / name).unlink()
            else:
                (folder / name).write_bytes(edit if isinstance(edit, bytes) else edit.encode())
        monkeypatch.chdir(folder)
        name, marker = mistake.at
        wanted = list(mistake.says)
        if name:
            lines = (folder / name).read_bytes().decode("latin-1").splitlines(keepends=True)
            number = next(
                n for n, line in enumerate(lines, 1) if (line == marker if marker == "\n" else marker in line)
            )
            wanted.append(f"{name}:{number}")
        command, _, *rest = mistake.arguments
        for arguments in (
            mistake.arguments,
            *([("run", *rest, "--dry-run")] if command == "config" and refused else []),
        ):
            with pytest.raises(SystemExit) as e:
                main(list(arguments))
            shown = capsys.readouterr()
            text = " ".join((shown.out + shown.err).split())
            missing = [repr(part) for part in wanted if part not in text]
            if missing or bool(e.value.code) != refused or "Traceback" in text:
                yield f"{mistake.what}: {arguments} {e.value.code}: no {', '.join(missing)} in: {text[-1500:]}"

    return ask


def test_mistakes_of_users_of_other_tools(answer):
    check(FILES_OF_OTHERS, answer)


def test_probable_mistakes_are_warnings(answer):
    """The exit status is 0."""
    problems = [problem for mistake in WARNINGS for problem in answer(mistake, refused=False)]
    assert not problems, "\n".join(problems)


def check(mistakes, answer):
    if missing := [problem for mistake in mistakes for problem in answer(mistake)]:
        pytest.fail("\n".join(missing), pytrace=False)


def test_mistakes_in_files(answer):
    """``run --dry-run`` refuses whatever ``config check`` finds, in the same words."""
    check(FILES, answer)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the coroutine without an await
def test_mistakes_of_running_code(answer):
    try:
        check(EPISODES, answer)
    finally:
        gc.collect()  # here, where that warning is ignored
