"""From ``astuner.*`` to Trinity's keys: one row for each key of Trinity that ASTuner sets, and why.

Light: it is read by the documentation's generator where Trinity is not installed.  Invariant: every row of `ROWS` names
a key of Trinity's `Config` (or one below ``trainer.trainer_config``, which Trinity hands to VERL), and each such key
once.  Those that a person may not write and no row sets are in `astuner_trinity.locked`.
"""

from __future__ import annotations

from typing import Any

from astuner import TrainerCommon
from astuner_ray.native.table import UNSET, Row, chat_template, checkpointing, fixed, precision, same
from astuner_ray.training import optim_settings
from astuner_trinity.always import (
    ACTOR,
    ALGORITHM,
    ALWAYS,
    ENTROPY,
    EXPERIENCES,
    FOLDER,
    LOSS,
    NAME,
    VERL,
    WITH_REFERENCE,
)
from astuner_trinity.facts import ENGINE, ENGINES, MODES, RUNNERS, Facts

_SCHEDULE = "the optimizer has the schedule, one rate for each of its steps"
_OPTIMIZER = "the optimizer is ASTuner's, the same as on every backbone, and so is its schedule"
_OWN_CALLS = "of calls that Trinity's own workflows make; ASTuner's calls ask for their own number of tokens"
OWN_LOSS = "the loss is ASTuner's own, the same as on every backbone; Trinity's and VERL's are not used"
LENGTHS = ("rollout.max_model_len", "data.max_prompt_length", "data.max_response_length")
LIMITS = (
    "rollout.episode_timeout",
    "rollout.max_retries",
    "task_judge.judge_timeout",
    "rollout.num_repeat",
    "rollout.val_kwargs.num_repeat",
    "rollout.max_env_worker",
    "trainer_common.algorithm.dynamic_sampling",
    "trainer_common.algorithm.max_draws",
)


def _oversample(facts: Facts) -> Any:
    """The share of groups not waited for: Trinity waits for ceil((1 - this) * drawn), which must be the batch size."""
    wanted = facts.a.data.train_batch_size
    return UNSET if facts.drawn == wanted else 1 - (wanted - 0.5) / facts.drawn


def _entropy(facts: Facts) -> dict[str, float]:
    return {"entropy_coef": facts.a.trainer_common.entropy_coeff}


def _optimizer(facts: Facts) -> dict[str, Any]:
    steps = None if facts.total_steps is None else facts.total_steps * facts.updates_per_step
    return optim_settings.kwargs_for(facts.a.trainer_common.optim, total_steps=steps, vocab_size=facts.vocab_size)


def _steps(native: str) -> Row[Facts]:
    return Row(
        native=native,
        ours=("trainer_common.total_steps", "trainer_common.total_epochs"),
        value=lambda f: UNSET if f.total_steps is None else f.total_steps,
        says="steps of the whole run",
        why="the smaller of the two where both are written",
        locked=True,
    )


