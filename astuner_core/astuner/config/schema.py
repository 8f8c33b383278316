"""Schema of the ``astuner:`` section: type, range, default and documentation of every key.

Plugins define the schemas of their sections (``task_reader.<name>``, ``task_judge.<name>``, ``rollout.<workflow
name>`` and a backbone's root section). Packages add keys to the sections below with ``register_config_keys``;
`with_packages` returns the combined schema. Rules that involve several keys are in `astuner.config.capabilities`.

The docstring under a field is its documentation in ``astuner config explain`` and ``docs/configuration.md``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, StringConstraints, create_model
from pydantic.fields import FieldInfo

import astuner
from astuner.config.checking import section_of
from astuner.contracts.section import OpenSection as OpenSection  # older plugins import them from here
from astuner.contracts.section import Section as Section
from astuner.contracts.types import LARGEST_REWARD
from astuner.plugins import registry
from astuner.plugins.loader import PluginManager, load_plugins

MOST = 10**9
"""Upper limit of counts, seconds and loss coefficients, because engines store them in 32 bits."""
AT_ONCE = 100_000
"""Upper limit of objects in memory: groups of a step, episodes of a group, ranks of adapters, GPUs."""
Every = Annotated[int, BeforeValidator(lambda n: MOST if n in (-1, "never") else n), Field(ge=1, le=MOST)]
"""Interval in steps. ``never`` or -1 (as in VERL): only after the last step."""
Share = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class LoraSection(Section):
    """LoRA adapters."""

    rank: int = Field(0, ge=0, le=AT_ONCE)
    """Rank of the adapters; 0 trains all weights."""
    alpha: float = Field(32.0, gt=0, le=MOST)
    """Scale of the adapters: they are multiplied by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on the adapters' input. Keep 0: any other value makes rollout and trainer disagree."""
    target_modules: str | list[str] = "all-linear"
    """Linear layers that get adapters: a list of names, or `all-linear`."""


class ModelSection(Section):
    """The model that the agent uses."""

    path: Text
    """Hugging Face name, local folder, or a name from a plugin (such as the demo's `tiny-calculator`)."""
    revision: str | None = None
    """Branch, tag or commit of a Hugging Face model."""
    trust_remote_code: bool = False
    """Run the model's Python files (`auto_map`) with your permissions; read them first. False rejects such models."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and activations. `auto`: bfloat16 on a GPU and on CPUs where it is faster, otherwise float32."""
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", examples=["auto", "cpu", "cuda", "cuda:0"])
    """`auto`, `cpu`, `cuda` or `cuda:N`; `auto` uses a GPU if one is available."""
    chat_template: str | None = None
    """Jinja file that replaces the tokenizer's chat template; `hermes` is ChatML with tools."""
    chat_template_kwargs: dict[str, Any] = Field({})
    """Variables of the chat template, e.g. `{enable_thinking: false}`. Variables that the template does not use are
    rejected."""
    lora: LoraSection = LoraSection()
    """Train low-rank adapters instead of all weights."""


class Policy(Section):
    """Settings of a policy that differ from `astuner.model`."""

    path: Text | None = None
    """Model to start from; null uses `astuner.model.path`."""
    lora: LoraSection | None = None
    """Adapters of this policy; null uses `astuner.model.lora`."""


class AgentSection(Section):
    """One agent, or one role shared by several agents."""

    policy: Text = "default"
    """Policy that generates its replies; agents with the same policy share weights."""
    train: bool = True
    """Train on its replies. False: the agent uses the policy, but its replies enter no sample."""
    model: Literal["policy", "external"] = "policy"
    """`policy`: a policy of this run; `external`: a model on another server, which is never trained."""
    name: str | None = None
    """Name of the external model on its server."""
    base_url: str | None = None
    """URL of the external server (chat completions), e.g. `https://api.openai.com/v1`."""
    api_key_env: str | None = None
    """Environment variable with the API key of the external server; null sends no key."""
    temperature: float | None = Field(None, ge=0, le=100)
    """Temperature of the external model; null uses the server's default."""
    timeout: float = Field(120.0, gt=0, le=MOST)
    """Maximum seconds for one reply of the external model."""


