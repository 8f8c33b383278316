"""Differences in how two sides are measured, which make their results incomparable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from astuner.contracts.types import Split

_KEYS: Mapping[str, tuple[str, ...]] = {
    "judge": ("task_judge", "helper_models", "rollout.truncated_reward", "rollout.agent_madness_reward"),
    "prompts": ("rollout.workflow", "agents", "env_service.params"),
    "limits": (
        "rollout.max_response_length_in_one_turn", "rollout.max_model_len", "rollout.multi_turn.max_steps",
        "rollout.compute_madness_checklist", "data.max_prompt_length", "data.max_response_length",
    ),
}  # fmt: skip
_SAMPLING = ("temperature", "top_p", "top_k")
_FREE = (
    "judge_timeout",
    "judge_concurrency",
    "api_key_env",
    "max_concurrency",
    "timeout",
    "max_retries",
    "train",
    "policy",
)
"""Settings of timing, concurrency and training, which do not affect the measurement."""
_REWARD = ("success", "reward")


def yardsticks(
    of_a: Sequence[Mapping[str, Any]],
    of_b: Sequence[Mapping[str, Any]],
    differing: Sequence[Mapping[str, Any]],
    split: Split,
    changed: Sequence[str],
    tasks: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Return the differences in how the sides are measured: ``about``, ``key`` and its values ``a`` and ``b``.

    :param of_a: settings of its runs, by their dotted keys.
    :param differing: the settings that differ.
    :param changed: IDs of tasks with the same text but another reference answer or metadata.
    :param tasks: of `astuner_report.compare.pair`.
    """
    sampling = "rollout.val_kwargs" if split is Split.VALIDATION else "rollout"
    keys = {**_KEYS, "sampling": tuple(f"{sampling}.{name}" for name in _SAMPLING)}
    own = {run.get("astuner.rollout.workflow") for run in (*of_a, *of_b)} - {None}
    keys["prompts"] += tuple(f"rollout.{name}" for name in own)  # the section of a workflow has its name
    if not any(run.get("astuner.task_judge.judge") for run in (*of_a, *of_b)):
        keys["judge"] += ("rollout.workflow",)  # the workflow sets the reward itself
    judges = " ".join(str(v) for run in (*of_a, *of_b) for k, v in run.items() if k.startswith("astuner.task_judge."))
    found = []
    for setting in differing:
        key = setting["key"].removeprefix("astuner.")
        everywhere = all(setting["key"] in run for run in (*of_a, *of_b))  # else an older run had no such key
        about = next((name for name, of in keys.items() if f"{key}.".startswith(tuple(f"{k}." for k in of))), "")
        if key.startswith("helper_models.") and key.split(".")[1] not in judges:
            continue  # this model is not used by a judge
        if about and everywhere and key.rpartition(".")[2] not in _FREE:
            found.append({"about": about, **setting})
    if changed:
        key = f"metadata of {len(changed)} tasks, reference answers included, e.g. {changed[0]}"
        found.append({"about": "judge", "key": key, "a": ("one version",), "b": ("another version",)})
    if tasks["only_a"] or tasks["only_b"]:
        a, b = ((f"{len(tasks[side])} not on the other side",) for side in ("only_a", "only_b"))
        found.append({"about": "tasks", "key": "tasks", "a": a, "b": b})
    return found


def doubted(measures: dict[str, dict[str, Any]], found: Sequence[Mapping[str, Any]]) -> None:
    """Remove the p-values of measures that different judges scored, and mark measures with other differences.

    ``comparable`` is whether a measure means the same on both sides.
    """
    about = dict.fromkeys(f["about"] for f in found if f["about"] != "tasks")
    for name, measure in measures.items():
        apart = [a for a in about if a != "judge" or name in _REWARD]
        measure["comparable"] = not apart
        if "judge" in apart:
            measure |= {"p_value": None, "test": "not tested: the judges differ"}
