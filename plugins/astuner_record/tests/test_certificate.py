"""The certificate: every turn and every token is counted once, and a resumed run counts on as if it had not stopped."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner import RunDir
from astuner.chat.codec import ChatCodec
from astuner.contracts.events import StepEnded
from astuner.contracts.types import (
    BRANCH_REASONS,
    STARTS,
    Episode,
    ExternalTurn,
    FinishReason,
    Generation,
    JudgeOutput,
    Sample,
    StopReason,
    Task,
    Turn,
    WorkflowTask,
    wasted_prompt,
)
from astuner.rollout.metrics import rollout_metrics
from astuner.rollout.models import one_model
from astuner.rollout.pool import Group
from astuner.rollout.turns import build_samples
from astuner.runs.launch import finish
from astuner.runs.run import TrainingRun
from astuner.runs.tasks import read_tasks
from astuner.testing import FakeEngine, fake_config
from astuner_debug.backbone import transcript_text
from astuner_record.certificate import LEFT_OUT, MOST_AGENTS, OTHERS, Certificate, summary_of
from astuner_record.conversations import transcript

MUTE = "mute"
REASONS = sorted(BRANCH_REASONS)


def turn(index: int, prompt: int, response: int, **more: Any) -> Turn:
    generation = Generation(
        prompt_ids=[7] * prompt,
        response_ids=[8] * response,
        logprobs=[-1.0] * response,
        finish_reason=FinishReason.STOP,
        policy_version=0,
    )
    return Turn(index=index, agent=more.pop("agent", "a"), generation=generation, continues=None, **more)


def episode(turns: list[Turn], verdict: JudgeOutput | None, name: str = "g-0") -> Episode:
    task = WorkflowTask(task=Task(task_id="t"), episode_id=name, group_id=name.partition("-")[0])
    return Episode(workflow_task=task, turns=turns, output=None, verdict=verdict, stop_reason=StopReason.COMPLETED)


def group(*episodes: Episode) -> Group:
    return Group(group_id=episodes[0].workflow_task.group_id, task=Task(task_id="t"), episodes=episodes)


@st.composite
def episodes(draw: st.DrawFn) -> tuple[Episode, bool]:
    """An episode of up to three agents, and whether its group is trained on."""
    turns: list[Turn] = []
    untrained = draw(st.sets(st.sampled_from("abc")))
    for index in range(draw(st.integers(1, 8))):
        agent = draw(st.sampled_from("abc"))
        parent = draw(st.sampled_from([None, *[t for t in turns if t.agent == agent]]))
        length = (
            draw(st.integers(1, 3))
            if parent is None
            else len(parent.generation.prompt_ids) + len(parent.generation.response_ids)
        )
        mute = agent in untrained
        received = draw(st.integers(0, 4)) != 4
        lost = not received and not mute
        made = turn(index, length, draw(st.integers(0, 3)), agent=agent, trained=received and not mute, lost=lost)
        made = replace(made, role=MUTE if mute else "default")
        if parent is not None:
            approximation = draw(st.sampled_from(["", "", "call_ids"]))
            made = replace(made, continues=parent.index, approximation=approximation)
        elif any(t.agent == agent for t in turns):
            made = replace(made, branch_reason=draw(st.sampled_from(REASONS)))
        turns.append(made)
    verdict = draw(
        st.sampled_from(
            [None, JudgeOutput(reward=1.0), JudgeOutput(reward=0.0, rewards={"a": 0.0}), JudgeOutput(reward=1.0)]
        )
    )
    return episode(turns, verdict, f"g-{draw(st.integers(0, 10**9))}"), draw(st.booleans())


@given(
    st.lists(episodes(), min_size=1, max_size=4, unique_by=lambda e: e[0].workflow_task.episode_id), st.integers(1, 3)
)
def test_every_token_is_trained_or_has_a_reason(drawn: list[tuple[Episode, bool]], cap: int) -> None:
    samples = {
        e.workflow_task.episode_id: build_samples(e, max_samples=cap).samples
        for e, kept in drawn
        if kept and e.reward is not None
    }
    certificate = Certificate()
    certificate.rollout(1, [e for e, _ in drawn], samples)
    everything = [t for e, _ in drawn for t in e.turns]
    for (role, agent), tally in certificate.agents.items():
        own = [t for t in everything if (t.role, t.agent) == (role, agent)]
        c = tally.counts
        assert c["untrained"] == (c["generated"] if role == MUTE else 0)
        assert c["turns"] == len(own)
        assert c["generated"] == sum(len(t.generation.response_ids) for t in own)
        assert c["generated"] == c["trained"] + c["untrained"] + tally.left_out.total()
        assert all(n > 0 for n in (+tally.left_out).values())
        assert c["going_on"] == c["exact"] + sum(tally.approximations.values()) + sum(
            n for reason, n in tally.branches.items() if reason not in STARTS
        )
    whole = certificate.whole
    assert whole.counts["trained"] == sum(s.trained_tokens for built in samples.values() for s in built)
    assert whole.counts["wasted_prompt"] == wasted_prompt(everything) <= whole.counts["prompt"]
    assert set(whole.left_out) <= set(LEFT_OUT)
    again = Certificate()
    again.restore(json.loads(json.dumps(certificate.state())), 1)
    assert again.as_dict() == certificate.as_dict()


REWRITTEN = turn(1, 30, 4, branch_reason="history_rewritten")
NEW = turn(2, 10, 2, branch_reason="new_conversation")


def test_a_new_conversation_wastes_nothing_and_the_first_example_is_kept() -> None:
    certificate = Certificate()
    first = episode([turn(0, 20, 5), REWRITTEN, NEW], JudgeOutput(reward=1.0), "g-0")
    later = episode([turn(0, 20, 5), turn(3, 9, 1, branch_reason="history_rewritten")], JudgeOutput(reward=1.0), "g-1")
    both = {e.workflow_task.episode_id: build_samples(e).samples for e in (first, later)}
    certificate.rollout(4, [first, later], both)
    found = certificate.as_dict()
    assert found["tokens"]["wasted_prompt"] == 39
    assert found["branches"] == {"history_rewritten": 2, "new_conversation": 1}
    assert found["first_examples"]["history_rewritten"] == {"step": 4, "episode_id": "g-0", "turn": 1, "agent": "a"}
    assert found["meaning"].keys() == {"history_rewritten", "new_conversation"}
    assert found["continued_exactly_share"] == 0
    assert "agents" not in found
    assert summary_of(found) == {
        "Exact continuation": "0 of 2 turns (0.0 %); 2 history_rewritten, 1 new_conversation",
        "Trained tokens": "17 of 17 generated (100 %); 39 prompt tokens wasted",
    }


def test_a_share_is_100_percent_only_when_nothing_is_missing() -> None:
    certificate = Certificate()
    certificate.rollout(1, [episode([turn(0, 1, 1)], None), episode([turn(0, 1, 9999)], JudgeOutput(reward=1))], {})
    text = summary_of(certificate.as_dict())
    assert text["Exact continuation"] == "no earlier turn to continue in 2 turns"
    assert text["Trained tokens"] == "0 of 10,000 generated (0.0 %); 9,999 unused_groups, 1 unscored_episodes"
    kept = episode([turn(0, 1, 9999)], JudgeOutput(reward=1), "h-0")
    almost = Certificate()
    almost.rollout(1, [kept, episode([turn(0, 1, 1)], None)], {"h-0": build_samples(kept).samples})
    assert summary_of(almost.as_dict())["Trained tokens"].startswith("9,999 of 10,000 generated (99.9 %)")


def test_a_turn_that_goes_on_from_almost_the_same_is_exact_neither_in_a_step_nor_in_the_certificate() -> None:
    turns = [turn(0, 1, 1), *(replace(turn(n, 1, 1), continues=n - 1) for n in (1, 2, 3))]
    turns[2] = replace(turns[2], approximation="names")
    turns.append(turn(4, 1, 1, branch_reason="history_rewritten"))
    spoken = episode(turns, JudgeOutput(reward=1.0))
    certificate = Certificate()
    certificate.rollout(1, [spoken], {})
    metrics = rollout_metrics([group(spoken)])
    assert metrics["merge/exact_frac"] == certificate.as_dict()["continued_exactly_share"] == 2 / 4
    assert metrics["merge/approximated_frac"] == 1 / 5


def sample(tokens: int, advantage: float) -> Sample:
    mask = [0, *[1] * tokens]
    return Sample(
        episode_id="g-0",
        group_id="g",
        agent="a",
        input_ids=mask,
        loss_mask=mask,
        logprobs=[0.0] * len(mask),
        policy_version=0,
        reward=1.0,
        advantage=advantage,
    )


def test_tokens_without_advantage_count_once_however_often_credit_is_assigned() -> None:
    certificate = Certificate()
    certificate.credited(1, [sample(3, 0.0), sample(5, 0.5)])
    certificate.credited(1, [sample(3, 0.1), sample(5, 0.0)])  # with KL in the reward it is assigned again
    certificate.credited(2, [sample(2, 0.0)])
    assert certificate.whole.counts["zero_advantage"] == 7


def test_a_reply_that_reached_nobody_is_not_an_untrained_agents() -> None:
    spoken = episode([turn(0, 2, 3, trained=False, lost=True), turn(1, 2, 4)], JudgeOutput(reward=1.0))
    certificate = Certificate()
    certificate.rollout(1, [spoken], {"g-0": build_samples(spoken).samples})
    tokens = certificate.as_dict()["tokens"]
    assert (tokens["left_out"], tokens["trained"], tokens["of_untrained_agents"]) == ({"unreceived_replies": 3}, 4, 0)


def test_many_agents_are_counted_together() -> None:
    turns = [turn(i, 1, 1, agent=f"a{i}") for i in range(2 * MOST_AGENTS)]
    spoken = episode(turns, JudgeOutput(reward=1.0))
    certificate = Certificate()
    certificate.rollout(1, [spoken], {"g-0": build_samples(spoken, max_samples=1000).samples})
    assert len(certificate.agents) == MOST_AGENTS + 1
    assert certificate.agents[OTHERS, OTHERS].counts["trained"] == MOST_AGENTS
    assert certificate.whole.counts["trained"] == 2 * MOST_AGENTS


def test_a_step_says_what_was_wasted_and_why() -> None:
    metrics = rollout_metrics([group(episode([turn(0, 20, 5), REWRITTEN, NEW], JudgeOutput(reward=1.0)))])
    assert metrics["tokens/wasted_prompt"] == 30
    assert {k: v for k, v in metrics.items() if k.startswith("merge/branches/")} == {
        "merge/branches/history_rewritten": 1,
        "merge/branches/new_conversation": 1,
    }


def test_a_transcript_holds_everything_that_was_asked_and_who_answered() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    asked = {"request": [{"role": "user", "content": "q"}], "message": {"role": "assistant", "content": "x"}}
    turns = [
        turn(0, 2, 1, tools=tools, **asked),
        turn(2, 2, 1, tools=tools, branch_reason="repeated_request", trained=False, role="wolf", policy="b", **asked),
        replace(turn(3, 3, 1, approximation="names", **asked), continues=0),
    ]
    said = ExternalTurn(
        index=1,
        agent="judge",
        role="moderator",
        model="big",
        request=[{"role": "user", "content": "who?"}],
        message={"role": "assistant", "content": "nobody"},
    )
    verdict = JudgeOutput.per_agent({"wolf": 1.0, "a": 0.0})
    written = transcript(replace(episode(turns, verdict), external=[said]))
    assert [t["turn"] for t in written["turns"]] == [0, 1, 2, 3]
    first, outside, second, third = written["turns"]
    assert written["tools"] == [tools]
    assert (first["tools"], second["tools"], "tools" in third) == (0, 0, False)
    assert (second["role"], second["policy"], second["trained"]) == ("wolf", "b", False)
    assert third["approximation"] == "names"
    assert (outside["model"], outside["messages"]) == ("big", said.request)
    assert written["rewards"] == {"wolf": 1.0, "a": 0.0}
    assert json.loads(json.dumps(written)) == written
    text = transcript_text(replace(episode(turns, verdict), external=[said]))
    assert text.index("who?") < text.index("repeated_request, not trained") < text.index("approximate: names")
    assert "[big, " in text


WORKFLOW = '''
from astuner import Workflow, WorkflowOutput

class Forgetful(Workflow):
    """Says three things; the third time it has forgotten the first."""

    async def execute(self, workflow_task, model_tuner):
        first = [{"role": "user", "content": workflow_task.task.main_query}]
        a = await model_tuner.chat(first)
        second = [*first, dict(a.message), {"role": "user", "content": "and?"}]
        b = await model_tuner.chat(second)
        await model_tuner.chat([*second[2:], dict(b.message), {"role": "user", "content": "so?"}])
        return WorkflowOutput(reward=float(workflow_task.attempt % 2))
'''


@pytest.fixture
def experiment(tmp_path: Path) -> Any:
    (tmp_path / "workflow.py").write_text(WORKFLOW)
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"question": "Task {n}?"}}\n' for n in range(5)))
    text = f"""
  task_reader:
    type: jsonl
    jsonl:
      training:
        file_path: {tmp_path}/tasks.jsonl
  rollout:
    workflow: {tmp_path}/workflow.py->Forgetful
    num_repeat: 2
  data:
    train_batch_size: 2
  trainer_common:
    total_steps: 4
