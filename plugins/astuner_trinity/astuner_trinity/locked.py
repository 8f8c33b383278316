"""Trinity's keys that a person may not write below ``trinity:``, and what to write instead.

ASTuner acts on them itself, by a key of its own or always in the same way; or nothing reads them, because Trinity's
tasks, workflows, advantages and losses are not what runs here; or Trinity says itself that they are not to be set.
"""

from __future__ import annotations

from collections.abc import Mapping

from astuner_ray.native import table
from astuner_trinity.always import ACTOR, PIPELINE, VERL
from astuner_trinity.facts import ENGINE
from astuner_trinity.table import OWN_LOSS, ROWS

_OPTIM = "write astuner.trainer_common.optim instead"
_TEMPLATE = "ASTuner applies the chat template: write astuner.model.chat_template or chat_template_kwargs instead"
_TEXT = "ASTuner speaks to the engines in token ids, and reads tool calls and reasoning itself"
_SERVING = "Trinity's serving mode is not what runs here; `astuner run --with feedback` learns from users"
_SAMPLING = "write astuner.rollout instead"
_UNEVEN = "rollouts and training would disagree about the distribution"
_INNER = "Trinity sets it itself"
_NO_LORA = (
    "the engines' servers of Trinity 0.6.0 speak with the base model's weights whatever adapters are trained; train "
    "all weights, or use --backbone verl"
)
_ONE_VERSION = "rollouts and training count the same steps; write trinity.synchronizer.sync_interval instead"
_FOLDER = "Trinity's files are in the run folder; astuner.experiment_dir moves it"
_SINKS = "ASTuner's log sinks write the trackers; write astuner.trainer_common.logger instead"
_ONLY_VERL = "the table is for VERL's trainer with FSDP 2"

