"""Every number that a run logs: its name, what it means, and which backbones log it when.

``docs/metrics.md`` is made of this table, and `astuner.testing.check_metrics` holds backbones to it.  Invariant: a name
means the same on every backbone that logs it.  What an engine counts that has no name here is logged below the
backbone's own, as ``verl/…``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

When = Literal["step", "update", "validation", "sometimes"]
Table = Literal["episodes", "samples", "update", "speed", "validation"]
Better = Literal["higher", "lower", ""]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One name, or a pattern of names."""

    name: str
    """A word in ``<…>`` stands for a name that somebody chose."""
    meaning: str
    """Markdown."""
    table: Table
    """Where it stands in the documentation."""
    unit: str = ""
    """Empty: a plain number. "share" is between 0 and 1, a nat is a unit of log-probability."""
    better: Better = ""
    """Empty: neither, or it depends."""
    when: When = "step"
    """``step``: in every training step; ``update``: in every one whose update took an optimizer step;
    ``validation``: in every validation; ``sometimes``: where the meaning says so."""
    on: tuple[str, ...] = ()
    """The backbones that log it; none: all that train."""

    def matches(self, name: str) -> bool:
        """Whether a logged name is this one."""
        return _pattern(self.name).fullmatch(name) is not None


def find(name: str) -> Metric | None:
    """What a logged name is; a policy's number is what it is without the policy."""
    return _find(policy[2] if (policy := _POLICY.fullmatch(name)) else name)


def required(when: When, backbone: str) -> Iterator[str]:
    """The names that a backbone logs at such a time."""
    return (m.name for m in METRICS if m.when == when and (not m.on or backbone in m.on) and "<" not in m.name)


def derived(metrics: Mapping[str, float]) -> dict[str, float]:
    """The numbers that follow from others; `Experiment.log` adds them, so that they are the same everywhere."""
    found = {}
    for name, value in metrics.items():
        whose, bare = (policy[1], policy[2]) if (policy := _POLICY.fullmatch(name)) else ("", name)
        if bare == "staleness/mean":
            found[f"{whose}policy_staleness"] = value
        if bare == "clip_frac/low" and (high := metrics.get(f"{whose}clip_frac/high")) is not None:
            found[f"{whose}clip_frac"] = value + high
    return found


@lru_cache(maxsize=4096)
def _find(name: str) -> Metric | None:
    return next((m for m in METRICS if m.matches(name)), None)


@lru_cache(maxsize=1024)
def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"(<\w+>)", name)
    return re.compile("".join(_PLACEHOLDER.get(p, r"[^/]+") if p[:1] == "<" else re.escape(p) for p in parts))


_POLICY = re.compile(r"(policy/[^/]+/)(.+)")
_PLACEHOLDER = {"<name>": ".+", "<metric>": ".+", "<k>": r"\d+"}


class _Row:
    """Makes the metrics of one table."""

    def __init__(self, table: Table, when: When = "step") -> None:
        self._table, self._when = table, when

    def __call__(
        self, name: str, unit: str, better: Better, meaning: str, *, when: When | None = None, on: tuple[str, ...] = ()
    ) -> Metric:
        return Metric(
            name=name, unit=unit, better=better, meaning=meaning, table=self._table, when=when or self._when, on=on
        )


_episodes, _samples, _speed = _Row("episodes"), _Row("samples"), _Row("speed")
_update, _validation = _Row("update", "update"), _Row("validation", "validation")