class EndpointSection(Section):
    """The HTTP endpoint of running episodes."""

    host: str = "127.0.0.1"
    """Address of the OpenAI- and Anthropic-compatible endpoint; addresses other than loopback require `token_env`."""
    port: int = Field(0, ge=0, le=65535)
    """Port of the endpoint; 0 uses a free port."""
    token_env: str | None = None
    """Environment variable with a token of at least 16 characters, which becomes part of every API key."""
    reconnect_timeout: float = Field(10.0, ge=0, le=MOST)
    """Seconds that a generation continues after its client disconnected, so that the client can reconnect; then it is
    canceled."""
    sampling: Literal["run", "request"] = "run"
    """Sampling parameters (temperature, top_p, seed, ...) for trained agents: `run` uses the experiment's; `request`
    uses the values of each request, which training backbones reject."""


class Data(Section):
    """Batches, lengths and bad data."""

    train_batch_size: int = Field(8, ge=1, le=AT_ONCE)
    """Tasks per step; each becomes a group of `rollout.num_repeat` episodes."""
    max_prompt_length: int | None = Field(None, ge=1, le=MOST)
    """Maximum tokens of the first prompt; a longer task is an error that names its id. Null: limited by the context
    only."""
    max_response_length: int | None = Field(None, ge=1, le=MOST)
    """Maximum tokens that an episode adds after its first prompt, including tool results. Null: limited by the context
    only."""
    shuffle: bool = True
    """Shuffle the training tasks in every epoch, seeded by `astuner.seed`."""
    on_bad_line: Literal["stop", "skip"] = "stop"
    """Action for a task that cannot be read: `stop` the run, or `skip` and count it."""
    max_validation_tasks: int | None = Field(None, ge=1, le=MOST)
    """Validate on the first N validation tasks; null uses all."""


class ValKwargs(Section):
    """Sampling during validation."""

    temperature: float = Field(0.0, ge=0, le=100)
    """Sampling temperature during validation; 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling during validation."""
    top_k: int = Field(-1, ge=-1, le=MOST)
    """Top-k sampling during validation; -1 disables it."""
    num_repeat: int = Field(1, ge=1, le=AT_ONCE)
    """Episodes per validation task; values above 1 are useful only with a temperature above 0."""


class MultiTurn(Section):
    """Limits over the turns of an episode."""

    max_sample_per_task: int = Field(30, ge=1, le=AT_ONCE)
    """Maximum samples of an episode. Each agent's longest path is kept first, then the paths that add most tokens;
    omitted paths are counted."""
    max_steps: int | None = Field(None, ge=1, le=MOST)
    """Maximum model calls of one agent in an episode. A further call ends the episode as truncated (see
    `truncated_reward`)."""
    expected_steps: int = Field(1, ge=1)
    """Typical number of samples per episode. Backbones count them, so only 1 is accepted."""


Reward = Annotated[float, Field(ge=-LARGEST_REWARD, le=LARGEST_REWARD)]


