"""A recorded episode once more: forks give exactly what was recorded, say where they leave it, and change no run."""

from __future__ import annotations

import asyncio
import inspect
import io
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

from astuner import Config, RunDir
from astuner.chat.codec import ChatCodec
from astuner.cli import main
from astuner.contracts.errors import ConfigError
from astuner.contracts.parts import ExternalReply
from astuner.contracts.types import (
    Episode,
    ExternalTurn,
    JudgeOutput,
    SamplingParams,
    StopReason,
    WorkflowOutput,
)
from astuner.rollout.models import one_model
from astuner.rollout.runner import EpisodeRunner
from astuner_helpers.server import ExternalModel
from astuner_record.episode_log import EpisodeLog, EpisodeLogWriter
from astuner_record.replay import RecordedRun
from astuner_record.replay.fork import BY_HAND, Fork, about_plan, forks_text, run_forks, write_forks
from astuner_record.replay.recording import Diverged, NoEngine, Plan, Recording
from astuner_record.replay.verdicts import Rejudge, Rejudged, agreement
from astuner_testing.fakes import FakeEngine, fake_config, make_tokenizer, workflow_task

TOKENIZER = make_tokenizer()
SAMPLING = SamplingParams(max_tokens=200)
CODE = '''
import asyncio
from pathlib import Path
from astuner import Judge, JudgeOutput, Workflow, WorkflowOutput
from astuner.contracts.judge import GroupJudge

HERE = Path(__file__).parent

def word(name):
    file = HERE / name
    return file.read_text() if file.exists() else name

class Three(Workflow):
    """Three turns, and a tool between them whose answer is in a file."""
    async def execute(self, workflow_task, model_tuner):
        messages = [{"role": "user", "content": workflow_task.task.main_query}]
        for n in range(3):
            messages.append((await model_tuner.chat(messages)).message)
            messages.append({"role": "user", "content": word(f"tool{n}")})
        return WorkflowOutput(response=messages[-2]["content"], metadata={"said": messages[-2]["content"]})

class Plain(Workflow):
    """The same without async."""
    def execute(self, workflow_task, model_tuner):
        messages = [{"role": "user", "content": workflow_task.task.main_query}]
        for n in range(3):
            messages.append(model_tuner.chat_sync(messages).message)
            messages.append({"role": "user", "content": "go on"})
        return WorkflowOutput(reward=1.0)

class Pair(Workflow):
    """Two agents that talk at the same time; which of them is first is in a file."""
    async def execute(self, workflow_task, model_tuner):
        async def talk(agent, wait):
            for _ in range(wait):
                await asyncio.sleep(0)
            messages = [{"role": "user", "content": "hello"}]
            for n in range(2):
                messages.append((await model_tuner.chat(messages, agent_name=agent)).message)
                messages.append({"role": "user", "content": "and"})
                await asyncio.sleep(0.01)
            return messages[-2]["content"]
        late = word("late")
        said = await asyncio.gather(talk("anna", 50 * (late == "anna")), talk("bert", 50 * (late == "bert")))
        return WorkflowOutput(reward=1.0, metadata={"said": said})

class Short(Workflow):
    """Ends before the second turn where a file says so."""
    async def execute(self, workflow_task, model_tuner):
        messages = [{"role": "user", "content": "hi"}]
        for n in range(2 if word("turns") == "turns" else 1):
            messages.append((await model_tuner.chat(messages)).message)
        return WorkflowOutput(reward=0.5)

class Guided(Workflow):
    """A player, and a user whose part a model outside of the run has."""
    async def execute(self, workflow_task, model_tuner):
        messages, heard = [{"role": "user", "content": "begin"}], []
        for n in range(2):
            messages.append((await model_tuner.chat(messages, agent_name="player")).message)
            heard.append({"role": "user", "content": messages[-1]["content"] + word("tool").replace("tool", "")})
            heard.append((await model_tuner.chat(heard, agent_name="user")).message)
            messages.append({"role": "user", "content": heard[-1]["content"]})
        return WorkflowOutput(reward=1.0)

class Length(Judge):
    def judge(self, workflow_task, output):
        assert output.reward is None
        return JudgeOutput(reward=float(len(str(output.response))), is_success=len(str(output.response)) > 3)

class Other(Judge):
    async def judge(self, workflow_task, output):
        return JudgeOutput(reward=1.0 if "e" in str(output.response) else 0.0)

class Tagged(Judge):
    def judge(self, workflow_task, output):
        from astuner import bp
        bp("verdict")
        return JudgeOutput(reward=1.0)

class Longest(GroupJudge):
    def judge_group(self, attempts):
        most = max(len(str(a.output.response)) for a in attempts)
        return [JudgeOutput(reward=float(len(str(a.output.response)) == most)) for a in attempts]

class Broken(Judge):
    def judge(self, workflow_task, output):
        raise ValueError("no idea")

class World(Judge):
    wants_evaluation = True
    def judge(self, workflow_task, output):
        return JudgeOutput(reward=output.evaluation.score)
'''


