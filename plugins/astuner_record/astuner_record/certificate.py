"""The certificate of a run: how exactly its conversations went on, and what became of every token.

A turn that goes on from the model's own words begins with their recorded tokens; the certificate counts those that do
and those that do not, with the reason, and follows the generated tokens to the samples.

Invariant: for every agent, ``generated = trained + untrained + left_out``; so a token that is trained nowhere has a
reason here.  Only training episodes are counted, as they were when they ended: what an attempt said that was started
over is not in it.
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
    "unreceived_replies": "the reply reached nobody, such as a client that went away",
    "unscored_episodes": "the episode failed and has no reward (failures.jsonl says why)",
    "agents_without_reward": "another agent's reward ended the episode, and this one has none",
    "unused_groups": "the group was not trained on: too few of its episodes were scored, its rewards were all equal "
    "(dynamic sampling), the batch was full, or it was cut short (oversampling; what its cancelled episodes said is "
    "not counted anywhere)",
    "max_sample_per_task": "the episode forked into more samples than rollout.multi_turn.max_sample_per_task",
}
"""Why a token of an agent that trains is in no sample; the first that applies."""

MOST_AGENTS = 64
"""Agents that are told apart; later ones count as `OTHERS`."""
OTHERS = "(others)"


@dataclass
class Tally:
    """The turns and tokens of one agent, or of all."""

    counts: Counter[str] = field(default_factory=Counter)
    """``turns``, ``going_on`` (those with a predecessor), ``exact`` (of these), and tokens: ``prompt``,
    ``wasted_prompt``, ``generated``, ``trained``, ``untrained``, ``zero_advantage`` (of the trained)."""
    branches: Counter[str] = field(default_factory=Counter)
    """Branch reason -> turns."""
    approximations: Counter[str] = field(default_factory=Counter)
    """What was overlooked to continue a turn -> turns."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason, of `LEFT_OUT` -> tokens."""

    def turn(self, turn: Turn) -> None:
        """Count one more."""
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
        """For `certificate.json`."""
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
    """Counts over the training episodes of a run; its `state` lets a resumed run count on."""

    def __init__(self) -> None:
        self.agents: dict[tuple[str, str], Tally] = {}
        """(role, agent) -> what it said, in order of appearance."""
        self.examples: dict[str, dict[str, Any]] = {}
        """Branch reason or approximation -> where it was met first."""
        self.since = 0
        """The step after which counting began; 0 unless the run was resumed from a state without a certificate."""
        self._credited: tuple[int, Counter[tuple[str, str]]] = 0, Counter()
        """The step whose samples were looked at last, and its tokens with advantage 0."""

    @property
    def whole(self) -> Tally:
        """All agents together."""
        whole = Tally()
        for tally in self.agents.values():
            for name, counter in vars(tally).items():
                getattr(whole, name).update(counter)
        return whole

    def rollout(self, step: int, episodes: Iterable[Episode], samples: Mapping[str, Sequence[Sample]]) -> None:
        """Count the episodes of one step; the parameters are those of `RolledOut`."""
        for episode in episodes:
            self._episode(step, episode, samples.get(episode.workflow_task.episode_id))

    def credited(self, step: int, samples: Sequence[Sample]) -> None:
        """Count the tokens that carry no gradient of the policy loss; of one step's last call."""
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
        """What ``certificate.json`` holds; every word in it is explained there."""
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
        """JSON-serialisable."""
        return {
            "agents": [[role, agent, tally.state()] for (role, agent), tally in self.agents.items()],
            "examples": {word: dict(example) for word, example in self.examples.items()},
            "since": self.since,
        }

    def restore(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Count on from ``state``; from ``step`` on if there is none (of an older ASTuner)."""
        fresh = Certificate()
        if state is None:
            fresh.since = step
        else:
            fresh.agents = {(role, agent): Tally.of(tally) for role, agent, tally in state["agents"]}
            fresh.examples = {word: dict(example) for word, example in state["examples"].items()}
            fresh.since = state["since"]
        vars(self).update(vars(fresh))


class CertificateFile(Subscriber):
    """Writes ``certificate.json`` of the run folder, once there is anything to say in it."""

    essential = True

    def __init__(self, context: RunContext) -> None:
        self._run_dir = RunDir(context.run_dir)
        self._certificate = Certificate()

    def handle(self, event: Event) -> None:
        """
        :raises OSError: it cannot be written.
        """
        if isinstance(event, RolledOut):
            self._certificate.rollout(event.step, event.episodes, event.samples)
        elif isinstance(event, SamplesCredited):
            self._certificate.credited(event.step, event.samples)
        elif isinstance(event, Measured):
            self._write()
        elif isinstance(event, RunResumed):
            self._certificate.restore(event.state.get("certificate"), event.step)  # an older ASTuner's state has none
            self._write()

    def state(self) -> Mapping[str, Any]:
        return {"certificate": self._certificate.state()}

    def summary(self) -> Summary | None:
        return Summary(lines=summary_of(self._certificate.as_dict())) if self._certificate.agents else None

    def _write(self) -> None:
        if self._certificate.agents:
            self._run_dir.write_json(self._run_dir.certificate, self._certificate.as_dict())


def summary_of(certificate: Mapping[str, Any]) -> dict[str, str]:
    """Two lines for a person.

    :param certificate: `Certificate.as_dict`.
    """
    return {"turns continued": _turns(certificate), "tokens in loss masks": _tokens(certificate["tokens"])}


def _turns(c: Mapping[str, Any]) -> str:
    if c["continued_exactly_share"] is None:
        text = f"none of {c['turns']:,} had anything to go on from"
    else:
        exact, going_on = c["continued_exactly"], c["turns_going_on"]
        text = f"{_percent(c['continued_exactly_share'])} exactly ({exact:,} of {going_on:,})"
    return text + _list({**c["branches"], **c["approximations"]})


def _tokens(c: Mapping[str, Any]) -> str:
    text = f"{_percent(c['trained_share'] or 0.0)} ({c['trained']:,} of {c['generated']:,} generated)"
    return text + _list(
        {**c["left_out"], "of untrained agents": c["of_untrained_agents"], "prompt tokens wasted": c["wasted_prompt"]}
    )


def _percent(share: float) -> str:
    """Never 100 % for something less."""
    return "100 %" if share == 1 else f"{min(100 * share, 99.9):.1f} %"


def _list(counts: Mapping[str, int]) -> str:
    found = [f"{n:,} {name}" for name, n in sorted(counts.items(), key=lambda item: -item[1]) if n]
    return f"; {', '.join(found)}" if found else ""
