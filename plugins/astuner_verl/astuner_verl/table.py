"""From ``astuner.*`` to VERL's keys: one row for each key of VERL that ASTuner sets, and why.

Light: it is read by the documentation's generator where VERL is not installed.  Invariant: every row of `ROWS` names
a key that VERL's YAML files have (or one that it adds, with a ``+``), and each such key once.  Keys that a person may
not write and no row sets are in `astuner_verl.locked`.
"""

from __future__ import annotations

from astuner_ray.native.table import UNSET, Row, chat_template, checkpointing, fixed, precision, same
from astuner_ray.training import optim_settings
from astuner_verl.facts import Facts

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"


_LENGTHS = ("rollout.max_model_len", "data.max_prompt_length", "data.max_response_length")
_TICKETS = "tasks are drawn by ASTuner; verl's data loader gives out tickets for them"
_OPTIMIZER = "the optimizer is ASTuner's, the same as on every backbone, and so is its schedule"
_SCHEDULE = "the optimizer has the schedule, one rate for each of its steps"
_ONE_VERSION = "a step is one batch and ends with new weights in the rollout engines, in every mode"
OWN_LOSS = "the loss is ASTuner's own, the same as on every backbone; verl's are not used"

ROWS: tuple[Row[Facts], ...] = (
    # ----------------------------------------------------------------------------------------------------- the run
    same("project_name", "trainer.project_name", locked=True),
    same("experiment_name", "trainer.experiment_name", locked=True),
    Row(
        native="trainer.total_training_steps",
        ours=("trainer_common.total_steps", "trainer_common.total_epochs"),
        value=lambda f: UNSET if f.total_steps is None else f.total_steps,
        says="steps of the whole run",
        why="the smaller of the two where both are written",
        locked=True,
    ),
    same("trainer_common.total_epochs", "trainer.total_epochs", "verl stops at total_training_steps", locked=True),
    same("trainer_common.save_freq", "trainer.save_freq", "the last step is always saved", locked=True),
    Row(
        native="trainer.test_freq",
        ours=("trainer_common.test_freq",),
        value=lambda f: f.a.trainer_common.test_freq if f.validation_tasks else -1,
        says="the same; -1 without validation tasks",
        locked=True,
    ),
    Row(
        native="trainer.val_before_train",
        ours=("trainer_common.val_before_train",),
        value=lambda f: f.a.trainer_common.val_before_train and f.validation_tasks > 0,
        says="the same; false without validation tasks",
        locked=True,
    ),
    same("trainer_common.nnodes", "trainer.nnodes", locked=True),
    Row(
        native="trainer.n_gpus_per_node",
        ours=("trainer_common.n_gpus_per_node",),
        value=lambda f: f.gpus,
        says="the same; what there is where it is null",
        locked=True,
    ),
    Row(
        native="trainer.default_local_dir",
        ours=("experiment_dir", "experiment_name"),
        value=lambda f: str(f.run_dir.resume),
        says="`resume/` in the run folder",
        locked=True,
    ),
    # --------------------------------------------------------------------------------------------------- the model
    Row(native=f"{MODEL}.path", ours=("model.path",), value=lambda f: f.model, says="the folder or name", locked=True),
    Row(
        native=f"{MODEL}.custom_chat_template",
        ours=("model.chat_template",),
        value=chat_template,
        says="the file's text",
        why="so that checkpoints speak as they were trained",
        locked=True,
    ),
    same("model.lora.rank", f"{MODEL}.lora_rank"),
    Row(
        native=f"{MODEL}.lora_alpha",
        ours=("model.lora.alpha",),
        value=lambda f: int(f.a.model.lora.alpha),
        says="the same, a whole number",
    ),
    same("model.lora.target_modules", f"{MODEL}.target_modules"),
    Row(
        native=f"{ROLLOUT}.dtype",
        ours=("model.dtype",),
        value=lambda f: UNSET if f.a.model.dtype == "auto" else f.a.model.dtype,
        says="the same; `auto` is bfloat16",
    ),
    Row(
        native=f"+{ACTOR}.fsdp_config.mixed_precision.param_dtype",
        ours=("model.dtype",),
        value=precision,
        says="fp32, bf16 or fp16; `auto` is bf16",
        why="of the passes; the weights that the optimizer moves are float32 always",
    ),
    Row(
        native=f"+{REF}.fsdp_config.mixed_precision.param_dtype",
        ours=("model.dtype",),
        value=precision,
        says="fp32, bf16 or fp16; `auto` is bf16",
        why="the reference model's passes are as exact as the policy's",
    ),
    Row(
        native=f"{MODEL}.enable_gradient_checkpointing",
        ours=("trainer_common.activation_checkpointing",),
        value=checkpointing,
        says="the same where it is written; otherwise on, as verl has it",
    ),
    # -------------------------------------------------------------------------------------------------- the lengths
    Row(
        native=f"{ROLLOUT}.max_model_len",
        ours=_LENGTHS,
        value=lambda f: f.max_model_len,
        says="max_model_len, else both lengths together, else the model's own context",
        locked=True,
    ),
    Row(
        native="data.max_prompt_length",
        ours=_LENGTHS,
        value=lambda f: f.prompt_length,
        says="the same; null: all of the context but one token",
        why="`rollout.prompt_length` follows it",
        locked=True,
    ),
    Row(
        native="data.max_response_length",
        ours=_LENGTHS,
        value=lambda f: f.response_length,
        says="the same; null, and at most: all of the context but one token",
        why="`rollout.response_length` follows it; each call asks for its own number of tokens",
        locked=True,
    ),
    # -------------------------------------------------------------------------------------------------- the rollout
    same("data.train_batch_size", "data.train_batch_size", locked=True),
    same("rollout.num_repeat", f"{ROLLOUT}.n", locked=True),
    same("rollout.temperature", f"{ROLLOUT}.temperature", "the actor's log-probabilities too", locked=True),
    same("rollout.top_p", f"{ROLLOUT}.top_p", locked=True),
    same("rollout.top_k", f"{ROLLOUT}.top_k", locked=True),
    same("rollout.val_kwargs.temperature", f"{ROLLOUT}.val_kwargs.temperature", locked=True),
    same("rollout.val_kwargs.top_p", f"{ROLLOUT}.val_kwargs.top_p", locked=True),
    same("rollout.val_kwargs.top_k", f"{ROLLOUT}.val_kwargs.top_k", locked=True),
    Row(
        native=f"{ROLLOUT}.val_kwargs.do_sample",
        ours=("rollout.val_kwargs.temperature",),
        value=lambda f: f.a.rollout.val_kwargs.temperature > 0,
        says="whether it is above 0",
        locked=True,
    ),
    Row(
        native=f"{ROLLOUT}.name",
        ours=("rollout.name",),
        value=lambda f: f.a.rollout.name or "vllm",
        says="the same; null is vllm",
    ),
    same("rollout.tensor_model_parallel_size", f"{ROLLOUT}.tensor_model_parallel_size"),
    same("rollout.max_num_seqs", f"{ROLLOUT}.max_num_seqs", says="the same; null is verl's 256", unless=None),
    same("seed", f"{ROLLOUT}.seed"),
    # ------------------------------------------------------------------------------------------------- the training
    Row(
        native=f"{ACTOR}.ppo_max_token_len_per_gpu",
        ours=("trainer_common.micro_batch_tokens", *_LENGTHS, "trainer_common.ulysses_sequence_parallel_size"),
        value=lambda f: f.micro_batch_tokens,
        says="micro_batch_tokens; null: 16384, or one sequence of the whole context if that is more",
        why="`log_prob_max_token_len_per_gpu` of rollout and reference follow it",
    ),
    same(
        "data.train_batch_size",
        f"{ACTOR}.ppo_mini_batch_size",
        "until the rows of a step are known: then as many as make `mini_batch_num` optimizer steps",
        locked=True,
    ),
    same("trainer_common.ppo_epochs", f"{ACTOR}.ppo_epochs", locked=True),
    same("seed", f"{ACTOR}.data_loader_seed"),
    same("seed", f"{ACTOR}.fsdp_config.seed"),
    same("trainer_common.optim.lr", f"{ACTOR}.optim.lr"),
    same("trainer_common.optim.weight_decay", f"{ACTOR}.optim.weight_decay", "of matrices; norms and biases have none"),
    fixed(f"{ACTOR}.optim.optimizer_impl", optim_settings.MODULE, _OPTIMIZER),
    fixed(f"{ACTOR}.optim.optimizer", optim_settings.CLASS, _OPTIMIZER),
    Row(
        native=f"{ACTOR}.optim.override_optimizer_config",
        ours=(
            *(f"trainer_common.optim.{name}" for name in optim_settings.PASSED),
            "trainer_common.mini_batch_num",
            "trainer_common.ppo_epochs",
            "trainer_common.total_steps",
        ),
        value=lambda f: optim_settings.kwargs_for(
            f.a.trainer_common.optim,
            total_steps=None if f.total_steps is None else f.total_steps * f.updates_per_step,
            vocab_size=f.vocab_size,
        ),
        says="all of `optim`, the optimizer steps of the run, the rows of the model's embedding",
        why=_OPTIMIZER,
        locked=True,
    ),
    fixed(f"{ACTOR}.optim.lr_scheduler_type", "constant", _SCHEDULE),
    fixed(f"{ACTOR}.optim.lr_warmup_steps", 0, _SCHEDULE),
    same("trainer_common.optim.grad_clip", f"{ACTOR}.optim.clip_grad"),
    same("trainer_common.optim.grad_clip", f"{ACTOR}.grad_clip", "its older name"),
    same("trainer_common.fsdp_config.param_offload", f"{ACTOR}.fsdp_config.param_offload"),
    same("trainer_common.fsdp_config.optimizer_offload", f"{ACTOR}.fsdp_config.optimizer_offload"),
    same(
        "trainer_common.ulysses_sequence_parallel_size",
        f"{ACTOR}.ulysses_sequence_parallel_size",
        "the reference model's follows it",
    ),
    # ------------------------------------------------------------------------------------- the objective, in our loss
    same("trainer_common.use_kl_loss", f"{ACTOR}.use_kl_loss", "makes verl compute the reference", locked=True),
    same("trainer_common.kl_loss_coef", f"{ACTOR}.kl_loss_coef", locked=True),
    same("trainer_common.kl_loss_type", f"{ACTOR}.kl_loss_type", locked=True),
    same("trainer_common.algorithm.use_kl_in_reward", "algorithm.use_kl_in_reward", locked=True),
    same("trainer_common.kl_loss_type", "algorithm.kl_penalty", locked=True),
    same("trainer_common.kl_loss_coef", "algorithm.kl_ctrl.kl_coef", locked=True),
    same("trainer_common.entropy_coeff", f"{ACTOR}.entropy_coeff", locked=True),
    same("trainer_common.algorithm.clip_ratio_low", f"{ACTOR}.clip_ratio_low", locked=True),
    same("trainer_common.algorithm.clip_ratio_high", f"{ACTOR}.clip_ratio_high", locked=True),
    Row(
        native="algorithm.rollout_correction.bypass_mode",
        ours=("trainer_common.algorithm.rollout_is",),
        value=lambda f: f.a.trainer_common.algorithm.rollout_is == "none",
        says="whether it is none",
        why="then the rollout's log-probabilities are the old ones, and verl need not compute them again",
        locked=True,
    ),
    # ------------------------------------------------------------------------------------ the same in every experiment
    fixed("trainer.use_v1", True, "verl's trainer as of 0.9; the older one is deprecated"),
    fixed("+trainer.v1.sync.parameter_sync_step", 1, _ONE_VERSION),
    fixed("+trainer.v1.colocate_async.parameter_sync_step", 1, _ONE_VERSION),
    fixed("trainer.v1.separate_async.parameter_sync_step", 1, _ONE_VERSION),
    fixed("trainer.logger", ["file"], "ASTuner's log sinks write the trackers, from verl's file"),
    fixed("trainer.resume_mode", "disable", "ASTuner says where a run continues, when it does"),
    fixed("trainer.checkpoint_callback_class", "astuner_verl.checkpoints.SaveCallback", "saves what else is resumed"),
    fixed("trainer.v1.sampler.custom_sampler.path", "pkg://astuner_verl.sampler", "groups and episodes are ASTuner's"),
    fixed("trainer.v1.sampler.custom_sampler.name", "GroupBuffer", "groups and episodes are ASTuner's"),
    fixed(
        f"+{ROLLOUT}.agent.agent_loop_manager_class", "astuner_verl.manager.EpisodeManager", "episodes are ASTuner's"
    ),
    fixed("data.custom_cls.path", "pkg://astuner_verl.dataset", _TICKETS),
    fixed("data.custom_cls.name", "TicketDataset", _TICKETS),
    Row(
        native="data.train_files",
        value=lambda f: UNSET if f.total_steps is None else f"tickets:{f.total_steps * f.a.data.train_batch_size}",
        says="tickets:(steps x train_batch_size)",
        why=_TICKETS,
        locked=True,
    ),
    fixed("data.val_files", "tickets:1", _TICKETS),
    fixed("data.shuffle", False, _TICKETS),
    fixed("data.dataloader_num_workers", 0, _TICKETS),
    fixed("algorithm.adv_estimator", "astuner", "advantages are over episodes, as on every backbone"),
    fixed("algorithm.kl_ctrl.type", "fixed", "the weight of KL does not change"),
    fixed(f"{ROLLOUT}.calculate_log_probs", True, "tokens are recorded with their log-probabilities"),
    fixed(
        f"{ACTOR}.strategy", "fsdp2", "FSDP 2: under FSDP 1 a weight is flat, and Muon and weight decay go by its shape"
    ),
    fixed(f"{ACTOR}.use_dynamic_bsz", True, "the number of samples differs from step to step"),
    fixed(f"{ACTOR}.loss_agg_mode", "token-sum", OWN_LOSS),
    fixed(f"{ACTOR}.calculate_entropy", True, "the entropy is logged in every step", locked=False),
    fixed(
        f"{ACTOR}.checkpoint.save_contents", ["model", "optimizer", "extra", "hf_model"], "transformers loads the last"
    ),
    fixed(f"{ACTOR}.checkpoint.load_contents", ["model", "optimizer", "extra"], "what a run continues from"),
    fixed("reward.num_workers", 1, "judges run with the episodes; verl's reward workers are idle"),
)