class Recorded:
    """A run folder with one recorded episode, made by a fake model."""

    def __init__(self, folder: Path, workflow: str, replies: Any, settings: str = "") -> None:
        (folder / "mine.py").write_text(CODE)
        self.folder = folder
        self.config = fake_config(
            folder,
            "  task_judge: {judge: mine.py->Length}\n  rollout: {compute_madness_checklist: []}\n" + settings,
            [f"astuner.rollout.workflow=mine.py->{workflow}", f"astuner.experiment_dir={folder}",
             "astuner.experiment_name=run", "astuner.rollout.max_retries=0"],
        )  # fmt: skip
        self.dir = RunDir(folder / "run")
        self.dir.episodes.mkdir(parents=True)
        self.dir.resolved.write_text(self.config.dump_yaml())
        runner = EpisodeRunner(self.config)
        models = one_model(FakeEngine(replies, TOKENIZER), ChatCodec(TOKENIZER))
        self.write(asyncio.run(runner.run(workflow_task("Say something", answer="x"), models, SAMPLING)))

    def write(self, *episodes: Episode) -> None:
        log = EpisodeLogWriter(self.dir.episodes)
        for episode in episodes:
            log.episode(7, episode)
        log.close()

    @property
    def episode(self) -> Episode:
        with EpisodeLog(self.dir.path) as log:
            return log.read("episode").episode

    def fork(self, replies: Any = (), *, times: int = 1, **plan: Any) -> list[Fork]:
        self.engine = FakeEngine(replies, TOKENIZER)
        wanted = Plan(**{"from_turn": 1, **plan})
        wanted.check(self.episode)
        models = one_model(self.engine, ChatCodec(TOKENIZER))
        return asyncio.run(run_forks(self.config, self.episode, wanted, models, times))

    def config_of(self, *overrides: str) -> Config:
        with RecordedRun(self.dir.path) as run:
            return run.config(overrides, backbone="debug")


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[..., Recorded]:
    return lambda workflow="Three", replies=("one", "two", "three"): Recorded(tmp_path, workflow, replies)


def said(episode: Episode) -> list[str]:
    return [turn.message["content"] for turn in episode.turns]


# --------------------------------------------------------------------------------------------------------- forking


def test_a_fork_has_the_recorded_tokens_up_to_its_turn_and_goes_on_with_the_model(recorded: Any) -> None:
    run = recorded()
    (fork,) = run.fork(["NEW", "NEWER"], from_turn=1)
    assert said(run.episode) == ["one", "two", "three"]
    assert said(fork.episode) == ["one", "NEW", "NEWER"]
    assert fork.episode.turns[0].generation == run.episode.turns[0].generation  # ids, logprobs and policy version
    assert fork.episode.turns[1].generation.prompt_ids == run.episode.turns[1].generation.prompt_ids
    assert (fork.given, fork.differs_from, fork.divergences) == ((0,), 1, ())
    assert len(run.engine.calls) == 2
    assert fork.episode.reward == 5.0  # the run's judge judges it
    assert fork.episode.workflow_task.episode_id == "episode.fork1"


def test_all_turns_can_be_replayed_without_a_model(recorded: Any) -> None:
    run = recorded()
    plan = Plan(from_turn=3)
    models = one_model(NoEngine(1000), ChatCodec(TOKENIZER))
    (fork,) = asyncio.run(run_forks(run.config, run.episode, plan, models))
    assert [t.generation for t in fork.episode.turns] == [t.generation for t in run.episode.turns]
    assert (fork.differs_from, fork.divergences, fork.episode.reward) == (None, (), 5.0)


