"""Keys that follow from other keys.

Only keys that nobody wrote are set here, and each remembers what it follows from; what a person wrote always wins.
"""

from __future__ import annotations

from typing import Any

from astuner.config.places import Key, Place, Report, Tree

ALGORITHM: Key = ("astuner", "trainer_common", "algorithm")

BY_LOSS: dict[str, dict[str, Any]] = {
    "grpo": {},
    # Liu et al. 2025, "Understanding R1-Zero-Like Training": neither the group's std nor the length normalises.
    "dr_grpo": {"adv_estimator": "dr_grpo", "norm_adv_by_std": False, "loss_agg_mode": "seq-mean-token-sum-norm"},
    # Yu et al. 2025, "DAPO": clip-higher, token-level loss, dynamic sampling.
    "dapo": {"clip_ratio_high": 0.28, "loss_agg_mode": "token-mean", "dynamic_sampling": True},
    # Zheng et al. 2025, "Group Sequence Policy Optimization": a ratio per sequence moves far less than one per token.
    "gspo": {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4, "loss_agg_mode": "seq-mean-token-mean"},
    # MiniMax 2025, "MiniMax-M1": no lower bound; Khatri et al. 2025 (ScaleRL) find an upper weight of 5 robust.
    "cispo": {"clip_ratio_low": 1.0, "clip_ratio_high": 4.0, "loss_agg_mode": "token-mean"},
    # Ahmadian et al. 2024, "Back to Basics": the whole sequence is one action, its log-probability a sum.
    "rloo": {"adv_estimator": "rloo", "norm_adv_by_std": False, "loss_agg_mode": "seq-mean-token-sum"},
    # Hu et al. 2025, "REINFORCE++": advantages normalised over the batch, token-level loss.
    "reinforce_plus_plus": {"adv_estimator": "reinforce_plus_plus", "loss_agg_mode": "token-mean"},
}
"""Loss name -> the keys of ``trainer_common.algorithm`` that it implies."""

GROUP: Key = ("astuner", "rollout", "num_repeat")
LEAST: Key = ("astuner", "rollout", "min_group_size")

SAME: tuple[tuple[Key, Key], ...] = (
    (("astuner", "trainer_common", "val_pass_n"), ("astuner", "rollout", "val_kwargs", "num_repeat")),
)
"""Two keys with one meaning."""


def imply(tree: Tree, report: Report) -> dict[Key, Place]:
    """Set the keys of ``tree`` that follow from those written; their origins."""
    origins: dict[Key, Place] = {}
    loss = tree.get((*ALGORITHM, "loss"))
    if isinstance(loss, str):
        for name, value in BY_LOSS.get(loss, {}).items():
            _set(tree, (*ALGORITHM, name), value, f"implied by algorithm.loss: {loss}", origins)
    if tree.get(GROUP) in (1, "1"):
        _set(tree, LEAST, 1, "implied by rollout.num_repeat: 1", origins)
    for first, second in SAME:
        if tree.is_written(first) and tree.is_written(second):
            if tree.get(first) != tree.get(second):
                a, b = ".".join(first), ".".join(second)
                report.problem(tree.place(second), f"{b} means the same as {a} ({tree.place(first)}); make them equal")
            continue
        for written, other in ((first, second), (second, first)):
            if tree.is_written(written):
                _set(tree, other, tree.get(written), f"same as {'.'.join(written[1:])}", origins)
    return origins


def _set(tree: Tree, key: Key, value: Any, why: str, origins: dict[Key, Place]) -> None:
    parent = tree.get(key[:-1], {})
    if not tree.is_written(key) and (parent is None or isinstance(parent, dict)):
        tree.put(key, value)
        origins[key] = Place(why)
