"""Certificate of a run: how many turns continue exactly, and where every generated token went.

A turn with a predecessor continues exactly if its prompt starts with the recorded tokens of that turn. The certificate
counts exact and inexact turns, gives the reason for each inexact one, and follows generated tokens into the samples.

Invariant: for every agent, ``generated = trained + untrained + left_out``, so every token that is not trained has a
reason. Only training episodes count, in their final state; the certificate excludes attempts that were retried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from astuner import RunDir
from astuner.contracts.events import (
    Event,
    Measured,
    RolledOut,
    RunContext,
    RunResumed,
    SamplesCredited,
    Subscriber,
    Summary,
)
from astuner.contracts.types import APPROXIMATIONS, BRANCH_REASONS, Episode, Sample, Turn, wasted_prompt

LEFT_OUT = {
    "unreceived_replies": "the client did not receive the reply, for example because it disconnected",
    "unscored_episodes": "the episode failed and has no reward (failures.jsonl lists the cause)",
    "agents_without_reward": "the episode ended with another agent's reward, and this agent has no reward",
    "unused_groups": "the group was not trained: too few of its episodes have a reward, all its rewards are equal "
    "(dynamic sampling), the batch was full, or oversampling cut the group short (tokens of cancelled episodes are "
    "not counted)",
    "max_sample_per_task": "the episode forked into more samples than rollout.multi_turn.max_sample_per_task",
}
"""Reason why a token of a trained agent is in no sample -> explanation. The first reason that applies counts."""

MOST_AGENTS = 64
"""Number of agents with their own entry. All further agents are counted as `OTHERS`."""
OTHERS = "(others)"


@dataclass
class Tally:
    """Turn and token counts of one agent or of all agents."""

    counts: Counter[str] = field(default_factory=Counter)
    """``turns``, ``going_on`` (turns with a predecessor), ``exact`` (the exact ones among these), and tokens:
    ``prompt``, ``wasted_prompt``, ``generated``, ``trained``, ``untrained``, ``zero_advantage`` (among the trained)."""
    branches: Counter[str] = field(default_factory=Counter)
    """Branch reason -> turns."""
    approximations: Counter[str] = field(default_factory=Counter)
    """Approximation that was accepted to continue a turn -> turns."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason of `LEFT_OUT` -> tokens."""

    def turn(self, turn: Turn) -> None:
        """Add one turn to the counts."""
        counts = self.counts
        counts["turns"] += 1
        counts["going_on"] += turn.has_predecessor
        counts["exact"] += turn.continues is not None and not turn.approximation
        counts["prompt"] += len(turn.generation.prompt_ids)
        counts["wasted_prompt"] += wasted_prompt([turn])
        counts["generated"] += len(turn.generation.response_ids)
        if turn.branch_reason:
            self.branches[turn.branch_reason] += 1
        if turn.approximation:
            self.approximations[turn.approximation] += 1

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object for `certificate.json`."""
        c = self.counts
        return {
            "turns": c["turns"],
            "turns_going_on": c["going_on"],
            "continued_exactly": c["exact"],
            "continued_exactly_share": c["exact"] / c["going_on"] if c["going_on"] else None,
            "branches": dict(sorted(self.branches.items())),
            "approximations": dict(sorted(self.approximations.items())),
            "tokens": {
                "prompt": c["prompt"],
                "wasted_prompt": c["wasted_prompt"],
                "generated": c["generated"],
                "trained": c["trained"],
                "trained_with_zero_advantage": c["zero_advantage"],
                "of_untrained_agents": c["untrained"],
                "left_out": dict(sorted(self.left_out.items())),
                "trained_share": c["trained"] / c["generated"] if c["generated"] else None,
            },
        }

    def state(self) -> dict[str, dict[str, int]]:
        return {name: dict(counter) for name, counter in vars(self).items()}

    @classmethod
    def of(cls, state: Mapping[str, Mapping[str, int]]) -> Tally:
        return cls(**{name: Counter(counts) for name, counts in state.items()})


class Certificate:
    """Counts over the training episodes of a run. A resumed run restores them from `state`."""

    def __init__(self) -> None:
        self.agents: dict[tuple[str, str], Tally] = {}
        """(role, agent) -> counts, in order of appearance."""
        self.examples: dict[str, dict[str, Any]] = {}
        """Branch reason or approximation -> its first occurrence."""
        self.since = 0
        """Step after which counting began. 0 unless the run was resumed from a state without a certificate."""
        self._credited: tuple[int, Counter[tuple[str, str]]] = 0, Counter()
        """Last credited step, and its trained tokens with advantage 0."""

    @property
    def whole(self) -> Tally:
        """Counts over all agents."""
        whole = Tally()
        for tally in self.agents.values():
            for name, counter in vars(tally).items():
                getattr(whole, name).update(counter)
        return whole

    def rollout(self, step: int, episodes: Iterable[Episode], samples: Mapping[str, Sequence[Sample]]) -> None:
        """Count the episodes of one step. Parameters as in `RolledOut`."""
        for episode in episodes:
            self._episode(step, episode, samples.get(episode.workflow_task.episode_id))

    def credited(self, step: int, samples: Sequence[Sample]) -> None:
        """Count tokens without a policy-loss gradient. The last call for a step replaces earlier ones."""
        before = self._credited[1] if self._credited[0] == step else Counter()
        zero: Counter[tuple[str, str]] = Counter()
        for sample in samples:
            if sample.advantage == 0:
                zero[self._key(sample.role, sample.agent)] += sample.trained_tokens
        for key in {**before, **zero}:
            self._tally(key).counts["zero_advantage"] += zero[key] - before[key]
        self._credited = step, zero

    def _episode(self, step: int, episode: Episode, samples: Sequence[Sample] | None) -> None:
        could: Counter[tuple[str, str]] = Counter()
        for turn in episode.turns:
            key, n = self._key(turn.role, turn.agent), len(turn.generation.response_ids)
            tally = self._tally(key)
            tally.turn(turn)
            for what in filter(None, (turn.branch_reason, turn.approximation)):
                where = {"step": step, "episode_id": episode.workflow_task.episode_id, "turn": turn.index}
                self.examples.setdefault(what, {**where, "agent": turn.agent})
            if turn.lost:
                tally.left_out["unreceived_replies"] += n
            elif not turn.trained:
                tally.counts["untrained"] += n
            elif episode.reward is None:
                tally.left_out["unscored_episodes"] += n
            elif episode.reward_of(turn.agent, turn.role) is None:
                tally.left_out["agents_without_reward"] += n
            elif samples is None:
                tally.left_out["unused_groups"] += n
            else:
                could[key] += n
        for sample in samples or ():
            key, n = self._key(sample.role, sample.agent), sample.trained_tokens
            self._tally(key).counts["trained"] += n
            could[key] -= n
        for key, n in could.items():
            if n:
                self._tally(key).left_out["max_sample_per_task"] += n

    def _key(self, role: str, agent: str) -> tuple[str, str]:
        known = (role, agent) in self.agents or len(self.agents) < MOST_AGENTS
        return (role, agent) if known else (OTHERS, OTHERS)

    def _tally(self, key: tuple[str, str]) -> Tally:
        if key not in self.agents:
            self.agents[key] = Tally()
        return self.agents[key]

    def as_dict(self) -> dict[str, Any]:
        """Return the content of ``certificate.json``, including explanations of the reasons in it."""
        whole = self.whole
        met = [*whole.branches, *whole.approximations]
        found: dict[str, Any] = {
            "counted_since_step": self.since,
            **whole.as_dict(),
            "first_examples": self.examples,
        }
        if len(self.agents) > 1:
            found["agents"] = [
                {"agent": agent, "role": role, **tally.as_dict()} for (role, agent), tally in self.agents.items()
            ]
        words = {**BRANCH_REASONS, **APPROXIMATIONS, **LEFT_OUT}
        found["meaning"] = {word: words[word] for word in sorted({*met, *whole.left_out}) if word in words}
        return found

    def state(self) -> dict[str, Any]:
        """Return the counts as a JSON-serialisable object."""
        return {
            "agents": [[role, agent, tally.state()] for (role, agent), tally in self.agents.items()],
            "examples": {word: dict(example) for word, example in self.examples.items()},
            "since": self.since,
        }

    def restore(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Continue counting from ``state``, or from ``step`` if the checkpoint of an older ASTuner has no state."""
        fresh = Certificate()
        if state is None:
            fresh.since = step
        else:
            fresh.agents = {(role, agent): Tally.of(tally) for role, agent, tally in state["agents"]}
            fresh.examples = {word: dict(example) for word, example in state["examples"].items()}
            fresh.since = state["since"]
        vars(self).update(vars(fresh))