def test_several_forks_differ_where_the_model_does_and_their_rewards_are_shown(recorded: Any) -> None:
    run = recorded()
    replies = iter(["a", "bb", "c", "dddd", "e", "ffffff"])
    forks = run.fork(lambda prompt: next(replies), from_turn=1, times=3)
    assert [fork.given for fork in forks] == [(0,)] * 3
    assert len({fork.episode.workflow_task.episode_id for fork in forks}) == 3
    rewards = sorted(fork.episode.reward for fork in forks)
    text = "\n".join(forks_text(run.episode, forks, 1))
    assert f"mean reward {sum(rewards) / 3:.4g} ({rewards[0]:.4g} to {rewards[-1]:.4g})" in text
    assert "tools and environments ran again" in text


@pytest.mark.parametrize("late", ["anna", "bert"])
def test_agents_that_come_in_another_order_get_their_own_replies(recorded: Any, tmp_path: Path, late: str) -> None:
    (tmp_path / "late").write_text("bert")
    run = recorded("Pair", ["anna 1", "bert 1", "anna 2", "bert 2"])
    before = {(t.agent, t.message["content"]): t.generation for t in run.episode.turns}
    assert {agent for agent, _ in before} == {"anna", "bert"}
    (tmp_path / "late").write_text(late)
    (fork,) = run.fork(from_turn=4)
    assert {(t.agent, t.message["content"]): t.generation for t in fork.episode.turns} == before
    assert fork.episode.turns[0].agent != late
    assert (fork.divergences, sorted(fork.given)) == ((), [0, 1, 2, 3])


def test_a_tool_that_answers_otherwise_is_reported_with_turn_and_token(recorded: Any, tmp_path: Path) -> None:
    run = recorded()
    (tmp_path / "tool0").write_text("tooth")
    (fork,) = run.fork(["NEW"], from_turn=3)
    (where,) = fork.divergences
    assert (where.turn, where.agent) == (1, "default")
    recorded_ids = run.episode.turns[1].generation.prompt_ids
    assert TOKENIZER.decode(recorded_ids[where.token : where.token + 2]) == "l0"
    assert "recorded 'l0" in where.said
    assert "now 'th" in where.said
    assert run.engine.calls == []  # nothing is asked after that
    assert fork.episode.stop_reason is StopReason.MODEL_FAILED
    assert "diverged: turn 1 of agent 'default'" in "\n".join(forks_text(run.episode, [fork], 3))


def test_a_divergence_that_is_allowed_goes_on_with_the_model(recorded: Any, tmp_path: Path) -> None:
    run = recorded()
    (tmp_path / "tool0").write_text("tooth")
    (fork,) = run.fork(["NEW", "NEWER"], from_turn=3, allow_divergence=True)
    assert said(fork.episode) == ["one", "NEW", "NEWER"]
    assert [d.turn for d in fork.divergences][:1] == [1]
    assert fork.given == (0,)


def test_a_turn_that_is_never_asked_for_is_a_divergence(recorded: Any, tmp_path: Path) -> None:
    run = recorded("Short", ["one", "two"])
    (tmp_path / "turns").write_text("fewer")
    (fork,) = run.fork(from_turn=2)
    (where,) = fork.divergences
    assert "turn 1 of agent 'default' was not requested" in where.said
    assert "(completed)" in where.said
    assert fork.differs_from == 1


def test_a_fork_ends_before_the_turn_that_was_said(recorded: Any) -> None:
    run = recorded()
    (fork,) = run.fork(["NEW", "NEWER"], from_turn=1, to_turn=2)
    assert said(fork.episode) == ["one", "NEW"]
    assert (fork.episode.stop_reason, fork.episode.reward) == (StopReason.CANCELLED, None)
    assert fork.episode.error == "stopped before turn 2 (--to-turn)"


def test_a_reply_that_reached_nobody_is_not_given_again(recorded: Any) -> None:
    episode = recorded().episode
    first = episode.turns[0]
    lost = replace(first, lost=True, trained=False)
    again = replace(first, index=1)
    recording = Recording(episode=replace(episode, turns=(lost, again)), plan=Plan(from_turn=2))
    assert recording.take("default", "default", first.generation.prompt_ids) == again


