"""The episode log in a run, and what `astuner export RUN --to …` makes of it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.table import table

pa = pytest.importorskip("pyarrow")

from astuner.builtin.console import JsonlSink  # noqa: E402
from astuner.cli import main  # noqa: E402
from astuner.contracts.events import (  # noqa: E402
    EpisodeEnded,
    LogprobsComputed,
    Progressed,
    RunResumed,
    SamplesCredited,
    Saving,
    StepEnded,
    TokenizersLoaded,
)
from astuner.contracts.log_sink import LogSink  # noqa: E402
from astuner.contracts.types import (  # noqa: E402
    Episode,
    FinishReason,
    Generation,
    JudgeOutput,
    Sample,
    Split,
    StopReason,
    Task,
    Turn,
    WorkflowOutput,
    WorkflowTask,
)
from astuner.rollout.turns import build_samples  # noqa: E402
from astuner.runs.bus import InThread  # noqa: E402
from astuner.runs.run import RunWriter  # noqa: E402
from astuner.runs.run_dir import RunDir  # noqa: E402
from astuner_record.episode_log import EpisodeLog, EpisodeLogWriter, tokenizer_file  # noqa: E402
from astuner_record.episode_log.convert import Conversation, pair  # noqa: E402
from astuner_record.episode_log.reader import FIELDS  # noqa: E402
from astuner_record.episode_log.rows import CREDIT, EPISODE, EXTERNAL, TURN  # noqa: E402
from astuner_testing.fakes import fake_config  # noqa: E402

SYSTEM = {"role": "system", "content": "Be kind."}
TOOL = {"type": "function", "function": {"name": "add"}}


def episode(group: str, attempt: int, reward: float, answer: str = "4") -> Episode:
    """A tool call, its result, and an answer."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": f'{{"a": {attempt}}}'}}
    first = Turn(
        index=0, agent="default", generation=generation([1, 2], [3]), continues=None, tools=(TOOL,),
        request=(SYSTEM, {"role": "user", "content": f"task {group}"}),
        message={"role": "assistant", "content": "", "tool_calls": [call]},
    )  # fmt: skip
    second = Turn(
        index=1, agent="default", generation=generation([1, 2, 3, 4], [5, 6]), continues=0,
        request=({"role": "tool", "tool_call_id": "c1", "content": "4"},),
        message={"role": "assistant", "content": answer},
    )  # fmt: skip
    return Episode(
        workflow_task=WorkflowTask(
            task=Task(task_id=f"task-{group}"), episode_id=f"{group}-{attempt}", group_id=group, attempt=attempt
        ),
        turns=(first, second),
        output=WorkflowOutput(reward=reward),
        verdict=JudgeOutput(reward=reward),
        reward_source="workflow",
        stop_reason=StopReason.COMPLETED,
    )


def generation(prompt: list[int], said: list[int]) -> Generation:
    return Generation(
        prompt_ids=prompt,
        response_ids=said,
        logprobs=[-0.5] * len(said),
        finish_reason=FinishReason.STOP,
        policy_version=0,
    )


def books(folder: Path, *sinks: LogSink, more: str = "") -> RunWriter:
    run_dir = RunDir(folder / "run")
    run_dir.start()
    config = fake_config(folder, f"  trainer_common: {{total_steps: 2{more}}}\n")
    return RunWriter(config, run_dir, [JsonlSink(), *sinks], total_steps=2)


