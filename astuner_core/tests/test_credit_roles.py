"""Who decides what: a group's comparison is its own, a team shares its penalties, and the silent get no credit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner.chat.codec import ChatCodec
from astuner.config.schema import AlgorithmSection
from astuner.contracts.errors import RunError
from astuner.contracts.types import (
    Episode,
    FinishReason,
    Generation,
    JudgeOutput,
    Sample,
    StopReason,
    Task,
    Turn,
    WorkflowTask,
)
from astuner.rollout.credit import Comparison, Credit, Scored, assign_credit
from astuner.rollout.credit import find_estimator as named
from astuner.rollout.models import one_model
from astuner.rollout.pool import Group
from astuner.rollout.turns import build_samples
from astuner.runs.run import TrainingRun
from astuner.runs.run_dir import RunDir
from astuner.runs.tasks import read_tasks
from astuner.testing import FakeEngine, fake_config
from tests.advantages import episode_advantages
from tests.table import table

WITHIN_GROUPS = ("grpo", "dr_grpo", "rloo")
COMPARING = (*WITHIN_GROUPS, "reinforce_plus_plus")

rewards = st.integers(0, 8).map(lambda n: n / 4)
penalties = st.integers(-16, 16).map(lambda n: n / 16)
teams = st.lists(st.lists(rewards, min_size=1, max_size=3), min_size=2, max_size=4)


def wolves(episode: str, each: Sequence[float], group: str = "g") -> Scored:
    """An episode with as many wolves, named 0, 1, …, as there are rewards."""
    samples = [
        Sample(
            episode_id=episode, group_id=group, agent=str(n), role="wolf", input_ids=[0, 0], loss_mask=[0, 1],
            logprobs=[0.0, 0.0], policy_version=0, reward=reward,
        )
        for n, reward in enumerate(each)
    ]  # fmt: skip
    credits = [Credit(agent=s.agent, role=s.role, policy=s.policy, reward=s.reward) for s in samples]
    return Scored(episode_id=episode, group_id=group, reward=0.0, samples=tuple(samples), credits=tuple(credits))


def advantages(
    episodes: Sequence[Scored], less: Mapping[tuple[str, str], float] | None = None, **algorithm: Any
) -> dict[tuple[str, str], float]:
    settings = AlgorithmSection.model_validate(algorithm)
    return {
        (s.episode_id, s.agent): s.advantage
        for s in assign_credit(episodes, settings, constant_length=1, penalties=less)
    }


def drawn_penalties(data: st.DataObject, episodes: Sequence[Scored]) -> dict[tuple[str, str], float]:
    return {(e.episode_id, c.agent): data.draw(penalties) for e in episodes for c in e.credits}


# --- every group decides for itself -------------------------------------------------------------------------------


@given(st.data(), teams, teams, teams, st.sampled_from(WITHIN_GROUPS))
def test_nothing_that_happens_in_one_group_changes_another(
    data: st.DataObject, own: list[list[float]], one: list[list[float]], other: list[list[float]], estimator: str
) -> None:
    mine = [wolves(f"g{i}", r, "g") for i, r in enumerate(own)]
    less = drawn_penalties(data, mine)
    found = []
    for elsewhere in (one, other):
        there = [wolves(f"h{i}", r, "h") for i, r in enumerate(elsewhere)]
        all_less = {**less, **drawn_penalties(data, there)}
        everybody = advantages([*mine, *there], all_less, adv_estimator=estimator)
        found.append({key: value for key, value in everybody.items() if key in less})
    assert found[0] == found[1] == advantages(mine, less, adv_estimator=estimator)


@table("estimator", ["grpo", "rloo"])
def test_a_wolf_with_a_reward_of_its_own_does_not_split_the_teams_of_another_group(estimator: str) -> None:
    shared = [wolves(f"g{i}", [float(i % 2)] * 3, "g") for i in range(4)]
    expected = episode_advantages(["g"] * 4, [0.0, 1.0, 0.0, 1.0], named(estimator))
    for reward in (0.0, 1e-9):
        there = [wolves("h0", [reward, 0.0, 0.0], "h"), wolves("h1", [0.0, 0.0, 0.0], "h")]
        found = advantages([*shared, *there], adv_estimator=estimator)
        assert [found[f"g{i}", "0"] for i in range(4)] == expected


def test_an_estimator_that_compares_over_the_step_decides_for_the_step() -> None:
    each = [wolves("g0", [1.0, 1.0], "g"), wolves("g1", [0.0, 0.0], "g"), wolves("h0", [0.5, 0.0], "h")]
    found = advantages(each, adv_estimator="reinforce_plus_plus")
    expected = episode_advantages(["g"] * 4 + ["h"] * 2, [1.0, 1.0, 0.0, 0.0, 0.5, 0.0], named("reinforce_plus_plus"))
    assert list(found.values()) == expected


# --- penalties ----------------------------------------------------------------------------------------------------


@given(st.data(), teams, st.sampled_from((*COMPARING, "none")))
def test_a_team_that_shares_its_reward_shares_the_mean_of_its_penalties(
    data: st.DataObject, sizes: list[list[float]], estimator: str
) -> None:
    """However they fall on its members, it counts once, and as one agent with that penalty would."""
    together = [wolves(str(i), [each[0]] * len(each)) for i, each in enumerate(sizes)]
    less = drawn_penalties(data, together)
    found = advantages(together, less, adv_estimator=estimator)
    net = [e.credits[0].reward - math.fsum(less[e.episode_id, c.agent] for c in e.credits) / len(e.credits)
           for e in together]  # fmt: skip
    expected = episode_advantages(["g"] * len(net), net, named(estimator))
    for (episode, _), advantage in found.items():
        assert advantage == expected[int(episode)]


@given(st.data(), teams, st.sampled_from(COMPARING))
def test_where_rewards_differ_within_a_team_each_pays_its_own_penalty(
    data: st.DataObject, each: list[list[float]], estimator: str
) -> None:
    episodes = [wolves("first", [0.0, 1.0]), *(wolves(str(i), r) for i, r in enumerate(each))]
    less = drawn_penalties(data, episodes)
    found = advantages(episodes, less, adv_estimator=estimator)
    entries = [(e.episode_id, c.agent, c.reward - less[e.episode_id, c.agent]) for e in episodes for c in e.credits]
    expected = episode_advantages(["g"] * len(entries), [net for *_, net in entries], named(estimator))
    assert [found[episode, agent] for episode, agent, _ in entries] == expected


@given(teams, penalties, st.sampled_from(COMPARING), st.sampled_from(["role", "agent"]))
def test_no_penalty_and_the_same_penalty_for_all_change_nothing(
    each: list[list[float]], same: float, estimator: str, by: str
) -> None:
    episodes = [wolves(str(i), r, "gh"[i % 2]) for i, r in enumerate(each)]
    settings = {"adv_estimator": estimator, "adv_compare": by}
    plain = advantages(episodes, **settings)
    assert advantages(episodes, dict.fromkeys(plain, 0.0), **settings) == plain
    assert advantages(episodes, dict.fromkeys(plain, same), **settings) == pytest.approx(plain, abs=1e-9)


# --- who is compared, and whether it matters -----------------------------------------------------------------------


def episode(number: int, verdict: JudgeOutput, *spoke: tuple[str, str], trained: bool = True) -> Episode:
    """In which these agents, each with its role, said a word."""
    generation = Generation(
        prompt_ids=[1], response_ids=[2], logprobs=[-1.0], finish_reason=FinishReason.STOP, policy_version=0
    )
    return Episode(
        workflow_task=WorkflowTask(task=Task(task_id="t"), episode_id=str(number), group_id="g"),
        turns=[
            Turn(index=i, agent=agent, role=role, generation=generation, continues=None, trained=trained)
            for i, (agent, role) in enumerate(spoke)
        ],
        output=None,
        verdict=verdict,
        stop_reason=StopReason.COMPLETED,
    )


CAST = (("p1", "player"), ("p2", "player"), ("w", "wolf"))
verdicts = st.one_of(
    rewards.map(lambda r: JudgeOutput(reward=r)),
    st.fixed_dictionaries({name: rewards for name, _ in CAST}).map(JudgeOutput.per_agent),
)
games = st.lists(st.tuples(verdicts, st.sets(st.sampled_from(CAST))), min_size=1, max_size=4)


@given(games, st.sampled_from(["role", "agent"]), st.sampled_from(WITHIN_GROUPS))
def test_a_group_has_spread_exactly_when_somebody_gets_an_advantage(
    played: list[tuple[JudgeOutput, set[tuple[str, str]]]], by: str, estimator: str
) -> None:
    episodes = [episode(i, verdict, *sorted(spoke)) for i, (verdict, spoke) in enumerate(played)]
    comparison = Comparison(by=by, agents_named=True)
    group = Group(group_id="g", task=Task(task_id="t"), episodes=tuple(episodes), comparison=comparison)
    scored = [Scored.of(e, build_samples(e).samples, agents_named=True) for e in episodes]
    found = advantages(scored, adv_estimator=estimator, adv_compare=by)
    assert group.has_spread is any(found.values())


def test_an_episode_in_which_no_trained_agent_spoke_is_compared_with_nobody() -> None:
    """Not even with a role that is called as that of an experiment without agents."""
    won = JudgeOutput(reward=1.0)
    episodes = [
        episode(0, won, ("x", "default")),
        episode(1, won, ("x", "default")),
        episode(2, JudgeOutput(reward=0.0), ("w", "wolf"), trained=False),
    ]
    scored = [Scored.of(e, build_samples(e).samples, agents_named=True) for e in episodes]
    samples = assign_credit(scored, AlgorithmSection(loss_agg_mode="seq-mean-token-sum"), constant_length=1)
    assert [(s.advantage, s.token_weight) for s in samples] == [(0.0, 0.5), (0.0, 0.5)]


def test_without_named_agents_an_episode_without_a_word_still_counts() -> None:
    episodes = [episode(0, JudgeOutput(reward=1.0), ("x", "default")), episode(1, JudgeOutput(reward=0.0))]
    (sample,) = assign_credit([Scored.of(e, build_samples(e).samples) for e in episodes],
                              AlgorithmSection(loss_agg_mode="seq-mean-token-sum"), constant_length=1)  # fmt: skip
    assert sample.advantage == episode_advantages(["g"] * 2, [1.0, 0.0], named("grpo"))[0]
    assert sample.token_weight == 0.5


# --- through a whole step -----------------------------------------------------------------------------------------

WORKFLOW = """
from astuner import Workflow, WorkflowOutput
class Mine(Workflow):
    async def execute(self, workflow_task, model_tuner):
        async def ask(name, role):
            return await model_tuner.chat([{'role': 'user', 'content': 'hi'}], agent_name=name, role=role)
        n = workflow_task.attempt