def test_another_policy_or_prompt_never_gets_a_recorded_reply(recorded: Any) -> None:
    episode = recorded().episode
    prompt = episode.turns[0].generation.prompt_ids
    with pytest.raises(Diverged, match="policy 'default' in the recording, and 'b' now"):
        Recording(episode=episode, plan=Plan(from_turn=3)).take("default", "b", prompt)
    with pytest.raises(Diverged, match=rf"differs from token {len(prompt)} on \(recorded {len(prompt)} tokens"):
        Recording(episode=episode, plan=Plan(from_turn=3)).take("default", "default", [*prompt, 1])
    once = Recording(episode=episode, plan=Plan(from_turn=1))
    assert once.take("default", "default", prompt) is not None
    assert once.take("default", "default", prompt) is None  # given once; the second time the model is asked


def test_turns_of_models_outside_count_where_turns_are_numbered(recorded: Any) -> None:
    episode = recorded().episode
    outside = ExternalTurn(index=3, agent="user", role="user", model="m", request=(), message={"content": "?"})
    more = replace(episode, external=(outside,))
    Plan(from_turn=4).check(more)
    with pytest.raises(ConfigError, match="turns 0 to 3; 4 replays all"):
        Plan(from_turn=5).check(more)


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """A model outside of the run that says these things; gives what it heard."""

    def says(*texts: str) -> list[Any]:
        heard: list[Any] = []

        async def chat(self: Any, messages: Any, tools: Any, options: Any) -> ExternalReply:
            heard.append([m["content"] for m in messages])
            said = {"role": "assistant", "content": texts[len(heard) - 1]}
            return ExternalReply(message=said, finish_reason="stop", prompt_tokens=5, completion_tokens=2)

        monkeypatch.setattr(ExternalModel, "chat", chat)
        return heard

    return says


EXTERNAL = "  agents: {player: {}, user: {model: external, base_url: http://127.0.0.1:9/v1, name: big}}\n"


def test_a_model_outside_of_the_run_says_again_what_it_said(outside: Any, tmp_path: Path) -> None:
    outside("why", "how")
    run = Recorded(tmp_path, "Guided", ["one", "two"], EXTERNAL)
    assert [t.index for t in run.episode.external] == [1, 3]
    heard = outside("NEW QUESTION")
    (fork,) = run.fork(["NEWER"], from_turn=2)  # one and why are recorded
    assert (fork.given, fork.divergences) == ((0, 1), ())
    assert (said(fork.episode), fork.episode.external[0].message["content"]) == (["one", "NEWER"], "why")
    assert heard == [["one", "why", "NEWER"]]  # it is asked from the fork on
    assert fork.episode.external[1].message["content"] == "NEW QUESTION"


def test_a_model_outside_of_the_run_that_hears_something_else_ends_the_fork(outside: Any, tmp_path: Path) -> None:
    outside("why", "how")
    run = Recorded(tmp_path, "Guided", ["one", "two"], EXTERNAL)
    (tmp_path / "tool").write_text("a")
    heard = outside()
    (fork,) = run.fork(from_turn=4)
    (where,) = fork.divergences
    assert (where.turn, where.agent, where.token, heard) == (1, "user", None, [])
    assert "turn 1 of agent 'user'" in where.said


# ------------------------------------------------------------------------------------------------ step by step


class Person:
    """Types what it is told."""

    def __init__(self, *types: str) -> None:
        self.types, self.heard = iter(types), list[str]()

    def say(self, text: str) -> None:
        self.heard.append(text)

    def ask(self, question: str) -> str:
        self.heard.append(question)
        return next(self.types)


