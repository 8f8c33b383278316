"""VERL's keys that a person may not write below ``verl:``, and what to write instead.

ASTuner acts on them itself, by a key of its own or always in the same way; or nothing reads them, because VERL's data,
rewards, agent loops and losses are not what runs here.
"""

from __future__ import annotations

from collections.abc import Mapping

from astuner_ray.native import table
from astuner_verl.table import ACTOR, MODEL, OWN_LOSS, ROLLOUT, ROWS

LOCKED: Mapping[str, str] = {
    "model_engine": "ASTuner's table is for FSDP",
    "data": "write astuner.task_reader and astuner.data instead",
    "critic": "there is no critic: advantages compare the episodes of a group",
    "custom_reward_function": "write astuner.task_judge instead",
    "reward_model": "write astuner.task_judge instead",
    "reward": "write astuner.task_judge instead",
    "sandbox_fusion": "write astuner.task_judge instead",
    "distillation": OWN_LOSS,
    "skip": "episodes are ASTuner's, and it would not notice",
    "ray_kwargs": "ASTuner connects to Ray: --with ray, or RAY_ADDRESS",
    "algorithm": "write astuner.trainer_common.algorithm instead",
    f"{ACTOR}.clip_ratio": "write astuner.trainer_common.algorithm.clip_ratio_low and clip_ratio_high instead",
    f"{ACTOR}.clip_ratio_c": OWN_LOSS,
    f"{ACTOR}.policy_loss": "write astuner.trainer_common.algorithm.loss instead",
    f"{ACTOR}.loss_scale_factor": OWN_LOSS,
    f"{ACTOR}.tau_pos": OWN_LOSS,
    f"{ACTOR}.tau_neg": OWN_LOSS,
    f"{ACTOR}.use_prefix_grouper": OWN_LOSS,
    f"{ACTOR}.ppo_micro_batch_size": "write astuner.trainer_common.micro_batch_tokens instead",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": "write astuner.trainer_common.micro_batch_tokens instead",
    f"{ACTOR}.shuffle": "samples are put in order by ASTuner",
    f"{ACTOR}.optim.lr_warmup_steps_ratio": "write astuner.trainer_common.optim.lr_warmup_steps instead",
    f"{ACTOR}.optim.betas": "write astuner.trainer_common.optim.betas instead",
    f"{ACTOR}.optim.min_lr_ratio": "write astuner.trainer_common.optim.min_lr_ratio instead",
    f"{ACTOR}.optim.num_cycles": "write astuner.trainer_common.optim.lr_scheduler instead",
    f"{ACTOR}.optim.zero_indexed_step": "write astuner.trainer_common.optim.lr_warmup_steps instead",
    f"{ACTOR}.optim.total_training_steps": "verl sets it from trainer.total_training_steps",
    f"{MODEL}.tokenizer_path": "the tokenizer is the model's: write astuner.model.path",
    f"{ROLLOUT}.agent.agent_loop_config_path": "episodes are ASTuner's; write astuner.rollout.workflow instead",
    f"{ROLLOUT}.agent.custom_async_server": "episodes are ASTuner's, and it speaks with verl's own servers",
    f"{ROLLOUT}.agent.default_agent_loop": "episodes are ASTuner's; write astuner.rollout.workflow instead",
    f"{ROLLOUT}.do_sample": "write astuner.rollout.temperature instead",
    f"{ROLLOUT}.ignore_eos": "ASTuner decides where a generation ends",
    f"{ROLLOUT}.logprobs_mode": "tokens are recorded with the log-probabilities of the distribution they came from",
    f"{ROLLOUT}.multi_turn": "the workflow has the turns; write astuner.rollout.multi_turn for their limits",
    f"{ROLLOUT}.over_sample_rate": "write astuner.rollout.oversample instead",
    f"{ROLLOUT}.prompt_length": "write astuner.data.max_prompt_length instead",
    f"{ROLLOUT}.response_length": "write astuner.data.max_response_length instead",
    f"{ROLLOUT}.val_kwargs": "write astuner.rollout.val_kwargs instead",
    "trainer.critic_warmup": "there is no critic",
    "trainer.default_hdfs_dir": "checkpoints are in the run folder; astuner.experiment_dir moves it",
    "trainer.log_val_generations": "conversations are in the run folder's episodes/",
    "trainer.max_actor_ckpt_to_keep": "write astuner.trainer_common.max_checkpoints instead",
    "trainer.resume_from_path": "astuner run --resume continues a run",
    "trainer.rollout_data_dir": "conversations are in the run folder's episodes/",
    "trainer.v1.sampler": "groups are ASTuner's; write astuner.rollout.oversample, min_group_size and max_failed_share",
    "trainer.val_only": "use astuner eval",
    "trainer.validation_data_dir": "conversations are in the run folder's episodes/",
}
"""VERL's keys and sections that a person may not write below ``verl:``, besides the locked rows; and what instead."""


def why_locked(native: str) -> str:
    """Why a person may not write VERL's key ``native`` (without ``+``); empty if it is free."""
    return table.why_locked(native, ROWS, LOCKED)
