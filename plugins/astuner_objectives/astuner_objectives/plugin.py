"""What astuner-objectives offers; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping

from astuner import Provider, hookimpl
from astuner.contracts.hookspecs import LossProvider


def _loss(function: str, summary: str, implies: Mapping[str, object] | None = None) -> LossProvider:
    return LossProvider(target=f"astuner_objectives.losses:{function}", summary=summary, implies=implies or {})


@hookimpl
def register_losses() -> dict[str, Provider]:
    return {
        "grpo": _loss("ppo_clip", "PPO's clipped ratio (Shao et al. 2024)"),
        # Neither the group's std nor the length normalises.
        "dr_grpo": _loss(
            "ppo_clip",
            "GRPO without its two biases (Liu et al. 2025, Understanding R1-Zero-Like Training)",
            {"adv_estimator": "dr_grpo", "norm_adv_by_std": False, "loss_agg_mode": "seq-mean-token-sum-norm"},
        ),
        "dapo": _loss(
            "ppo_clip",
            "clip-higher, all tokens equal, dynamic sampling (Yu et al. 2025)",
            {"clip_ratio_high": 0.28, "loss_agg_mode": "token-mean", "dynamic_sampling": True},
        ),
        # A ratio per sequence moves far less than one per token.
        "gspo": _loss(
            "gspo",
            "one ratio per sequence (Zheng et al. 2025, Group Sequence Policy Optimization)",
            {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4, "loss_agg_mode": "seq-mean-token-mean"},
        ),
        # No lower bound; Khatri et al. 2025 (ScaleRL) find an upper weight of 5 robust.
        "cispo": _loss(
            "cispo",
            "clips the weight, not the update (MiniMax 2025, MiniMax-M1)",
            {"clip_ratio_low": 1.0, "clip_ratio_high": 4.0, "loss_agg_mode": "token-mean"},
        ),
        # The whole sequence is one action, its log-probability a sum.
        "rloo": _loss(
            "reinforce",
            "REINFORCE with the others as baseline (Ahmadian et al. 2024, Back to Basics)",
            {"adv_estimator": "rloo", "norm_adv_by_std": False, "loss_agg_mode": "seq-mean-token-sum"},
        ),
        "reinforce_plus_plus": _loss(
            "ppo_clip",
            "advantages normalised over the step (Hu et al. 2025, REINFORCE++)",
            {"adv_estimator": "reinforce_plus_plus", "loss_agg_mode": "token-mean"},
        ),
    }


@hookimpl
def register_advantages() -> dict[str, Provider]:
    summaries = {
        "grpo": "the reward, centred and scaled within its group",
        "dr_grpo": "the reward, centred within its group",
        "rloo": "the reward less the mean of the others of its group",
        "reinforce_plus_plus": "the reward, centred and scaled over the step",
        "none": "the reward as it is",
    }
    return {
        name: Provider(target=f"astuner_objectives.advantages:{name}", summary=text) for name, text in summaries.items()
    }