@pytest.fixture
def person(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Person]:
    def sits_there(*types: str) -> Person:
        here = Person(*types)
        monkeypatch.setattr("astuner_record.replay.fork._say", here.say)
        monkeypatch.setattr("builtins.input", here.ask)
        return here

    return sits_there


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The functions on the stack at every breakpoint."""
    found: list[list[str]] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: found.append([f.function for f in inspect.stack()]))
    return found


@pytest.mark.parametrize("workflow", ["Three", "Plain"])
def test_every_model_call_is_shown_and_asked_about(
    recorded: Any, person: Any, stops: list[list[str]], workflow: str
) -> None:
    run = recorded(workflow)
    sitting = person("", "b", "x", "")
    (fork,) = run.fork(["NEW"], from_turn=2, step=True)
    heard = "\n".join(sitting.heard)
    assert "turn 0 of default: recorded turn 0 answers\n   user      Say something" in heard
    assert "▶ default   two   [recorded turn 1, 4 tokens]" in heard
    assert "turn 2 of default: the model answers" in heard
    assert "▶ default   NEW   [new, 4 tokens]" in heard
    assert heard.count("Say something") == 1  # only what is new
    assert len(stops) == 1
    assert "execute" in stops[0]  # the workflow is on the stack of the breakpoint
    assert said(fork.episode) == ["one", "two", "NEW"]


def test_a_person_can_go_on_or_quit(recorded: Any, person: Any) -> None:
    run = recorded()
    sitting = person("c")
    (fork,) = run.fork(["NEW"], from_turn=2, step=True)
    assert (len(fork.episode.turns), len([h for h in sitting.heard if "[Enter]" in h])) == (3, 1)
    person("", "q")
    (fork,) = run.fork(["NEW"], from_turn=2, step=True)
    assert (said(fork.episode), fork.stopped) == (["one"], BY_HAND)


def test_nobody_at_the_terminal_is_a_quit(recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    (fork,) = recorded().fork(["NEW"], from_turn=2, step=True)
    assert fork.stopped == BY_HAND


def test_a_breakpoint_stands_just_before_the_turn(recorded: Any, stops: list[list[str]]) -> None:
    run = recorded()
    (fork,) = run.fork(["NEW", "NEWER"], from_turn=1, break_at=1)
    assert len(stops) == 1
    assert "execute" in stops[0]
    assert said(fork.episode) == ["one", "NEW", "NEWER"]


def test_a_tagged_breakpoint_stops_in_a_judge(
    recorded: Any, stopped_at: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = recorded()
    assert astuner("replay", run.dir.path, "episode", "--judge", "mine.py->Tagged", "--db", "verdict|never") == 0
    assert stopped_at == ["verdict"]
    assert 'bp("never")' in capsys.readouterr().err  # and nothing came to the other one


@pytest.fixture
def stopped_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tags of the breakpoints that stopped; nobody is asked anything."""
    from astuner_debug import breakpoints

    tags: list[str] = []

    def stop(tag: str, frame: Any) -> None:
        tags.append(tag)
        breakpoints._say(breakpoints.Stop(tag=tag, place="mine.py:1", pid=1, host="here"))

    monkeypatch.setattr(breakpoints.Breakpoints, "stop", stop)
    return tags


# ----------------------------------------------------------------------------------------------------- the folder


def test_forks_are_a_run_of_their_own_beside_the_original(recorded: Any) -> None:
    run = recorded()
    before = {p: p.read_bytes() for p in run.dir.path.rglob("*") if p.is_file() and p.suffix != ".sqlite"}
    forks = run.fork(lambda prompt: "NEW", from_turn=1, times=2)
    with RecordedRun(run.dir.path) as whole:
        logged = whole.episode("episode")
        about = about_plan(run.dir, logged, Plan(from_turn=1), "base")
        folders = [write_forks(run.dir, run.config, logged, forks, about, None) for _ in range(2)]
    assert len(set(folders)) == 2  # of the same second
    assert all(folder.parent == run.dir.path / "replays" for folder in folders)
    with EpisodeLog(folders[0]) as log:
        assert [e.episode_id for e in log.list()] == ["episode", "episode.fork1", "episode.fork2"]
        assert log.read("episode").episode == run.episode
        assert said(log.read("episode.fork2").episode) == ["one", "NEW", "NEW"]
    replay = json.loads((folders[0] / "replay.json").read_text())
    assert (replay["from_turn"], [f["recorded_turns"] for f in replay["forks"]]) == (1, [[0], [0]])
    assert {p: p.read_bytes() for p in before} == before  # the run itself is as it was


# ------------------------------------------------------------------------------------------------------- judging


def ask(run: Recorded, judge: str, *episodes: Episode) -> list[Rejudged]:
    asker = Rejudge(run.config_of(f"astuner.task_judge.judge=mine.py->{judge}"))
    given = episodes or (run.episode,)
    return asyncio.run(asker.ask_all(iter(given), max_parallel=2, on_verdict=lambda one: None))


def test_the_same_judge_says_the_same_and_another_says_something_else(recorded: Any) -> None:
    run = recorded()
    (same,) = ask(run, "Length")
    assert same.verdict == run.episode.verdict
    (other,) = ask(run, "Other")
    assert other.verdict == JudgeOutput(reward=1.0)
    assert other.judged.is_success
    assert other.episode == run.episode