class Rollout(OpenSection):
    """How episodes run."""

    workflow: str = ""
    """Workflow: a registered name, `module->Class` or `path/to/file.py->Class`."""
    temperature: float = Field(1.0, ge=0, le=100)
    """Sampling temperature during training. Log-probabilities refer to this distribution."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling during training. Below 1, the trainer cannot reproduce the log-probabilities exactly."""
    top_k: int = Field(-1, ge=-1, le=MOST)
    """Top-k sampling during training; -1 disables it. Other values have the same effect as `top_p` below 1."""
    val_kwargs: ValKwargs = ValKwargs()
    """Sampling during validation."""
    num_repeat: int = Field(8, ge=1, le=AT_ONCE)
    """Episodes per task: the GRPO group size."""
    max_env_worker: int = Field(64, ge=1, le=AT_ONCE)
    """Maximum number of concurrent episodes."""
    max_num_seqs: int | None = Field(None, ge=1, le=AT_ONCE)
    """Maximum number of sequences that the engine decodes concurrently; null uses the engine's default."""
    tensor_model_parallel_size: int = Field(1, ge=1, le=AT_ONCE)
    """GPUs per rollout engine."""
    name: str | None = None
    """Rollout engine, if the backbone has several."""
    max_model_len: int | None = Field(None, ge=8, le=MOST)
    """Context length in tokens, prompt and responses together; null uses the model's own."""
    max_response_length_in_one_turn: int = Field(1024, ge=1, le=MOST)
    """Maximum tokens of one model call."""
    multi_turn: MultiTurn = MultiTurn()
    """Limits over the turns of an episode."""
    episode_timeout: float = Field(600.0, gt=0, le=MOST)
    """Maximum seconds of an episode; then it is canceled, counted and not scored."""
    max_retries: int = Field(2, ge=0, le=MOST)
    """How often an episode restarts after an engine or environment failure, and how often a failed judge is called
    again."""
    oversample: float = Field(1.0, ge=1, le=AT_ONCE)
    """Draw this many times `train_batch_size` groups, train on the first that finish, and cancel the remaining ones."""
    min_group_size: int = Field(2, ge=1, le=AT_ONCE)
    """Drop and count groups with fewer scored episodes. At most `num_repeat`; 1 if `num_repeat` is 1."""
    max_failed_share: float = Field(0.5, gt=0, le=1)
    """Stop the run if more than this share of the episodes of a step or validation fails."""
    compute_madness_checklist: list[str] = Field(["nonsense"])
    """Checks of the model's output: registered names, plugin/name or module->function. An empty list disables them."""
    agent_madness_termination: bool = True
    """End the episode as soon as a check fails."""
    agent_madness_reward: Reward = 0.0
    """Reward of an episode in which a check failed."""
    truncated_reward: Reward | Literal["judge", "drop"] = "judge"
    """Reward of an episode that ended at a limit on calls, tokens or context. `judge`: the workflow or judge scores
    what exists (0 without either); a number: always this reward; `drop`: remove it from its group in training."""
    disable_tool_calls: bool = False
    """Offer no tools to the model and parse no tool calls from its replies."""
    merge_level: Literal["exact", "text"] = "exact"
    """When a request continues an earlier turn: `exact` requires the same messages; `text` accepts similar texts and
    counts them."""


TOKEN_VARIABLE = "ASTUNER_ENV_TOKEN"
"""Environment variable with the token of an environment service; the default of ``env_service.token_env``."""


class EnvService(Section):
    """Where environments run, and with which parameters."""

    url: str = ""
    """URL of the environment service. Empty: the variable `ASTUNER_ENV_URL`, which `--with NAME` sets."""
    token_env: str = TOKEN_VARIABLE
    """Environment variable with the token of the service; no token is sent if it is not set."""
    timeout: float = Field(300.0, gt=0, le=MOST)
    """Maximum seconds of one request, or of the start of an environment in this process."""
    busy_timeout: float = Field(600.0, ge=0, le=MOST)
    """Maximum seconds to wait while the service is at capacity."""
    params: dict[str, Any] = Field({})
    """Parameters for every instance and for the list of tasks; each environment documents its own."""


class Services(OpenSection):
    """Options of services that ``--with NAME`` starts, one section per service."""


class TaskReader(OpenSection):
    """The source of tasks."""

    type: str = ""
    """Task reader: a registered name, `module->Class` or `path/to/file.py->Class`."""


class TaskJudge(OpenSection):
    """The judge that scores episodes."""

    judge: str | None = None
    """Judge: a registered name, `module->Class` or `path/to/file.py->Class`. Null if the workflow sets rewards."""
    judge_timeout: float = Field(60.0, gt=0, le=MOST)
    """Maximum seconds of one verdict; then the episode counts as a judge failure. Waiting for a helper model's `rpm`,
    `tpm` or `concurrency` limit does not count."""