"""
SELF_PLAY = """
        await ask('p1', 'default'), await ask('p2', 'default')
        return WorkflowOutput(reward={'p1': n % 2, 'p2': 1 - n % 2})
"""
FIRST_ONLY_THE_GOAT = """
        await ask('x', 'default') if n else await ask('goat', 'goat')
        return WorkflowOutput(reward=min(n, {most}) / 2)
"""


def one_step(folder: Path, body: str, repeat: int) -> tuple[list[Sample], dict[str, float]]:
    """One step of an experiment in which an agent that trains and one that does not are named."""
    (folder / "mine.py").write_text(WORKFLOW + body)
    (folder / "tasks.jsonl").write_text('{"question": "q"}\n')
    config = fake_config(
        folder,
        f"""
  agents: {{default: {{}}, goat: {{train: false}}}}
  task_reader: {{type: jsonl, jsonl: {{training: {{file_path: "{folder}/tasks.jsonl"}}}}}}
  rollout: {{workflow: "{folder}/mine.py->Mine", num_repeat: {repeat}}}
  data: {{train_batch_size: 1}}
  trainer_common: {{total_steps: 1, algorithm: {{dynamic_sampling: true, max_draws: 1}}}}
""",
    )
    run_dir = RunDir(folder / "run")
    run_dir.start()
    run = TrainingRun(config, run_dir, read_tasks(config))
    try:
        engine = FakeEngine(lambda prompt: "Yes.")
        rollout = run.rollout(one_model(engine, ChatCodec(engine.tokenizer)), 1)
        return run.credit(rollout, policy_version=0)[0], rollout.metrics
    finally:
        run.close()


def test_dynamic_sampling_keeps_a_self_played_game(tmp_path: Path) -> None:
    samples, metrics = one_step(tmp_path, SELF_PLAY, 2)
    assert metrics["adv/zero_group_frac"] == 0.0
    assert [s.advantage for s in samples] == pytest.approx([-0.866, 0.866, 0.866, -0.866], abs=1e-3)


def test_dynamic_sampling_drops_a_group_that_differs_only_where_nobody_trained(tmp_path: Path) -> None:
    samples, metrics = one_step(tmp_path, FIRST_ONLY_THE_GOAT.format(most=1), 3)
    assert (samples, metrics["adv/zero_group_frac"]) == ([], 1.0)
    assert metrics["reward/mean"] == pytest.approx(1 / 3)


def test_an_attempt_in_which_nobody_trained_is_not_in_the_others_baseline(tmp_path: Path) -> None:
    samples, metrics = one_step(tmp_path, FIRST_ONLY_THE_GOAT.format(most=2), 3)
    assert metrics["reward/mean"] == pytest.approx(1 / 2)
    assert [s.advantage for s in samples] == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], abs=1e-3)


def test_who_is_compared_with_whom_is_read_from_the_config(tmp_path: Path) -> None:
    text = "  agents: {wolf: {}}\n  trainer_common: {algorithm: {adv_compare: agent}}\n"
    assert Comparison.of(fake_config(tmp_path, text).astuner) == Comparison(by="agent", agents_named=True)
    assert Comparison.of(fake_config(tmp_path).astuner) == Comparison()


def test_a_step_in_which_nobody_asked_the_model_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no agent called the model in 2 episodes"):
        one_step(tmp_path, "\n        return WorkflowOutput(reward=float(n))\n", 2)