def test_a_reward_of_the_workflow_is_taken_out_before_a_judge_is_asked(recorded: Any) -> None:
    run = recorded("Plain")
    assert run.episode.reward_source == "workflow"
    (one,) = ask(run, "Length")
    assert one.verdict == JudgeOutput(reward=4.0, is_success=True)  # of "None": the workflow returned no response


@pytest.mark.parametrize(
    ("judge", "changes", "why"),
    [
        ("Broken", {}, "the judge Broken raised ValueError: no idea"),
        ("Other", {"stop_reason": StopReason.ENVIRONMENT_FAILED, "verdict": None}, "environment_failed"),
        ("Other", {"stop_reason": StopReason.CHECK_ABORTED}, "agent_madness_reward"),
        ("Other", {"stop_reason": StopReason.JUDGE_FAILED, "output": None}, "stop reason"),
    ],
)
def test_what_cannot_be_judged_says_why(recorded: Any, judge: str, changes: dict[str, Any], why: str) -> None:
    run = recorded()
    (one,) = ask(run, judge, replace(run.episode, **changes))
    assert one.verdict is None
    assert why in one.why


def test_an_episode_whose_judge_failed_is_judged_now(recorded: Any) -> None:
    run = recorded()
    failed = replace(run.episode, stop_reason=StopReason.JUDGE_FAILED, verdict=None, reward_source="")
    (one,) = ask(run, "Other", failed)
    assert one.verdict == JudgeOutput(reward=1.0)


def test_a_judge_that_compares_attempts_is_asked_about_groups(recorded: Any) -> None:
    run = recorded()

    def one(name: str, group: str, response: str, **changes: Any) -> Episode:
        of = replace(run.episode.workflow_task, episode_id=name, group_id=group)
        return replace(run.episode, workflow_task=of, output=WorkflowOutput(response=response), **changes)

    lost = one("e", "b", "longest of all", stop_reason=StopReason.WORKER_LOST, verdict=None)
    episodes = [one("a", "a", "xx"), one("c", "b", "x"), one("b", "a", "xxx"), one("d", "b", "xx"), lost]
    found = ask(run, "Longest", *episodes)
    assert [f.episode.workflow_task.episode_id for f in found] == ["a", "c", "b", "d", "e"]
    assert [f.verdict.reward if f.verdict else None for f in found] == [0.0, 0.0, 1.0, 1.0, None]
    assert "worker_lost" in found[-1].why
    (alone,) = ask(run, "Longest", episodes[0])
    assert alone.verdict == JudgeOutput(reward=1.0)


def test_a_judge_that_goes_by_the_environment_needs_its_evaluation(recorded: Any) -> None:
    run = recorded()
    of = run.episode.workflow_task
    with_world = replace(run.episode, workflow_task=replace(of, task=replace(of.task, env_type="lake")))
    (one,) = ask(run, "World", with_world)
    assert "environment's evaluation" in one.why


def test_agreement_counts_success_and_compares_rewards_by_group() -> None:
    def one(group: int, old: float, new: float | None) -> Rejudged:
        of = replace(workflow_task(), episode_id=f"{group}-{old}-{new}", group_id=str(group))
        episode = Episode(
            workflow_task=of, turns=(), output=WorkflowOutput(), verdict=JudgeOutput(reward=old),
            stop_reason=StopReason.COMPLETED,
        )  # fmt: skip
        return Rejudged(episode=episode, verdict=None if new is None else JudgeOutput(reward=new))

    verdicts = [(0, 1.0, 1.0), (0, 1.0, 0.0), (1, 0.0, 1.0), (1, 0.0, 0.0), (2, 1.0, 1.0), (3, 1.0, None)]
    agreed = agreement([one(*verdict) for verdict in verdicts])
    assert agreed is not None
    assert (agreed["episodes"], agreed["groups"]) == (5, 3)
    assert agreed["table"] == {"both_success": 2, "only_recorded": 1, "only_now": 1, "both_failure": 1}
    assert agreed["cohens_kappa"] == pytest.approx((0.6 - 0.52) / 0.48)  # chance: 0.6 * 0.6 + 0.4 * 0.4
    assert agreed["difference"] == pytest.approx((-0.5 + 0.5 + 0.0) / 3)
    assert agreement([one(0, 1.0, None)]) is None