class AlgorithmSection(Section):
    """Advantages and the policy loss."""

    adv_estimator: str = "grpo"
    """Advantage estimator: `grpo`, `dr_grpo`, `rloo`, `reinforce_plus_plus`, `none`, or your own (`file.py->name`)."""
    loss: str = "grpo"
    """Policy loss: `grpo`, `dr_grpo`, `dapo`, `gspo`, `cispo`, `rloo`, `reinforce_plus_plus`, or your own
    (`losses.py->mine`). A name also sets the estimator, clipping and aggregation that it implies, unless you set
    these keys."""
    clip_ratio_low: float = Field(0.2, ge=0, le=MOST)
    """Lower clip range: importance ratios are clipped at 1 - this value."""
    clip_ratio_high: float = Field(0.2, ge=0, le=MOST)
    """Upper clip range: importance ratios are clipped at 1 + this value (DAPO's clip-higher uses 0.28)."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "seq-mean-token-mean"
    )
    """Aggregation of token losses. "seq" means the episode, so an episode with branches has no extra weight."""
    adv_compare: Literal["role", "agent"] = "role"
    """Rewards that an agent's reward is compared with in its group: of all agents of its `role`, or of the same `agent`
    name only."""
    norm_adv_by_std: bool = True
    """Divide advantages by the group's standard deviation (GRPO does, Dr. GRPO does not)."""
    filter_zero_advantage: bool = True
    """Leave out samples with advantage 0, which have no gradient without a KL or entropy term."""
    dynamic_sampling: bool = False
    """Draw groups until `train_batch_size` of them have different rewards (DAPO); at most `max_draws` batches."""
    max_draws: int = Field(4, ge=1, le=AT_ONCE)
    """Maximum batches that dynamic sampling draws in a step."""
    use_kl_in_reward: bool = False
    """Subtract the KL to the reference model from the reward (requires `kl_loss_coef`)."""
    rollout_is: Literal["auto", "none", "token-truncate", "token-mask", "sequence-truncate", "sequence-mask"] = "auto"
    """Importance-ratio correction (Yao et al. 2025). `auto`: token-truncate if VERL or Trinity use 16-bit numbers."""
    rollout_is_threshold: float = Field(2.0, gt=0, le=MOST)
    """Threshold of that ratio: it is truncated there, or tokens or sequences above it are masked."""


class Optim(Section):
    """Optimizer and learning-rate schedule."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """`adamw`, or `muon`: orthogonalized updates of 2-D hidden weights and AdamW for the others, better for tiny
    models."""
    lr: float = Field(1e-6, ge=0, le=1)
    """Peak learning rate."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Decay rates of AdamW's moments."""
    weight_decay: float = Field(0.0, ge=0, le=1)
    """Decoupled weight decay."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of Muon."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule after the warm-up; `linear` and `cosine` end at `min_lr_ratio`."""
    lr_warmup_steps: int = Field(0, ge=0, le=MOST)
    """Optimizer steps of the linear warm-up from 0."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Final learning rate of the schedule, as a share of `lr`."""
    grad_clip: float = Field(1.0, gt=0, le=MOST)
    """Maximum global norm of the gradients."""


class FsdpConfig(Section):
    """Offloading of the trainer's state."""

    param_offload: bool = False
    """Keep parameters in CPU memory between steps (verl)."""
    optimizer_offload: bool = False
    """Keep optimizer state in CPU memory between steps (verl)."""