ROWS: tuple[Row[Facts], ...] = (
    # ----------------------------------------------------------------------------------------------------- the run
    Row(native="mode", value=lambda f: MODES[0], says=MODES[0], why=f"or {MODES[1]}, which shares one GPU"),
    Row(
        native="ray_namespace",
        ours=("project_name", "experiment_name"),
        value=lambda f: f"astuner/{f.a.project_name}/{f.config.experiment_name}",
        says="astuner/(project)/(experiment)",
        why="where the parts of a run find each other in the cluster",
        locked=True,
    ),
    Row(
        native="checkpoint_root_dir",
        ours=("experiment_dir", "experiment_name"),
        value=lambda f: str(f.run_dir.path),
        says="the run folder",
        why=f"Trinity writes to root/project/name, which is its `{FOLDER}/{NAME}/`",
        locked=True,
    ),
    fixed("project", FOLDER, f"Trinity's files are in the run folder's {FOLDER}/{NAME}/; write astuner.project_name"),
    fixed("group", "", f"Trinity's files are in the run folder's {FOLDER}/{NAME}/"),
    fixed("name", NAME, f"Trinity's files are in the run folder's {FOLDER}/{NAME}/; write astuner.experiment_name"),
    fixed("continue_from_checkpoint", True, "the folder of a new run is empty; `astuner run --no-resume` begins one"),
    fixed("ignore_validator_suggestions", True, "Trinity would ask the terminal; `astuner run --dry-run` estimates"),
    _steps("trainer.total_steps"),
    _steps("buffer.total_steps"),
    same("trainer_common.total_epochs", "buffer.total_epochs", "Trinity stops at total_steps", locked=True),
    same("trainer_common.save_freq", "trainer.save_interval", "the last step is always saved", locked=True),
    same("trainer_common.nnodes", "cluster.node_num", locked=True),
    Row(
        native="cluster.gpu_per_node",
        ours=("trainer_common.n_gpus_per_node",),
        value=lambda f: f.gpus,
        says="the same; what there is where it is null",
        why="rollout engines take theirs, the rest trains",
        locked=True,
    ),
    # --------------------------------------------------------------------------------------------------- the model
    Row(
        native="model.model_path",
        ours=("model.path",),
        value=lambda f: f.model,
        says="the folder or name",
        locked=True,
    ),
    Row(
        native="model.custom_chat_template",
        ours=("model.chat_template",),
        value=chat_template,
        says="the file's text",
        why="so that checkpoints speak as they were trained",
        locked=True,
    ),
    Row(
        native=f"{ENGINE}.dtype",
        ours=("model.dtype",),
        value=lambda f: UNSET if f.a.model.dtype == "auto" else f.a.model.dtype,
        says="the same; `auto` is bfloat16",
    ),
    *(
        Row(
            native=f"{VERL}.{part}.fsdp_config.mixed_precision.param_dtype",
            ours=("model.dtype",),
            value=precision,
            says="fp32, bf16 or fp16; `auto` is bf16",
            why=why,
        )
        for part, why in (
            ("actor", "of the passes; the weights that the optimizer moves are float32 always"),
            ("ref", "the reference model's passes are as exact as the policy's"),
        )
    ),
    Row(
        native=f"{VERL}.model.enable_gradient_checkpointing",
        ours=("trainer_common.activation_checkpointing",),
        value=checkpointing,
        says="the same where it is written; otherwise on, as Trinity has it",
    ),
    # -------------------------------------------------------------------------------------------------- the lengths
    Row(
        native="model.max_model_len",
        ours=LENGTHS,
        value=lambda f: f.max_model_len,
        says="max_model_len, else both lengths together, else the model's own context",
        locked=True,
    ),
    Row(
        native="model.max_response_tokens",
        ours=LENGTHS,
        value=lambda f: f.response_length,
        says="max_response_length; null, and at most: all of the context but one token",
        why=_OWN_CALLS,
        locked=True,
    ),
    Row(
        native="model.max_prompt_tokens",
        ours=LENGTHS,
        value=lambda f: f.max_model_len - f.response_length,
        says="what max_response_tokens leaves of the context",
        why=f"Trinity takes no more than both together; {_OWN_CALLS}",
        locked=True,
    ),
    Row(
        native=f"{ENGINE}.max_response_tokens",
        ours=LENGTHS,
        value=lambda f: f.max_model_len,
        says="the whole context",
        why="the most that a call may ask an engine for; each asks for its own number",
        locked=True,
    ),
    fixed("model.enable_prompt_truncation", False, "a prompt that does not fit ends its episode, and is not cut"),
    # -------------------------------------------------------------------------------------------------- the rollout
    Row(
        native="buffer.batch_size",
        ours=("data.train_batch_size", "rollout.oversample"),
        value=lambda f: f.drawn,
        says="train_batch_size x oversample, rounded up",
        why="groups that a step begins",
        locked=True,
    ),
    Row(
        native="explorer.over_rollout.ratio",
        ours=("rollout.oversample", "data.train_batch_size"),
        value=_oversample,
        says="what makes Trinity wait for train_batch_size of them; 0 without oversample",
        locked=True,
    ),
    fixed("explorer.over_rollout.wait_after_min", 0.0, "the stragglers are cancelled, so nobody waits for them"),
    Row(
        native="buffer.train_batch_size",
        ours=("data.train_batch_size", "rollout.num_repeat"),
        value=lambda f: f.a.data.train_batch_size * f.a.rollout.num_repeat,
        says="train_batch_size x num_repeat",
        why="until the samples of a step are known: training takes all of them, however many they are",
        locked=True,
    ),
    same("rollout.num_repeat", "algorithm.repeat_times", locked=True),
    same("rollout.temperature", "model.temperature", "the trainer's log-probabilities too", locked=True),
    same("rollout.top_p", "model.top_p", locked=True),
    same("rollout.top_k", "model.top_k", locked=True),
    Row(
        native=RUNNERS,
        ours=("rollout.max_env_worker", "rollout.num_repeat", "data.train_batch_size"),
        value=lambda f: f.runners_per_engine,
        says="max_env_worker / num_repeat / engines, rounded up; at most the groups of a step / engines, rounded up",
        why="processes of an engine that host one group of episodes at a time",
    ),
    Row(
        native="explorer.max_timeout",
        ours=LIMITS,
        value=lambda f: f.group_seconds,
        says="the longest that ASTuner's own limits let a group take, and those drawn in its place, and a minute",
        why="they end episodes, with a reason; this one is for when they fail",
    ),
    Row(
        native=f"{EXPERIENCES}.max_read_timeout",
        ours=(*LIMITS, "data.train_batch_size"),
        value=lambda f: float(f.patience),
        says="the longest that the groups of a step and a validation can take; an hour at least",
        why="how long training waits for a batch",
    ),
    Row(
        native="synchronizer.sync_timeout",
        ours=(*LIMITS, "data.train_batch_size"),
        value=lambda f: f.patience,
        says="the longest that the groups of a step and a validation can take; an hour at least",
        why="how long rollouts and training wait for each other",
    ),
    Row(
        native=f"{ENGINE}.engine_type",
        ours=("rollout.name",),
        value=lambda f: f.a.rollout.name or "vllm",
        says="the same; null is vllm",
        locked=True,
    ),
    Row(
        native=ENGINES,
        ours=("trainer_common.n_gpus_per_node", "trainer_common.nnodes", "rollout.tensor_model_parallel_size"),
        value=lambda f: f.engines,
        says="as many as leave training half of the GPUs, and whole machines where it has more than one",
        why="older: `astuner.trainer_common.trinity_only__n_vllm_engine`",
    ),
    same("rollout.tensor_model_parallel_size", f"{ENGINE}.tensor_parallel_size", locked=True),
    same(
        "rollout.max_num_seqs",
        f"{ENGINE}.extra_engine_args.max_num_seqs",
        says="the same; null is the engine's",
        unless=None,
        locked=True,
    ),
    same("seed", f"{ENGINE}.seed"),
    fixed(f"{ENGINE}.enable_openai_api", True, "by which ASTuner speaks to the engines: token ids in, token ids out"),
    fixed(f"{ENGINE}.enable_history", False, "tokens are recorded by ASTuner"),
    # ------------------------------------------------------------------------------------------------- the training
    Row(
        native="trainer.max_token_len_per_gpu",
        ours=("trainer_common.micro_batch_tokens", *LENGTHS, "trainer_common.ulysses_sequence_parallel_size"),
        value=lambda f: f.micro_batch_tokens,
        says="micro_batch_tokens; null: 16384, or one sequence of the whole context if that is more",
        why="tokens of one pass, of the reference model too",
    ),
    same("trainer_common.ppo_epochs", f"{ACTOR}.ppo_epochs", locked=True),
    same("seed", f"{ACTOR}.data_loader_seed"),
    same("seed", f"{ACTOR}.fsdp_config.seed"),
    same("trainer_common.optim.lr", "algorithm.optimizer.lr", locked=True),
    same(
        "trainer_common.optim.weight_decay",
        "algorithm.optimizer.weight_decay",
        "of matrices; norms and biases have none",
        locked=True,
    ),
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
        value=_optimizer,
        says="all of `optim`, the optimizer steps of the run, the rows of the model's embedding",
        why=_OPTIMIZER,
        locked=True,
    ),
    fixed("algorithm.optimizer.lr_scheduler_type", "constant", _SCHEDULE),
    fixed("algorithm.optimizer.lr_warmup_steps", 0, _SCHEDULE),
    same("trainer_common.optim.grad_clip", "trainer.grad_clip", locked=True),
    same("trainer_common.optim.grad_clip", "algorithm.optimizer.clip_grad", "what VERL reads", locked=True),
    same("trainer_common.fsdp_config.param_offload", "trainer.param_offload"),
    same("trainer_common.fsdp_config.optimizer_offload", "trainer.optimizer_offload"),
    same(
        "trainer_common.ulysses_sequence_parallel_size",
        "trainer.ulysses_sequence_parallel_size",
        "the reference model's follows it",
        locked=True,
    ),
    Row(
        native="algorithm.advantage_fn_args",
        ours=("trainer_common.mini_batch_num", "trainer_common.ulysses_sequence_parallel_size"),
        value=lambda f: {"multiple": f.data_parallel * f.a.trainer_common.mini_batch_num},
        says="`multiple`: mini_batch_num x the groups of GPUs that hold sequences together",
        why="a batch is filled up to what mini-batches and the trainer's GPUs can share",
        locked=True,
    ),
    # ------------------------------------------------------------------------------------- the objective, in our loss
    Row(
        native="algorithm.algorithm_type",
        ours=("trainer_common.use_kl_loss",),
        value=lambda f: WITH_REFERENCE if f.a.trainer_common.use_kl_loss else ALGORITHM,
        says=f"{WITH_REFERENCE} or {ALGORITHM}",
        why="the first makes Trinity compute the reference",
        locked=True,
    ),
    fixed("algorithm.policy_loss_fn", LOSS, OWN_LOSS),
    Row(
        native="algorithm.policy_loss_fn_args",
        ours=(
            "trainer_common.algorithm.loss",
            "trainer_common.algorithm.loss_agg_mode",
            "trainer_common.algorithm.clip_ratio_low",
            "trainer_common.algorithm.clip_ratio_high",
            "trainer_common.algorithm.rollout_is",
            "trainer_common.algorithm.rollout_is_threshold",
            "trainer_common.use_kl_loss",
            "trainer_common.kl_loss_coef",
            "trainer_common.kl_loss_type",
        ),
        value=lambda f: {"settings": f.a.trainer_common.model_dump(mode="json", include={*TrainerCommon.model_fields})},
        says="all of `trainer_common`",
        why=OWN_LOSS,
        locked=True,
    ),
    fixed("algorithm.entropy_loss_fn", ENTROPY, "Trinity subtracts its bonus; the entropy is logged in every step"),
    Row(
        native="algorithm.entropy_loss_fn_args",
        ours=("trainer_common.entropy_coeff",),
        value=_entropy,
        says="the same, as `entropy_coef`",
        locked=True,
    ),
    Row(
        native="algorithm.bypass_old_logprobs",
        ours=("trainer_common.algorithm.rollout_is",),
        value=lambda f: f.a.trainer_common.algorithm.rollout_is == "none",
        says="whether it is none",
        why="then the rollout's log-probabilities are the old ones, and Trinity need not compute them again",
        locked=True,
    ),
    *ALWAYS,
)