def samples(*episodes: Episode, advantage: float) -> list[Sample]:
    return [replace(s, advantage=advantage) for e in episodes for s in build_samples(e).samples]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two groups, of which one has different rewards."""
    log = EpisodeLogWriter(tmp_path / "run" / "episodes")
    for one in (episode("a", 0, 0.25, "5"), episode("a", 1, 1.0), episode("b", 0, 0.5), episode("b", 1, 0.5)):
        log.episode(1, one)
    log.credit(1, samples(episode("a", 1, 1.0), advantage=0.75))
    log.close()
    return tmp_path / "run"


def astuner(*arguments: str) -> None:
    with pytest.raises(SystemExit) as e:
        main(list(arguments))
    assert not e.value.code


def exported(run: Path, to: str, *options: str) -> list[dict[str, Any]]:
    out = run.parent / f"{to}.out"
    astuner("export", str(run), "--to", to, "--out", str(out), *options)
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def test_a_run_logs_its_episodes_and_the_last_credit_of_each_step(tmp_path: Path) -> None:
    of = books(tmp_path)
    one = episode("a", 0, 1.0)
    of.publish(EpisodeEnded(step=1, episode=one))
    of.publish(SamplesCredited(step=1, samples=samples(one, advantage=0.25)))
    of.publish(SamplesCredited(step=1, samples=samples(one, advantage=0.5)))  # with penalties, say
    of.publish(StepEnded(step=1, metrics={"reward/mean": 1.0}))
    of.close()
    with EpisodeLog(of.run_dir.path) as log:
        logged = log.read("a-0")
    assert [c.advantage for c in logged.credit] == [0.5]
    assert logged.episode.turns[1].generation.prompt_ids == (1, 2, 3, 4)
    assert of.run_dir.log.exists() is False  # nothing had to be said


def test_credit_has_what_the_trainer_computed_before_the_update(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    of = books(tmp_path)
    ended = [episode("a", attempt, 1.0) for attempt in range(3)]
    for one in ended:
        of.publish(EpisodeEnded(step=1, episode=one))
    of.publish(SamplesCredited(step=1, samples=samples(*ended, advantage=0.5)))
    of.publish(LogprobsComputed(step=1, found={0: numpy.array([-1, -2, -3], dtype="float32")}))
    of.publish(LogprobsComputed(step=1, found={2: numpy.array([-4, -5, -6], dtype="float32")}))
    of.publish(StepEnded(step=1, metrics={}))
    of.close()
    with EpisodeLog(of.run_dir.path) as log:
        found = {e.episode_id: log.read(e) for e in log.list()}
    assert found["a-0"].credit[0].trainer_logprobs == (-1, -2, -3)
    assert found["a-1"].credit[0].trainer_logprobs is None, "the trainer computed none"
    assert found["a-2"].credit[0].trainer_logprobs == (-4, -5, -6)
    (sample,) = found["a-2"].samples()
    assert sum(sample.loss_mask) == 3
    rows = exported(of.run_dir.path, "jsonl")
    assert [row["credit"][0]["trainer_logprobs"] for row in rows] == [[-1, -2, -3], None, [-4, -5, -6]]


def test_log_probabilities_of_something_else_are_an_error(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    of = books(tmp_path)
    of.publish(EpisodeEnded(step=1, episode=episode("a", 0, 1.0)))
    of.publish(SamplesCredited(step=1, samples=samples(episode("a", 0, 1.0), advantage=0.5)))
    of.publish(LogprobsComputed(step=1, found={0: numpy.zeros(1, dtype="float32")}))
    with pytest.raises(ValueError, match=r"step 1, episode a-0, sample 0: 3 trained tokens.* 1 log-prob"):
        of.publish(Saving(step=1))
    of.publish(Saving(step=1))  # said once; what is finished can still be saved
    of.close()


def test_what_is_settled_survives_whatever_becomes_of_the_process(tmp_path: Path) -> None:
    of = books(tmp_path)
    for step in (1, 2):
        one = episode(f"s{step}", 0, 1.0)
        of.publish(EpisodeEnded(step=step, episode=one))
        of.publish(SamplesCredited(step=step, samples=samples(one, advantage=0.5)))
    of.publish(Saving(step=1))
    with EpisodeLog(of.run_dir.path) as log:  # as though the process had ended here
        assert [len(log.read(e).credit) for e in log.list()] == [1, 0], "step 2 may still be credited again"
    of.close()


class Tokenizer:
    """What is used of a Hugging Face tokenizer."""

    def __init__(self, text: str | None) -> None:
        self.text = text

    @property
    def backend_tokenizer(self) -> Any:
        text = self.text
        if text is None:
            raise AttributeError("a slow one")

        class Backend:
            def to_str(self) -> str:
                return text

        return Backend()


@table(
    ("texts", "files"),
    [
        ({"default": "{1}"}, {"tokenizer.json": "{1}"}),
        ({"wolf": "{1}", "sheep": "{1}"}, {"tokenizer.json": "{1}"}),
        ({"wolf": "{1}", "sheep": "{2}"}, {"wolf/tokenizer.json": "{1}", "sheep/tokenizer.json": "{2}"}),
        ({"wolf": "{1}", "sheep": None}, {"wolf/tokenizer.json": "{1}"}),
        ({"default": None}, {}),
    ],
)
def test_tokenizers_are_kept_beside_the_tokens_once(
    texts: dict[str, str | None], files: dict[str, str], tmp_path: Path
) -> None:
    of = books(tmp_path)
    (of.run_dir.episodes / ".tokenizer.1.tmp").mkdir()  # somebody was killed
    asked: list[str] = []

    def load(policy: str) -> Tokenizer:
        asked.append(policy)
        return Tokenizer(texts[policy])

    for _ in range(2):  # a run that is resumed
        of.publish(TokenizersLoaded(load={policy: partial(load, policy) for policy in texts}))
    of.close()
    home = of.run_dir.episodes / "tokenizer"
    assert {str(p.relative_to(home)): p.read_text() for p in home.rglob("*.json")} == files
    assert len(asked) == len(texts) if files else 2, "a second look at what is there costs nothing"
    for policy, text in texts.items():
        file = tokenizer_file(of.run_dir.episodes, policy)
        assert (file.read_text() if file else None) == text


def test_without_a_log_no_tokenizer_is_kept(tmp_path: Path) -> None:
    of = books(tmp_path, more=", save_tokens: false")
    of.publish(TokenizersLoaded(load={"default": partial(Tokenizer, "{}")}))
    of.close()
    assert not list(of.run_dir.episodes.iterdir())


def test_a_resumed_run_forgets_the_steps_it_makes_again(tmp_path: Path) -> None:
    of = books(tmp_path)
    for step in (1, 2):
        of.publish(EpisodeEnded(step=step, episode=episode(f"s{step}", 0, 1.0)))
    of.close()
    of.publish(RunResumed(step=1, state={}))
    with EpisodeLog(of.run_dir.path) as log:
        assert [found.episode_id for found in log.list()] == ["s1-0"]


def test_tokens_can_be_left_out(tmp_path: Path) -> None:
    of = books(tmp_path, more=", save_tokens: false")
    of.publish(EpisodeEnded(step=1, episode=episode("a", 0, 1.0)))
    of.close()
    assert not list(of.run_dir.episodes.iterdir())


def test_a_log_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    of = books(tmp_path)
    of.run_dir.episodes.rmdir()
    of.run_dir.episodes.write_text("in the way")
    with pytest.raises(OSError):  # noqa: PT011  # which one is the system's
        of.publish(EpisodeEnded(step=1, episode=episode("a", 0, 1.0)))


class Hangs(LogSink):
    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go = threading.Event(), threading.Event()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.asked.set()
        self.go.wait()

    def progress(self, progress: Progressed) -> None:
        return None


def test_a_sink_that_hangs_holds_up_nobody_and_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InThread.__init__, "__kwdefaults__", {"limit": 0.05, "longest": 1000})
    sink = Hangs()
    of = books(tmp_path, sink)
    of.publish(StepEnded(step=1, metrics={"reward/mean": 0.5}))
    assert sink.asked.wait(60)
    of.close()
    sink.go.set()
    (note,) = of.run_dir.log.read_text().splitlines()
    assert "Hangs failed and is disabled for the rest of the run: no response within 0.05 s" in note
    assert [row["reward/mean"] for row in of.run_dir.read_metrics()] == [0.5]


def test_a_sink_that_is_too_slow_is_left_out_and_progress_does_not_pile_up() -> None:
    sink = Hangs()
    thread = InThread(sink, longest=2)
    thread.tell(StepEnded(step=1, metrics={}))
    assert sink.asked.wait(60)
    for _ in range(5):
        thread.tell(Progressed(step=1, total_steps=1, done=1, total=1, what="rollout"))
    thread.tell(StepEnded(step=2, metrics={}))
    assert thread.failure() == ""
    thread.tell(StepEnded(step=3, metrics={}))
    assert "too slow, 2 events" in thread.failure()
    sink.go.set()


def test_a_sink_gets_every_call_in_order_before_it_is_closed(tmp_path: Path) -> None:
    calls: list[Any] = []

    class Slow(LogSink):
        def open(self, run_dir: Path, run_name: str, settings: Mapping[str, Any]) -> None:
            calls.append("open")

        def step(self, step: int, metrics: Mapping[str, float]) -> None:
            calls.append(step)

        def close(self) -> None:
            calls.append("close")

    of = books(tmp_path, Slow())
    numbers = {"reward/mean": 0.5}
    for step in range(50):
        of.publish(StepEnded(step=step, metrics=numbers))
    of.close()
    assert calls == ["open", *range(50), "close"]


def test_jsonl_has_whole_rows_with_credit(run: Path) -> None:
    rows = exported(run, "jsonl", "--where", "group=a")
    assert [row["episode_id"] for row in rows] == ["a-0", "a-1"]
    assert rows[1]["credit"][0]["advantage"] == 0.75
    assert rows[0]["turns"][0]["request"][0] == SYSTEM
    assert rows[0]["turns"][1]["prompt_ids"] == [4]


def test_parquet_is_read_by_pandas(run: Path) -> None:
    pandas = pytest.importorskip("pandas")
    out = run.parent / "episodes.parquet"
    astuner("export", str(run), "--to", "parquet", "--out", str(out))
    frame = pandas.read_parquet(out)
    assert frame["reward"].tolist() == [0.25, 1.0, 0.5, 0.5]
    assert frame["turns"][1][1]["response_ids"].tolist() == [5, 6]
    assert frame["credit"][1][0]["advantage"] == 0.75


def test_sft_has_the_chats_of_good_episodes(run: Path) -> None:
    (row,) = exported(run, "sft")
    assert [m["role"] for m in row["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert row["messages"][-1]["content"] == "4"
    assert (row["tools"], row["reward"], row["episode_id"]) == ([TOOL], 1.0, "a-1")
    assert len(exported(run, "sft", "--min-reward", "0.5", "--force")) == 3


def test_tokens_are_those_of_the_samples(run: Path) -> None:
    (row,) = exported(run, "tokens")
    with EpisodeLog(run) as log:
        (sample,) = build_samples(log.read("a-1").episode).samples
    assert (row["input_ids"], row["loss_mask"]) == (list(sample.input_ids), list(sample.loss_mask))
    assert (row["episode_id"], row["reward"], row["agent"]) == ("a-1", 1.0, sample.agent)
    assert len(exported(run, "tokens", "--min-reward", "0.5", "--force")) == 3


def test_what_is_to_be_learned_from_has_no_held_out_task_unless_one_asks_for_it(tmp_path: Path) -> None:
    log = EpisodeLogWriter(tmp_path / "run" / "episodes")
    for reward, attempt in ((0.5, 0), (1.0, 1)):
        for group, split in (("a", Split.TRAIN), ("v", Split.VALIDATION)):
            one = episode(group, attempt, reward, "4" if reward == 1 else "5")
            log.episode(1, replace(one, workflow_task=replace(one.workflow_task, split=split)))
    log.close()
    for to in ("sft", "tokens", "dpo"):
        assert {row["group_id"] for row in exported(tmp_path / "run", to)} == {"a"}
        asked = exported(tmp_path / "run", to, "--where", "split!=none", "--force")
        assert {row["group_id"] for row in asked} == {"a", "v"}
    assert len(exported(tmp_path / "run", "jsonl")) == 4


def test_dpo_has_the_best_and_the_worst_of_a_group(run: Path) -> None:
    (row,) = exported(run, "dpo")
    assert row["prompt"] == [SYSTEM, {"role": "user", "content": "task a"}]
    assert (row["chosen"][-1]["content"], row["rejected"][-1]["content"]) == ("4", "5")
    assert (row["chosen_reward"], row["rejected_reward"]) == (1.0, 0.25)


def test_what_differs_before_a_reply_is_no_pair() -> None:
    def said(*roles_and_texts: str) -> Conversation:
        messages = [dict(zip(("role", "content"), m.split(" ", 1), strict=True)) for m in roles_and_texts]
        return Conversation(agent="a", messages=tuple(messages), tools=(), turns=1)

    one = said("user x", "assistant y")
    assert pair(one, said("user x", "assistant z")) is not None
    assert pair(one, said("user other", "assistant z")) is None
    assert pair(one, one) is None


@table(
    ("arguments", "says"),
    [
        (["--to", "sft"], "Add --out FILE"),
        (["--to", "model", "--where", "reward>0"], "apply to --to"),
        (["--to", "dpo", "--out", "x", "--min-reward", "1"], "--min-reward applies to --to sft"),
        (["--to", "jsonl", "--out", "x", "--where", "reward>0", "--where", "mood=1"], "'mood' is not a known field"),
        (["--to", "dpo", "--out", "x", "--where", "group=b"], "2 match every --where"),
        (["--to", "jsonl", "--out", "."], "is a folder"),
        (["--to", "jsonl", "--out", "taken"], "--force"),
    ],
)
def test_what_cannot_be_exported_says_what_to_type(
    run: Path, arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run.parent)
    Path("taken").write_text("mine")
    with pytest.raises(SystemExit) as e:
        main(["export", str(run), *arguments])
    assert e.value.code in (1, 2)
    assert says in capsys.readouterr().err
    assert sorted(p.name for p in run.parent.iterdir()) == ["run", "taken"]
    assert Path("taken").read_text() == "mine"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("to", ["jsonl", "parquet"])
def test_a_killed_export_leaves_nothing_behind(run: Path, to: str, number: signal.Signals) -> None:
    if to == "parquet":
        pytest.importorskip("pyarrow")
    code = (
        "import sys, time\nfrom astuner_record.episode_log import reader\n"
        "def slowly(log, where=()):\n    print('reading', flush=True)\n    time.sleep(60)\n    yield\n"
        "reader.EpisodeLog.read_all = slowly\nfrom astuner.cli import main\nmain(sys.argv[1:])\n"
    )
    command = ["export", str(run), "--to", to, "--out", str(run.parent / "out")]
    with subprocess.Popen([sys.executable, "-c", code, *command], stdout=-1, stderr=-1) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"reading\n"
        child.send_signal(number)
        assert child.wait() != 0
    left = sorted(p.name for p in run.parent.iterdir())
    assert left == (["run"] if number != signal.SIGKILL else [f".out.{child.pid}.tmp", "run"])
    astuner(*command)
    assert sorted(p.name for p in run.parent.iterdir()) == ["out", "run"]


@pytest.mark.parametrize("number", range(2))
def test_what_the_page_says_reads_the_log(
    run: Path, number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(["pandas", "pyarrow"][number])
    page = Path(__file__).parents[3] / "docs" / "episode_log.md"
    snippets = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(snippets) == 2
    (run.parent / "launcher_record").mkdir()
    run.rename(run.parent / "launcher_record" / "math_agent")
    monkeypatch.chdir(run.parent)
    astuner("export", "launcher_record/math_agent", "--to", "parquet", "--out", "episodes.parquet")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(run.parent / "cache"))
    exec(compile(snippets[number], str(page), "exec"), {})
    assert ["default    1.5", "0.75 [0, 0, 1, 0, 1, 1]"][number] in capsys.readouterr().out


def test_the_page_describes_every_column() -> None:
    page = (Path(__file__).parents[3] / "docs" / "episode_log.md").read_text(encoding="utf-8")
    for name in (*EPISODE, *TURN, *EXTERNAL, *CREDIT):
        assert f"`{name}`" in page
    for name in FIELDS:
        assert f"`{name}`" in page