# ------------------------------------------------------------------------------------------------------ the command


def astuner(*arguments: object) -> int:
    with pytest.raises(SystemExit) as e:
        main([str(a) for a in arguments])
    return int(e.value.code or 0)


def test_the_command_judges_one_and_many(
    recorded: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recorded()
    of = run.episode.workflow_task
    others = [replace(of, episode_id=f"e{n}", group_id=f"g{n}") for n in range(3)]
    run.write(*[replace(run.episode, workflow_task=other) for other in others])
    assert astuner("replay", run.dir.path, "episode") == 0
    text = capsys.readouterr().out
    assert "recorded  reward 5, success (judge)" in text
    assert "now       reward 5, success (mine.py->Length)" in text
    monkeypatch.chdir(run.folder)  # where the judge's file is looked for
    assert astuner("replay", run.dir.path, "--where", "step=7", "--judge", "mine.py->Other", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["agreement"]["table"]["both_success"] == 4
    assert [row["now"]["reward"] for row in found["episodes"]] == [1.0] * 4
    assert found["agreement"]["difference"] == -4.0
    assert astuner("replay", run.dir.path, "--where", "step=7", "--judge", "mine.py->Broken") == 0
    text = capsys.readouterr().out
    assert "0 of 4 episodes judged" in text
    assert "4 not judged: the judge Broken raised ValueError: no idea" in text
    assert astuner("replay", run.dir.path, "episode", "--judge", "mine.py->Broken") == 1


def test_the_command_lists_episodes(recorded: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded()
    assert astuner("replay", run.dir.path, "--list") == 0
    assert "episode  step 7     train" in capsys.readouterr().out
    assert astuner("replay", run.dir.path, "--list", "--where", "reward<1") == 0
    assert "no episode matches every --where" in capsys.readouterr().out
    run.write(replace(run.episode, workflow_task=workflow_task("\x1b]0;owned\x07 \u202egnp.exe", episode_id="odd")))
    assert astuner("replay", run.dir.path, "--list") == 0
    assert "\ufffd]0;owned\ufffd \ufffdgnp.exe" in capsys.readouterr().out  # a terminal obeys nothing a model wrote


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run"], "astuner replay RUN EPISODE"),
        (["run", "episode", "--where", "step=7"], "astuner replay RUN EPISODE"),
        (["run", "epsode"], "Did you mean episode?"),
        (["run", "episode", "--from-turn", "9"], "turns 0 to 2; 3 replays all"),
        (["run", "episode", "--from-turn", "2", "--to-turn", "2"], "must be greater than --from-turn 2"),
        (["run", "episode", "--times", "3"], "Add --from-turn K"),
        (["run", "episode", "--pdb"], "--from-turn K"),
        (["run", "episode", "--step"], "not a terminal"),
        (["run", "episode", "--step", "--times", "2"], "Remove --times"),
        (["run", "--where", "step=7", "--from-turn", "1"], "Remove --where and --list"),
        (["run", "--where", "step=8"], "matches every --where"),
        (["run", "--where", "step=7", "nonsense"], "astuner replay RUN EPISODE"),
        (["run", "episode", "--judge", "nothing"], "nothing"),
        (["run", "episode", "--from-turn", "1", "--checkpoint", "step-000007"], "step-000007 is not a model folder"),
        (["run", "episode", "--from-turn", "1"], "no checkpoint in"),
        (["nowhere", "episode"], "nowhere is not a run folder"),
    ],
)
def test_what_cannot_be_replayed_says_what_to_type(
    recorded: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: Sequence[str],
    says: str,
) -> None:
    run = recorded()
    monkeypatch.chdir(run.folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert astuner("replay", *arguments) in (1, 2)
    assert says in capsys.readouterr().err
    assert not (run.dir.path / "replays").exists()


def test_a_run_without_a_log_says_so(recorded: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded()
    for file in run.dir.episodes.iterdir():
        file.unlink()
    assert astuner("replay", run.dir.path, "episode") == 1
    assert "has no episode log" in capsys.readouterr().err


def test_without_a_judge_it_says_how_to_name_one(recorded: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded()
    assert astuner("replay", run.dir.path, "episode", "astuner.task_judge.judge=null") == 2
    assert "--judge NAME" in capsys.readouterr().err
