"""What a replay found, as a person reads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from astuner.contracts.types import Episode, JudgeOutput
from astuner.rollout.metrics import mean, wilson_interval
from astuner_record.episode_log.reader import Listed
from astuner_record.replay.fork import Fork
from astuner_record.replay.verdicts import Agreement, Rejudged

_WIDEST = 60
DIVERGED = (
    "the workflow left the record, so its tools, environment or code answer differently than then; to go on with the "
    "model there, add --allow-divergence"
)
AGAIN = "tools and environments ran again; only the model's replies were taken from the record"


def verdict_text(one: Rejudged, judge: str) -> str:
    """Both verdicts of one episode."""
    episode = one.episode
    source = episode.reward_source or episode.stop_reason.value
    lines = [
        f"episode {episode.workflow_task.episode_id}: {_short(episode.workflow_task.task.main_query)}",
        f"  recorded  {_verdict(episode.verdict, episode.is_success, source)}",
    ]
    if one.judged is None:
        lines.append(f"  {judge}  no verdict: {one.why}")
    else:
        lines.append(f"  now       {_verdict(one.verdict, one.judged.is_success, judge)}")
    if one.asked_again:
        lines.append(f"  the judge failed and was asked again {one.asked_again} times")
    return "\n".join(lines)


def verdicts_text(found: Sequence[Rejudged], agreed: Agreement | None, judge: str, *, show: int) -> str:
    """Many episodes with both verdicts: how they agree, and those that flipped."""
    return "\n".join(_verdicts(found, agreed, judge, show))


def _verdicts(found: Sequence[Rejudged], agreed: Agreement | None, judge: str, show: int) -> Iterator[str]:
    judged = sum(one.verdict is not None for one in found)
    yield f"{judge}: {judged} of {len(found)} episodes judged"
    for why, n in Counter(one.why for one in found if one.verdict is None).most_common():
        yield f"  {n} not: {why}"
    if agreed is None:
        yield "no episode has a recorded verdict and a new one, so there is nothing to compare"
        return
    t = agreed.table
    yield ""
    yield f"{'':<20}{'now success':>12}{'now failure':>13}"
    yield f"{'recorded success':<20}{t.both:>12}{t.only_a:>13}"
    yield f"{'recorded failure':<20}{t.only_b:>12}{t.neither:>13}"
    kappa = "not defined: both always say the same" if agreed.kappa is None else f"{agreed.kappa:.3f}"
    yield ""
    yield f"agreement on success {t.agreement:.1%} of {agreed.episodes} episodes; Cohen's kappa {kappa}"
    yield (
        f"reward {agreed.reward_old:.4g} recorded, {agreed.reward_new:.4g} now; difference {agreed.difference:+.4g}, "
        f"95 % [{agreed.interval.low:+.4g}, {agreed.interval.high:+.4g}] (bootstrap over {agreed.groups} groups)"
    )
    both = [(one.episode, new) for one in found if (new := one.judged)]
    flipped = [(old, new) for old, new in both if old.is_success not in (None, new.is_success)]
    if flipped:
        yield ""
        yield f"{len(flipped)} episodes flipped"
        for old, new in flipped[:show]:
            way = "failure → success" if new.is_success else "success → failure"
            yield f"  {old.workflow_task.episode_id}  {way}, reward {old.reward:.4g} → {new.reward:.4g}"
        if len(flipped) > show:
            yield f"  and {len(flipped) - show} more: --show {len(flipped)}, or --json"


def rejudged_row(one: Rejudged) -> dict[str, Any]:
    """For ``--json``."""
    episode, new = one.episode, one.judged
    return {
        "episode_id": episode.workflow_task.episode_id,
        "task_id": episode.workflow_task.task.task_id,
        "recorded": {
            "reward": episode.reward,
            "rewards": dict(episode.verdict.rewards) if episode.verdict else {},
            "is_success": episode.is_success,
            "source": episode.reward_source,
            "stop_reason": episode.stop_reason.value,
        },
        "now": None
        if new is None
        else {
            "reward": new.reward,
            "rewards": dict(one.verdict.rewards) if one.verdict else {},
            "is_success": new.is_success,
            "metrics": dict(one.verdict.metrics) if one.verdict else {},
        },
        "why": one.why,
        "asked_again": one.asked_again,
    }


def agreement_row(agreed: Agreement | None) -> dict[str, Any] | None:
    if agreed is None:
        return None
    return {
        "episodes": agreed.episodes,
        "groups": agreed.groups,
        "table": {
            "both_success": agreed.table.both,
            "only_recorded": agreed.table.only_a,
            "only_now": agreed.table.only_b,
            "both_failure": agreed.table.neither,
        },
        "agreement": agreed.table.agreement,
        "cohens_kappa": agreed.kappa,
        "reward_recorded": agreed.reward_old,
        "reward_now": agreed.reward_new,
        "difference": agreed.difference,
        "ci_low": agreed.interval.low,
        "ci_high": agreed.interval.high,
    }


def forks_text(original: Episode, forks: Sequence[Fork], from_turn: int) -> str:
    """The forks beside the episode they come from."""
    return "\n".join(_forks(original, forks, from_turn))


def _forks(original: Episode, forks: Sequence[Fork], from_turn: int) -> Iterator[str]:
    yield f"episode {original.workflow_task.episode_id}, forked at turn {from_turn}: {AGAIN}"
    yield f"{'':<10}{'reward':>8}{'success':>9}{'turns':>7}{'recorded':>10}  differs from  ended"
    yield _row("original", original, "", "")
    for number, fork in enumerate(forks, start=1):
        differs = "nowhere" if fork.differs_from is None else f"turn {fork.differs_from}"
        yield _row(f"fork {number}", fork.episode, str(len(fork.given)), differs)
    scored = [fork.episode for fork in forks if fork.episode.reward is not None]
    if len(forks) > 1 and scored:
        rewards = [e.reward for e in scored if e.reward is not None]
        successes = sum(bool(e.is_success) for e in scored)
        low, high = wilson_interval(successes, len(scored))
        yield (
            f"{len(scored)} scored forks: reward {mean(rewards):.4g} on average, {min(rewards):.4g} to "
            f"{max(rewards):.4g}; success {successes / len(scored):.1%} [{low:.1%}, {high:.1%}]; original "
            f"{'no reward' if original.reward is None else f'{original.reward:.4g}'}"
        )
        for reward, n in sorted(Counter(rewards).items())[:20]:
            yield f"  {reward:>8.4g}  {n:>4}  {'█' * max(1, round(40 * n / len(rewards)))}"
    for number, fork in enumerate(forks, start=1):
        yield from (f"fork {number}: {note}" for note in fork.notes)
        yield from (f"fork {number} left the record: {divergence.said}" for divergence in fork.divergences)


def _row(name: str, episode: Episode, recorded: str, differs: str) -> str:
    reward = "none" if episode.reward is None else f"{episode.reward:.4g}"
    success = {None: "", True: "yes", False: "no"}[episode.is_success]
    turns = len(episode.turns) + len(episode.external)
    row = f"{name:<10}{reward:>8}{success:>9}{turns:>7}{recorded:>10}  {differs:<12}  {episode.stop_reason.value}"
    return f"{row}: {_short(episode.error)}" if episode.error else row


def listed_row(one: Listed) -> dict[str, Any]:
    """For ``--json``."""
    fields = (
        "episode_id", "group_id", "task_id", "step", "split", "attempt", "reward", "success", "stop_reason", "turns",
    )  # fmt: skip
    return {**{name: getattr(one, name) for name in fields}, "agents": list(one.agents), "query": one.query}


def listed_text(listed: Sequence[Listed], total: int) -> str:
    """Episodes to choose from."""
    width = max((len(one.episode_id) for one in listed), default=0)
    lines = [
        f"{one.episode_id:<{width}}  step {one.step:<5} {one.split:<10} "
        f"{'none' if one.reward is None else f'{one.reward:.4g}':>7}  {one.turns} turns  {one.stop_reason:<12} "
        f"{_short(one.query)}"
        for one in listed
    ]
    if total > len(listed):
        lines.append(f"and {total - len(listed)} more: --show N, or fewer with --where CONDITION")
    return "\n".join(lines)


def _verdict(verdict: JudgeOutput | None, success: bool | None, source: str) -> str:
    if verdict is None:
        return f"no verdict ({source})"
    each = "".join(f", {name} {reward:.4g}" for name, reward in verdict.rewards.items())
    metrics = "".join(f", {name} {value:.4g}" for name, value in verdict.metrics.items())
    return f"reward {verdict.reward:.4g}{each}, {'success' if success else 'failure'} ({source}){metrics}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _WIDEST else line[: _WIDEST - 1] + "…"