LOCKED: Mapping[str, str] = {
    "algorithm": "write astuner.trainer_common.algorithm instead",
    "algorithm.enable_router_replay": "which experts worked is not recorded with the tokens",
    "algorithm.optimizer": _OPTIM,
    "buffer": "write astuner.task_reader and astuner.data instead",
    "checkpoint_job_dir": _FOLDER,
    "cluster": _INNER,
    "cluster.ray_address": "ASTuner connects to Ray: --with ray, or RAY_ADDRESS",
    f"{PIPELINE}.inputs": _INNER,
    f"{PIPELINE}.output": _INNER,
    "data_processor.task_pipeline": "write astuner.task_reader instead",
    "explorer.bench_on_latest_checkpoint": "`astuner eval` measures checkpoints",
    "explorer.concurrent_mode": "the episodes of a group run at once in one process, whatever it says",
    "explorer.db_url": _SERVING,
    "explorer.max_repeat_times_per_runner": "the episodes of a group run at once in one process",
    "explorer.min_running_model_num": _SERVING,
    "explorer.name": _INNER,
    "explorer.over_rollout": "write astuner.rollout.oversample instead",
    "explorer.proxy_port": _SERVING,
    "explorer.runner_num": "write astuner.rollout.max_env_worker instead",
    "explorer.service_status_check_interval": _SERVING,
    f"{ENGINE}.api_key": "the engines' servers ask for none",
    f"{ENGINE}.bundle_indices": _INNER,
    f"{ENGINE}.chat_template": _TEMPLATE,
    f"{ENGINE}.checkpoint_job_dir": _INNER,
    f"{ENGINE}.cuda_visible_devices": _INNER,
    f"{ENGINE}.enable_auto_tool_choice": _TEXT,
    f"{ENGINE}.enable_lora": _NO_LORA,
    f"{ENGINE}.enable_prompt_truncation": "a prompt that does not fit ends its episode, and is not cut",
    f"{ENGINE}.enable_return_routed_experts": "which experts worked is not recorded with the tokens",
    f"{ENGINE}.enable_runtime_lora_updating": _NO_LORA,
    f"{ENGINE}.enable_thinking": _TEMPLATE,
    f"{ENGINE}.engine_id": _INNER,
    f"{ENGINE}.external_model_config": "an engine outside of the run cannot be given new weights",
    f"{ENGINE}.gpu_per_engine": _INNER,
    f"{ENGINE}.ignore_eos": "ASTuner decides where a generation ends",
    f"{ENGINE}.logprobs": _SAMPLING,
    f"{ENGINE}.lora_kwargs": _NO_LORA,
    f"{ENGINE}.lora_modules": _NO_LORA,
    f"{ENGINE}.max_model_len": "write astuner.rollout.max_model_len instead",
    f"{ENGINE}.max_prompt_tokens": "write astuner.data.max_prompt_length instead",
    f"{ENGINE}.min_response_tokens": "ASTuner decides where a generation ends",
    f"{ENGINE}.model_path": "write astuner.model.path instead",
    f"{ENGINE}.name": _INNER,
    f"{ENGINE}.nnodes": _INNER,
    f"{ENGINE}.node_rank": _INNER,
    f"{ENGINE}.ray_actor_name": _INNER,
    f"{ENGINE}.ray_namespace": _INNER,
    f"{ENGINE}.reasoning_parser": _TEXT,
    f"{ENGINE}.repetition_penalty": _UNEVEN,
    f"{ENGINE}.rope_scaling": "write trinity.model.rope_scaling, which the trainer reads too",
    f"{ENGINE}.rope_theta": "write trinity.model.rope_theta, which the trainer reads too",
    f"{ENGINE}.sync_method": "write trinity.synchronizer.sync_method instead",
    f"{ENGINE}.temperature": _SAMPLING,
    f"{ENGINE}.tool_call_parser": _TEXT,
    f"{ENGINE}.top_k": _SAMPLING,
    f"{ENGINE}.top_p": _SAMPLING,
    f"{ENGINE}.trust_remote_code": "write trinity.model.trust_remote_code, which the trainer reads too",
    "log.save_dir": _FOLDER,
    "model.chat_template_path": "write astuner.model.chat_template instead",
    "model.critic_model_path": "there is no critic: advantages compare the episodes of a group",
    "model.enable_thinking": _TEMPLATE,
    "model.external_model": "an engine outside of the run cannot be given new weights",
    "model.fully_sharded_loras": _NO_LORA,
    "model.logprobs": "tokens are recorded with their log-probabilities",
    "model.lora_configs": _NO_LORA,
    "model.max_cpu_loras": _NO_LORA,
    "model.min_response_tokens": "ASTuner decides where a generation ends",
    "model.repetition_penalty": _UNEVEN,
    "model.tinker": _ONLY_VERL,
    "monitor.cache_dir": _FOLDER,
    "monitor.detailed_stats": _SINKS,
    "monitor.monitor_args": _SINKS,
    "service": "nothing here asks it",
    "stages": "a run has one stage; start another run from its checkpoint: astuner.model.path",
    "synchronizer.explorer_sync_interval": _ONE_VERSION,
    "synchronizer.explorer_world_size": _INNER,
    "synchronizer.group_name": _INNER,
    "synchronizer.ray_namespace": _INNER,
    "synchronizer.trainer_sync_interval": _ONE_VERSION,
    "synchronizer.wait_for_checkpoint": "Trinity 0.6.0 does not read it",
    "trainer.critic_warmup": "there is no critic: advantages compare the episodes of a group",
    "trainer.enable_preview": "conversations are in the run folder's episodes/",
    "trainer.fix_actor_microbatch_loss_scale": OWN_LOSS,
    "trainer.grad_offload": "it is for Megatron, and the table is for FSDP 2",
    "trainer.megatron": _ONLY_VERL,
    "trainer.name": _INNER,
    "trainer.trainer_config_path": "Trinity does not read it any more; write below trinity.trainer.trainer_config",
    "trainer.trust_remote_code": "write trinity.model.trust_remote_code instead",
    f"{ACTOR}.checkpoint": "what a run continues from must be there",
    f"{ACTOR}.clip_ratio": "write astuner.trainer_common.algorithm.clip_ratio_low and clip_ratio_high instead",
    f"{ACTOR}.clip_ratio_c": OWN_LOSS,
    f"{ACTOR}.clip_ratio_high": "write astuner.trainer_common.algorithm.clip_ratio_high instead",
    f"{ACTOR}.clip_ratio_low": "write astuner.trainer_common.algorithm.clip_ratio_low instead",
    f"{ACTOR}.entropy_coeff": "write astuner.trainer_common.entropy_coeff instead",
    f"{ACTOR}.fsdp_config.strategy": _ONLY_VERL,
    f"{ACTOR}.grad_clip": "write astuner.trainer_common.optim.grad_clip instead",
    f"{ACTOR}.kl_loss_coef": "write astuner.trainer_common.kl_loss_coef instead",
    f"{ACTOR}.kl_loss_type": "write astuner.trainer_common.kl_loss_type instead",
    f"{ACTOR}.loss_agg_mode": "write astuner.trainer_common.algorithm.loss_agg_mode instead",
    f"{ACTOR}.loss_scale_factor": OWN_LOSS,
    f"{ACTOR}.megatron": _ONLY_VERL,
    f"{ACTOR}.optim": _OPTIM,
    f"{ACTOR}.policy_loss": "write astuner.trainer_common.algorithm.loss instead",
    f"{ACTOR}.ppo_infer_max_token_len_per_gpu": "write astuner.trainer_common.micro_batch_tokens instead",
    f"{ACTOR}.ppo_max_token_len_per_gpu": "write astuner.trainer_common.micro_batch_tokens instead",
    f"{ACTOR}.ppo_micro_batch_size": "write astuner.trainer_common.micro_batch_tokens instead",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": "write astuner.trainer_common.micro_batch_tokens instead",
    f"{ACTOR}.ppo_mini_batch_size": "write astuner.trainer_common.mini_batch_num instead",
    f"{ACTOR}.rollout_n": "write astuner.rollout.num_repeat instead",
    f"{ACTOR}.router_replay": "which experts worked is not recorded with the tokens",
    f"{ACTOR}.shuffle": "samples are put in order by ASTuner",
    f"{ACTOR}.strategy": _ONLY_VERL,
    f"{ACTOR}.ulysses_sequence_parallel_size": "write astuner.trainer_common.ulysses_sequence_parallel_size instead",
    f"{ACTOR}.use_dynamic_bsz": "the number of samples differs from step to step",
    f"{ACTOR}.use_kl_loss": "write astuner.trainer_common.use_kl_loss instead",
    f"{ACTOR}.use_prefix_grouper": OWN_LOSS,
    f"{ACTOR}.use_remove_padding": "write trinity.trainer.use_remove_padding instead",
    f"{VERL}.actor_rollout_ref": "write its sections model, actor and ref beside one another",
    f"{VERL}.critic": "there is no critic: advantages compare the episodes of a group",
    f"{VERL}.model.custom_chat_template": "write astuner.model.chat_template instead",
    f"{VERL}.model.exclude_modules": _NO_LORA,
    f"{VERL}.model.lora_adapter_path": _NO_LORA,
    f"{VERL}.model.lora_alpha": _NO_LORA,
    f"{VERL}.model.lora_rank": _NO_LORA,
    f"{VERL}.model.path": "write astuner.model.path instead",
    f"{VERL}.model.target_modules": _NO_LORA,
    f"{VERL}.model.trust_remote_code": "write trinity.model.trust_remote_code instead",
    f"{VERL}.model.use_remove_padding": "write trinity.trainer.use_remove_padding instead",
    f"{VERL}.ref.checkpoint": "the reference is never saved",
    f"{VERL}.ref.fsdp_config.strategy": _ONLY_VERL,
    f"{VERL}.ref.log_prob_max_token_len_per_gpu": "write astuner.trainer_common.micro_batch_tokens instead",
    f"{VERL}.ref.log_prob_use_dynamic_bsz": "the number of samples differs from step to step",
    f"{VERL}.ref.megatron": _ONLY_VERL,
    f"{VERL}.ref.rollout_n": "write astuner.rollout.num_repeat instead",
    f"{VERL}.ref.strategy": _ONLY_VERL,
    f"{VERL}.ref.ulysses_sequence_parallel_size": "write astuner.trainer_common.ulysses_sequence_parallel_size instead",
    f"{VERL}.ref.use_remove_padding": "write trinity.trainer.use_remove_padding instead",
    f"{VERL}.rollout": "Trinity's engines are below explorer.rollout_model",
}
"""Trinity's keys and sections that a person may not write below ``trinity:``, besides the locked rows; and what
instead.  Those below ``trainer.trainer_config`` are, beside ASTuner's, the ones that Trinity leaves out with a warning
in a log file."""


def why_locked(native: str) -> str:
    """Why a person may not write Trinity's key ``native``; empty if it is free."""
    return table.why_locked(native, ROWS, LOCKED)