class TrainerCommon(Section):
    """Training settings that all backbones share."""

    total_epochs: int = Field(1, ge=1, le=MOST)
    """Passes over the training tasks."""
    total_steps: int | None = Field(None, ge=1, le=MOST)
    """Training steps, over as many epochs as needed. If you also set `total_epochs`, the smaller one applies."""
    save_freq: Every = 50
    """Save a checkpoint every N steps, or `never`. The last step is always saved."""
    resume_freq: int = Field(1, ge=1, le=MOST)
    """Save the state for `--resume` every N steps. Use a larger value if saving is slow."""
    save_episodes: int = Field(16, ge=-1, le=MOST)
    """Episodes per step to write in readable form; -1 writes all."""
    save_tokens: bool = True
    """Write every episode with tokens and logprobs to the episode log, which `astuner export` reads."""
    max_checkpoints: int | None = Field(3, ge=1, le=MOST)
    """Keep the newest N checkpoints and the best one in validation; null keeps all."""
    test_freq: Every = 50
    """Validate every N steps, or `never`. The last step is always validated."""
    val_before_train: bool = True
    """Validate before the first step, to compare before and after."""
    val_pass_n: int = Field(1, ge=1, le=AT_ONCE)
    """Episodes per validation task (pass@n); same as `rollout.val_kwargs.num_repeat`."""
    watts: float | None = Field(None, gt=0)
    """Power of the machine during training, in watts, for the report if the machine cannot measure it."""
    logger: str | list[str] = Field(["console", "jsonl"])
    """Log sinks, by name. The files of the run folder are always written."""
    algorithm: AlgorithmSection = AlgorithmSection()
    """Advantages and loss."""
    mini_batch_num: int = Field(1, ge=1, le=AT_ONCE)
    """Optimizer steps per batch of episodes."""
    ppo_epochs: int = Field(1, ge=1, le=AT_ONCE)
    """Passes over a batch of episodes."""
    micro_batch_tokens: int | None = Field(None, ge=1, le=MOST)
    """Tokens per forward and backward pass (gradient accumulation); null uses a quarter of the free memory."""
    optim: Optim = Optim()
    """Optimizer and schedule."""
    use_kl_loss: bool = False
    """Add the KL to the reference model (the starting weights) to the loss."""
    kl_loss_coef: float = Field(0.001, ge=0, le=MOST)
    """Weight of the KL term, in the loss or (with `use_kl_in_reward`) in the reward."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k3"
    """KL estimator (Schulman 2020): k1 = log ratio; k2 = half its square; k3 = `low_var_kl`, unbiased and positive."""
    entropy_coeff: float = Field(0.0, ge=-MOST, le=MOST)
    """Weight of the entropy bonus."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    nnodes: int = Field(1, ge=1, le=AT_ONCE)
    """Number of machines."""
    n_gpus_per_node: int | None = Field(None, ge=0, le=AT_ONCE)
    """GPUs per machine; null uses all."""
    ulysses_sequence_parallel_size: int = Field(1, ge=1, le=AT_ONCE)
    """GPUs that share one sequence (verl, Trinity)."""
    fsdp_config: FsdpConfig = FsdpConfig()
    """Placement of parameters and optimizer state (verl, Trinity)."""


class DebugSection(Section):
    """The `debug` backbone."""

    debug_max_parallel: int = Field(1, ge=1, le=AT_ONCE)
    """Concurrent episodes; 1 keeps breakpoints readable."""
    debug_first_n_tasks: int = Field(2, ge=1, le=MOST)
    """Number of training tasks to try, with one episode each."""
    engine: Literal["local", "openai", "vllm"] = "local"
    """Source of tokens: the `local` engine, a running OpenAI-compatible server (`openai`), or a new vLLM server
    (`vllm`)."""
    base_url: str = "http://127.0.0.1:8000/v1"
    """URL of the running server, for `engine: openai`."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable with the server's API key."""
    debug_vllm_port: int = Field(18000, ge=1, le=65535)
    """Port of the new vLLM server, on loopback."""
    debug_vllm_seed: int = Field(12345, ge=0, le=2**32 - 1)
    """Seed of the new vLLM server."""
    debug_tensor_parallel_size: int = Field(1, ge=1, le=AT_ONCE)
    """Tensor parallelism of the new vLLM server."""
    startup_timeout: float = Field(1800.0, gt=0, le=MOST)
    """Maximum seconds until the new vLLM server answers."""