"""
    opened = []

    def open_run(name: str) -> TrainingRun:
        config = fake_config(tmp_path, text)
        folder = RunDir(tmp_path / name)
        if not folder.path.exists():
            folder.start()
        opened.append(TrainingRun(config, folder, read_tasks(config)))
        return opened[-1]

    yield open_run
    for one in opened:
        one.close()


def step(run: TrainingRun, number: int) -> None:
    engine = FakeEngine(lambda prompt: "I see.")
    rollout = run.rollout(one_model(engine, ChatCodec(engine.tokenizer)), number)
    _, metrics = run.credit(rollout, policy_version=0)
    run.publish(StepEnded(step=number, metrics={**rollout.metrics, **metrics}))


def test_a_resumed_runs_certificate_is_an_uninterrupted_ones(experiment: Any) -> None:
    straight, stopped = experiment("straight"), experiment("stopped")
    for number in (1, 2, 3):
        step(straight, number)
    step(stopped, 1)
    state = stopped.state()
    step(stopped, 2)  # after the state was taken: it is lost, and made again
    resumed = experiment("stopped")
    resumed.restore(json.loads(json.dumps(state)), 1)
    again = Certificate()
    again.restore(state["certificate"], 1)
    assert json.loads(resumed.run_dir.certificate.read_text()) == again.as_dict()
    for number in (2, 3):
        step(resumed, number)
    whole = json.loads(straight.run_dir.certificate.read_text())
    assert json.loads(resumed.run_dir.certificate.read_text()) == whole
    assert whole["turns"] == 3 * 4 * 3
    assert whole["branches"] == {"messages_removed": 12}
    assert whole["continued_exactly_share"] == 0.5
    assert whole["tokens"]["trained_share"] == 1
    assert whole["first_examples"]["messages_removed"]["step"] == 1
    summary = finish(resumed, trains=False).summary()
    assert "12 of 24 turns (50.0 %); 12 messages_removed" in summary
    assert re.search(r"Trained tokens +(\S+) of \1 generated \(100 %\)", summary)


def test_a_state_of_an_older_version_counts_from_there_and_says_so(experiment: Any) -> None:
    run = experiment("older")
    step(run, 1)
    state = {name: value for name, value in run.state().items() if name != "certificate"}
    run.restore(state, 1)
    step(run, 2)
    found = json.loads(run.run_dir.certificate.read_text())
    assert (found["counted_since_step"], found["turns"]) == (1, 12)