class CertificateFile(Subscriber):
    """Write ``certificate.json`` of the run folder once there are counts."""

    essential = True

    def __init__(self, context: RunContext) -> None:
        self._run_dir = RunDir(context.run_dir)
        self._certificate = Certificate()

    def handle(self, event: Event) -> None:
        """Update the counts, and write the file after each step.

        :raises OSError: The file cannot be written.
        """
        if isinstance(event, RolledOut):
            self._certificate.rollout(event.step, event.episodes, event.samples)
        elif isinstance(event, SamplesCredited):
            self._certificate.credited(event.step, event.samples)
        elif isinstance(event, Measured):
            self._write()
        elif isinstance(event, RunResumed):
            self._certificate.restore(event.state.get("certificate"), event.step)  # None in states of older ASTuners
            self._write()

    def state(self) -> Mapping[str, Any]:
        return {"certificate": self._certificate.state()}

    def summary(self) -> Summary | None:
        return Summary(lines=summary_of(self._certificate.as_dict())) if self._certificate.agents else None

    def _write(self) -> None:
        if self._certificate.agents:
            self._run_dir.write_json(self._run_dir.certificate, self._certificate.as_dict())


def summary_of(certificate: Mapping[str, Any]) -> dict[str, str]:
    """Return two lines for the console summary.

    :param certificate: Return value of `Certificate.as_dict`.
    """
    return {"Exact continuation": _turns(certificate), "Trained tokens": _tokens(certificate["tokens"])}


def _turns(c: Mapping[str, Any]) -> str:
    if c["continued_exactly_share"] is None:
        text = f"no earlier turn to continue in {c['turns']:,} turns"
    else:
        exact, going_on = c["continued_exactly"], c["turns_going_on"]
        text = f"{exact:,} of {going_on:,} turns ({_percent(c['continued_exactly_share'])})"
    return text + _list({**c["branches"], **c["approximations"]})


def _tokens(c: Mapping[str, Any]) -> str:
    text = f"{c['trained']:,} of {c['generated']:,} generated ({_percent(c['trained_share'] or 0.0)})"
    return text + _list(
        {**c["left_out"], "of untrained agents": c["of_untrained_agents"], "prompt tokens wasted": c["wasted_prompt"]}
    )


def _percent(share: float) -> str:
    """Format a share. Only a share of exactly 1 is printed as 100 %."""
    return "100 %" if share == 1 else f"{min(100 * share, 99.9):.1f} %"


def _list(counts: Mapping[str, int]) -> str:
    found = [f"{n:,} {name}" for name, n in sorted(counts.items(), key=lambda item: -item[1]) if n]
    return f"; {', '.join(found)}" if found else ""