METRICS: tuple[Metric, ...] = (
    _episodes("rollout/episodes", "episodes", "", "episodes that were run, scored or not"),
    _episodes("rollout/errored_frac", "share", "lower", "share of them without a reward"),
    _episodes("rollout/seconds_max", "s", "lower", "the longest episode"),
    _episodes(
        "reward/mean", "", "higher",
        "mean reward; of an episode whose agents have rewards of their own, their mean",
    ),
    _episodes(
        "reward/<role>/mean", "", "higher",
        "mean reward of the agents of a role that train, where agents have rewards of their own; an episode counts "
        "once, however large its team",
        when="sometimes",
    ),
    _episodes("reward/std", "", "", "standard deviation of the rewards (over the episodes, not of the mean)"),
    _episodes("reward/max", "", "higher", "largest reward"),
    _episodes("reward/min", "", "higher", "smallest reward"),
    _episodes(
        "success/mean", "share", "higher",
        "share of successes; without a verdict on success, a reward of 1 or more is one",
    ),
    _episodes("num_turns/mean", "calls", "", "model calls per episode"),
    _episodes("response_length/mean", "tokens", "", "generated tokens per episode"),
    _episodes("response_length/clip_ratio", "share", "lower", "share of model calls that ended at a length limit"),
    _episodes(
        "limits/<name>", "share", "lower",
        "share of the model calls that the limit `astuner.<name>` cut off, or of the episodes that it ended if that is "
        "more; `other` is the model's context or the agent's own `max_tokens`",
        when="sometimes",
    ),
    _episodes("tokens/generated", "tokens", "", "generated tokens of the step"),
    _episodes(
        "duplicates/share", "share", "lower",
        "of all pairs of attempts at the same task, the share that said the same, token by token",
        when="sometimes",
    ),
    _episodes(
        "duplicates/expected", "share", "",
        "what that share would be of independent draws: the mean probability of an attempt, by its own "
        "log-probabilities",
        when="sometimes",
    ),
    _episodes(
        "adv/zero_group_frac", "share", "lower",
        "share of groups in which nobody's rewards differ from those they are compared with (`adv_compare`); their "
        "advantages are 0, unless the estimator is `reinforce_plus_plus` or `none`",
    ),
    _episodes(
        "workflow/<name>", "", "",
        "mean of what the workflow put into `WorkflowOutput.metrics`; one that is no finite number fails its "
        "episode",
        when="sometimes",
    ),
    _episodes(
        "judge/<name>", "", "",
        "mean of what the judge put into `JudgeOutput.metrics`, finite numbers too; `math_answer` has `boxed` and "
        "`timeout`",
        when="sometimes",
    ),
    _samples(
        "merge/exact_frac", "share", "higher",
        "of all turns that come after their agent's first, the share that continues an earlier one because it says "
        "the same",
    ),
    _samples(
        "merge/approximated_frac", "share", "lower",
        "of all turns, the share that continues one which says almost the same; 0 unless `rollout.merge_level` is "
        "`text`",
    ),
    _samples(
        "merge/branches/<reason>", "turns", "lower",
        "turns that started a branch, by [reason](tokens.md#reasons); missing where there are none",
        when="sometimes",
    ),
    _samples("merge/samples_per_rollout", "", "lower", "training sequences per episode; 1 when nothing branches"),
    _samples(
        "merge/untrained_rollout_frac", "share", "lower",
        "share of the scored episodes without a token that is trained",
    ),
    _samples("adv/zero_frac", "share", "lower", "share of samples whose advantage is 0"),
    _samples("adv/reward_min", "", "higher", "the smallest reward that a sample is credited with", when="sometimes"),
    _samples("adv/reward_max", "", "higher", "the largest", when="sometimes"),
    _samples(
        "tokens/wasted_prompt", "tokens", "lower",
        "prompt tokens that were encoded again because a turn that goes on from another could not continue it",
    ),
    _samples("tokens/trainable", "tokens", "", "generated tokens in the samples of the step, before any are left out"),
    _samples(
        "tokens/trained", "tokens", "",
        "generated tokens in the update, counted once per pass (`ppo_epochs`); tokens with advantage 0 are left "
        "out (`algorithm.filter_zero_advantage`)",
    ),
    _samples(
        "tokens/raw", "tokens", "",
        "tokens of the sequences in the update, prompts included, once per pass",
        when="update",
    ),
    _samples(
        "tokens/computed", "tokens", "lower",
        "tokens of the forward passes, after shared prefixes are computed once and nothing after the last trained "
        "token is",
        when="update", on=("local",),
    ),
    _samples(
        "policy_version", "updates", "",
        "updates before the newest policy that generated a sample of the step",
        when="sometimes",
    ),
    _samples(
        "staleness/mean", "updates", "lower",
        "updates between the policy that generated a sample and the one that is updated; 0 is on-policy",
    ),
    _samples("staleness/max", "updates", "lower", "the oldest sample's"),
    _samples("policy_staleness", "updates", "lower", "the same as `staleness/mean`"),
    _samples(
        "queue/batches", "batches", "",
        "batches that were ready and waited when the step was trained; [what it "
        "says](backbones/trinity.md#staleness)",
        on=("trinity",),
    ),
    _update("loss", "", "", "mean over the optimizer steps of the whole loss: policy, KL and entropy terms"),
    _update("pg_loss", "", "", "the policy term alone"),
    _update("grad_norm", "", "", "norm of the gradient before clipping, mean over the optimizer steps"),
    _update("lr", "", "", "learning rate, mean over the optimizer steps"),
    _update("entropy", "nats", "", "mean entropy of the distribution that was sampled from, at the trained tokens"),
    _update(
        "kl", "nats", "lower",
        "how far the policy is from the one that generated: mean over the trained tokens of r - 1 - log r, where r "
        "is the probability under the weights of the optimizer step over that which the rollout recorded. It "
        "estimates KL(generating policy ‖ trained policy), unbiased and never negative (estimator k3 of Schulman "
        "2020, *Approximating KL divergence*). With one optimizer step on fresh samples it is the rounding between "
        "rollout and trainer; with several, how far the update has moved",
    ),
    _update(
        "kl/ref", "nats", "lower",
        "KL to the starting weights, by the estimator `kl_loss_type`; with `use_kl_loss`",
        when="sometimes",
    ),
    _update(
        "kl/in_reward", "nats", "lower",
        "mean KL penalty, with `algorithm.use_kl_in_reward`",
        when="sometimes", on=("verl",),
    ),
    _update(
        "kl/mismatch_mean", "nats", "lower",
        "mean absolute difference of log-probabilities between rollout and trainer, same weights; without a "
        "rollout correction, `verl` and `trinity` take it at every optimizer step, so with several it includes "
        "what these changed",
    ),
    _update("kl/mismatch_max", "nats", "lower", "the largest"),
    _update(
        "ratio/mean", "", "",
        "importance ratio, current policy over the one that generated; of `gspo` the sequence's",
    ),
    _update("ratio/max", "", "lower", "the largest"),
    _update("clip_frac", "share", "lower", "share of tokens whose ratio was clipped: the sum of the two below"),
    _update("clip_frac/low", "share", "lower", "share of tokens whose ratio was clipped from below"),
    _update("clip_frac/high", "share", "lower", "share of tokens whose ratio was clipped from above"),
    _update("rollout_is/weight", "", "", "mean correction weight; with `algorithm.rollout_is`", when="sometimes"),
    _update("optimizer_steps", "", "", "optimizer steps that were taken", when="step", on=("local",)),
    _update(
        "skipped_steps", "", "lower",
        "optimizer steps that were not, because loss or gradient was not finite",
        when="step", on=("local",),
    ),
    _update(
        "nothing_learnable", "", "lower",
        "1 when no sample carried a gradient: the weights did not change, and most names of this table are missing",
        when="step",
    ),
    _update(
        "policy/<name>/<metric>", "", "",
        "where a run has several policies, all that the trainer or engine of one says: the names of this table, "
        "`adv/zero_frac`, `tokens/trained`, `tokens/raw`, `tokens/computed` and `engine/…` are there once for each",
        when="sometimes",
    ),
    _speed(
        "time/step", "s", "lower",
        "the step: rollout and update, without validation and saving. On `trinity`, where steps overlap, from the "
        "end of one update to the end of the next",
    ),
    _speed(
        "time/rollout", "s", "lower",
        "of these, for episodes, judges included; beside the update where they overlap",
    ),
    _speed("time/train", "s", "lower", "of these, for the update, log-probabilities before it included"),
    _speed("time/update", "s", "lower", "of these, for the update alone", when="sometimes", on=("verl", "trinity")),
    _speed(
        "time/sync_weights", "s", "lower",
        "until the rollout engines had the new weights",
        when="sometimes", on=("verl", "trinity"),
    ),
    _speed(
        "time/save", "s", "lower",
        "for saving since the step before; not part of `time/step`, but on `trinity`, where rollouts go on beside it",
    ),
    _speed("throughput/tokens_per_s", "tokens/s", "higher", "generated tokens per second of `time/step`"),
    _speed(
        "energy/cpu_joules", "J", "lower",
        "energy of the machine's CPUs and memory since the line before, whoever used them, where Linux counts it "
        "(RAPL) and this process may read it",
        when="sometimes",
    ),
    _speed(
        "energy/gpu_joules", "J", "lower",
        "the same of its NVIDIA GPUs, where `nvidia-ml-py` is installed",
        when="sometimes",
    ),
    _speed(
        "perf/mfu", "share", "higher",
        "share of the GPU's peak that the update reached, as VERL computes it",
        when="sometimes", on=("verl", "trinity"),
    ),
    _speed(
        "perf/gpu_memory_gb", "GB", "lower",
        "the most GPU memory that the trainer held",
        when="sometimes", on=("verl", "trinity"),
    ),
    _speed(
        "helper/<helper>/calls", "calls", "lower",
        "requests to a helper model for the run since the line before, of all processes of this machine; those that "
        "failed count too",
        when="sometimes",
    ),
    _speed(
        "helper/<helper>/cached", "answers", "", "answers that were taken from the cache instead", when="sometimes"
    ),
    _speed("helper/<helper>/tokens", "tokens", "lower", "tokens that those requests took", when="sometimes"),
    _speed("helper/<helper>/cost", "", "lower", "what they cost, in the money of its `price`", when="sometimes"),
    _speed("engine/requests", "calls", "", "model calls", on=("local",)),
    _speed("engine/mean_batch", "sequences", "higher", "sequences decoded together, on average", on=("local",)),
    _speed(
        "engine/reused_share", "share", "higher",
        "share of the prompt tokens that were in the KV cache already",
        on=("local",),
    ),
    _validation(
        "val/success", "share", "higher",
        "success on the validation tasks: the mean over tasks of each task's share of successes",
    ),
    _validation(
        "val/success_ci_low", "share", "higher",
        "lower end of its 95 % interval (Wilson's with one episode per task, else normal over task means)",
    ),
    _validation("val/success_ci_high", "share", "higher", "upper end"),
    _validation(
        "val/success/mean@<k>", "share", "higher",
        "the same as `val/success`; k is `rollout.val_kwargs.num_repeat`",
    ),
    _validation("val/success/pass@<k>", "share", "higher", "share of tasks with at least one success among k episodes"),
    _validation("val/reward/mean", "", "higher", "mean reward"),
    _validation("val/tasks", "tasks", "", "tasks with at least one scored episode"),
    _validation("val/unscored_tasks", "tasks", "lower", "tasks without one, which count for nothing above"),
    _validation("val/failed_episodes", "episodes", "lower", "episodes without a reward, which count for nothing above"),
    _validation("time/validation", "s", "lower", "how long it took"),
)
"""Every name, in the documentation's order."""