class AstunerSection(Section):
    """The root section of an experiment file."""

    project_name: str = "astuner"
    """Project name in experiment trackers."""
    experiment_name: str = "read_yaml_name"
    """Name of the run folder; `read_yaml_name` uses the name of the experiment file."""
    experiment_dir: str = "launcher_record"
    """Parent directory of run folders."""
    backbone: str = "debug"
    """Backbone that runs the experiment; `--backbone` overrides it."""
    seed: int = Field(0, ge=0, le=2**32 - 1)
    """Seed of shuffling, sampling and new adapters."""
    model: ModelSection
    """The model inside the agent."""
    agents: dict[str, AgentSection] = Field({})
    """Agents or roles by name: their policy, and whether they are trained. Empty: all agents share one policy and are
    trained."""
    policies: dict[str, Policy] = Field({})
    """Policies that differ in model or adapters, by name. Other policies that agents name need no entry."""
    endpoint: EndpointSection = EndpointSection()
    """HTTP endpoint for agents in other frameworks, languages or processes."""
    env_service: EnvService = EnvService()
    """Environments that agents act in."""
    services: Services = Services()
    """Options of services started with `--with NAME`, by service name."""
    data: Data = Data()
    """Batches and lengths."""
    rollout: Rollout = Rollout()
    """How episodes run."""
    task_reader: TaskReader = TaskReader()
    """Source of tasks."""
    task_judge: TaskJudge = TaskJudge()
    """Judge that scores episodes."""
    trainer_common: TrainerCommon = TrainerCommon()
    """Training settings, identical for all backbones."""
    debug: DebugSection = DebugSection()
    """The `debug` backbone."""


@functools.lru_cache(maxsize=32)
def with_packages(manager: PluginManager) -> type[AstunerSection]:
    """Return ``AstunerSection`` extended by the keys that plugins add (``register_config_keys``).

    :raises astuner.contracts.errors.PluginError: A plugin's section class cannot be imported.
    """
    added: dict[str, list[type[Section]]] = {}
    for _, name, provider in manager.offers("config key"):
        added.setdefault(name.rpartition(".")[0], []).append(registry.import_target(provider.target))
    found: type[AstunerSection] = _composed(AstunerSection, "", added, tuple(sorted(manager.disabled)))
    return found


def _composed(
    model: type[BaseModel], at: str, added: Mapping[str, list[type[Section]]], off: tuple[str, ...]
) -> type[Any]:
    """Return the section class ``model`` extended by the classes in ``added`` for it and its subsections.

    The new class does not belong to a module, so its instances are pickled as calls of `_again`.

    :param at: Key of the section, without ``astuner.``; empty for ``astuner`` itself.
    :param off: Names of disabled plugins.
    """
    fields: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        below, section = f"{at}.{name}".lstrip("."), section_of(info)
        if section is not None and any(f"{key}.".startswith(f"{below}.") for key in added):
            inner = _composed(section, below, added, off)
            fields[name] = (inner, FieldInfo(default=inner(), description=info.description))
    made = create_model(model.__name__, __base__=(*added.get(at, ()), model), __module__=model.__module__, **fields)
    made.__doc__ = model.__doc__

    def reduce(self: BaseModel) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]:
        return _again, (at, off), self.__getstate__()

    made.__reduce__ = reduce  # type: ignore[method-assign, assignment]
    return made


def _again(at: str, off: Iterable[str]) -> BaseModel:
    """Return an instance without values; unpickling sets them."""
    model: type[BaseModel] = with_packages(load_plugins(off))
    for name in filter(None, at.split(".")):
        model = section_of(model.model_fields[name]) or model
    return model.__new__(model)


if not TYPE_CHECKING:
    __getattr__ = astuner.older_names(__name__)
