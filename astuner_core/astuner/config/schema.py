"""The ``astuner:`` section of an experiment file: every key, its type, its range, its default, and a sentence.

A plugin's own section is not here: its provider brings the schema (``task_reader.<name>``, ``task_judge.<name>``
and ``rollout.<workflow name>``; for a backbone the root key of its name).  Keys that a package adds to those here come
by ``register_config_keys``, and `with_packages` has them all.  Rules over
several keys are in `astuner.config.capabilities`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, StringConstraints, create_model
from pydantic.fields import FieldInfo

import astuner
from astuner.config.checking import section_of
from astuner.contracts.section import OpenSection as OpenSection  # plugins of before take them from here
from astuner.contracts.section import Section as Section
from astuner.contracts.types import LARGEST_REWARD
from astuner.plugins import registry
from astuner.plugins.loader import PluginManager, load_plugins

MOST = 10**9
"""What is counted, waited for or multiplied into a loss ends here, for engines keep it in 32 bits."""
AT_ONCE = 100_000
"""What is in memory at once ends here: groups of a step, episodes of a group, adapters' ranks, GPUs."""
Every = Annotated[int, BeforeValidator(lambda n: MOST if n in (-1, "never") else n), Field(ge=1, le=MOST)]
"""Steps from one to the next; -1 (VERL's word for it) or ``never``: at the end alone."""
Share = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class LoraSection(Section):
    rank: int = Field(0, ge=0, le=AT_ONCE)
    """Rank of the adapters; 0 trains all weights."""
    alpha: float = Field(32.0, gt=0, le=MOST)
    """Adapters are scaled by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on the adapters' input; anything but 0 makes rollout and trainer disagree, so leave it."""
    target_modules: str | list[str] = "all-linear"
    """Which linear layers get adapters: names, or `all-linear`."""


class ModelSection(Section):
    path: Text
    """A Hugging Face name, a local folder, or a name that a plugin locates (`tiny-calculator`, the demo's own)."""
    revision: str | None = None
    """Branch, tag or commit of a Hugging Face name."""
    trust_remote_code: bool = False
    """Run Python files of the model (`auto_map`). Read them first: they run as you. False refuses such a model."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights and activations; `auto` is bfloat16 on a GPU and where a CPU is faster with it, else float32."""
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """`auto`, `cpu`, `cuda` or `cuda:N`; `auto` takes a GPU when there is one."""
    chat_template: str | None = None
    """A Jinja file that replaces the tokenizer's own chat template; `hermes` is ChatML with tools."""
    chat_template_kwargs: dict[str, Any] = Field({})
    """Variables for the chat template, e.g. `{enable_thinking: false}`; one that it does not know is refused."""
    lora: LoraSection = LoraSection()
    """Low-rank adapters instead of all weights."""


class Policy(Section):
    """What a policy of its own differs in from `astuner.model`."""

    path: Text | None = None
    """Another model to start from; None starts from `astuner.model.path`."""
    lora: LoraSection | None = None
    """Other adapters; None takes `astuner.model.lora`."""


class AgentSection(Section):
    """One agent, or one role that several agents have."""

    policy: Text = "default"
    """The policy that speaks for it; agents with the same policy share its weights."""
    train: bool = True
    """Whether what it says is trained; false: it speaks with the policy as it is, and enters no sample."""
    model: Literal["policy", "external"] = "policy"
    """`external`: a model outside of the run speaks for it, and is never trained."""
    name: str | None = None
    """The external model's name on its server."""
    base_url: str | None = None
    """The external server, e.g. `https://api.openai.com/v1` (chat completions)."""
    api_key_env: str | None = None
    """The environment variable that holds its key; none is sent if this is null."""
    temperature: float | None = Field(None, ge=0, le=100)
    """The external model's temperature; null leaves it to the server."""
    timeout: float = Field(120.0, gt=0, le=MOST)
    """Seconds one answer of the external model may take."""


class EndpointSection(Section):
    host: str = "127.0.0.1"
    """Where the OpenAI- and Anthropic-style endpoint listens; anything but loopback needs `token_env`."""
    port: int = Field(0, ge=0, le=65535)
    """Its port; 0 takes a free one."""
    token_env: str | None = None
    """The environment variable with a token (16 characters or more) that is made part of every key."""
    reconnect_timeout: float = Field(10.0, ge=0, le=MOST)
    """Seconds a generation goes on after its client went away, in case it comes back for it; then it is cancelled."""
    sampling: Literal["run", "request"] = "run"
    """Whose temperature, top_p, seed … hold for agents that train; `request`: its own, which training refuses."""


class Data(Section):
    train_batch_size: int = Field(8, ge=1, le=AT_ONCE)
    """Tasks per step; each becomes a group of `rollout.num_repeat` episodes."""
    max_prompt_length: int | None = Field(None, ge=1, le=MOST)
    """Longest first prompt in tokens; a longer task is refused with its id. None: whatever fits the context."""
    max_response_length: int | None = Field(None, ge=1, le=MOST)
    """Most tokens an episode may add after its first prompt (tool results included). None: the context decides."""
    shuffle: bool = True
    """Shuffle the training tasks anew in every epoch (seeded)."""
    on_bad_line: Literal["stop", "skip"] = "stop"
    """What a task that cannot be read does: stop the run, or be skipped and counted."""
    max_validation_tasks: int | None = Field(None, ge=1, le=MOST)
    """Validate on the first N validation tasks only; None takes all."""


class ValKwargs(Section):
    temperature: float = Field(0.0, ge=0, le=100)
    """Sampling temperature while validating; 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling while validating."""
    top_k: int = Field(-1, ge=-1, le=MOST)
    """Top-k sampling while validating; -1 is off."""
    num_repeat: int = Field(1, ge=1, le=AT_ONCE)
    """Episodes per validation task; needs a temperature above 0 to say anything."""


class MultiTurn(Section):
    max_sample_per_task: int = Field(30, ge=1, le=AT_ONCE)
    """Most samples of an episode: each agent's longest path first, then those that add most; the rest is counted."""
    max_steps: int | None = Field(None, ge=1, le=MOST)
    """Most model calls of one agent in an episode; the next one ends it as truncated (see `truncated_reward`)."""
    expected_steps: int = Field(1, ge=1)
    """How many samples an episode usually gives; every backbone counts them itself, so only 1 is taken."""


Reward = Annotated[float, Field(ge=-LARGEST_REWARD, le=LARGEST_REWARD)]


class Rollout(OpenSection):
    workflow: str = ""
    """The workflow: a registered name, `module->Class` or `path/to/file.py->Class`."""
    temperature: float = Field(1.0, ge=0, le=100)
    """Sampling temperature while training; log-probabilities are of this distribution."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling while training; below 1 the trainer cannot reproduce the log-probabilities exactly."""
    top_k: int = Field(-1, ge=-1, le=MOST)
    """Top-k sampling while training; -1 is off, anything else as for `top_p`."""
    val_kwargs: ValKwargs = ValKwargs()
    """Sampling while validating."""
    num_repeat: int = Field(8, ge=1, le=AT_ONCE)
    """Episodes per task: the GRPO group size."""
    max_env_worker: int = Field(64, ge=1, le=AT_ONCE)
    """Episodes that run at once."""
    max_num_seqs: int | None = Field(None, ge=1, le=AT_ONCE)
    """Sequences the engine decodes at once; None lets the engine choose."""
    tensor_model_parallel_size: int = Field(1, ge=1, le=AT_ONCE)
    """GPUs that share one rollout engine."""
    name: str | None = None
    """The rollout engine, where the backbone offers several."""
    max_model_len: int | None = Field(None, ge=8, le=MOST)
    """Context of the model in tokens, prompt and responses together; None takes the model's own."""
    max_response_length_in_one_turn: int = Field(1024, ge=1, le=MOST)
    """Most tokens of one model call."""
    multi_turn: MultiTurn = MultiTurn()
    """Limits over the turns of an episode."""
    episode_timeout: float = Field(600.0, gt=0, le=MOST)
    """Seconds an episode may take; then it is cancelled, counted, and not scored."""
    max_retries: int = Field(2, ge=0, le=MOST)
    """How often an episode starts over after the engine or environment failed, and a failed judge is asked again."""
    oversample: float = Field(1.0, ge=1, le=AT_ONCE)
    """Draw this many times `train_batch_size` groups, train on the first to finish, cancel the stragglers."""
    min_group_size: int = Field(2, ge=1, le=AT_ONCE)
    """A group with fewer scored episodes is dropped and counted; at most `num_repeat`, and 1 if that is 1."""
    max_failed_share: float = Field(0.5, gt=0, le=1)
    """A step or validation in which more than this share of the episodes fails stops the run: something is broken."""
    compute_madness_checklist: list[str] = Field(["nonsense"])
    """Checks on the model's output: registered names, plugin/name or module->function; an empty list for none."""
    agent_madness_termination: bool = True
    """Whether a check that fires ends the episode at once."""
    agent_madness_reward: Reward = 0.0
    """The reward of an episode in which a check fired."""
    truncated_reward: Reward | Literal["judge", "drop"] = "judge"
    """What an episode is worth that a limit on calls, tokens or context ended: what the workflow or judge gives to what
    there is, and 0 where there is neither (`judge`); always this number; or nothing, and it is left out of its group in
    training (`drop`)."""
    disable_tool_calls: bool = False
    """Offer the model no tools, and parse none from its answers."""
    merge_level: Literal["exact", "text"] = "exact"
    """What continues a turn: a request that says the same (`exact`), or one whose texts are alike (`text`, counted)."""


TOKEN_VARIABLE = "ASTUNER_ENV_TOKEN"
"""Where an environment service finds its token, and the run too unless it is told otherwise."""


class EnvService(Section):
    url: str = ""
    """Where the environment service listens; empty: in the variable `ASTUNER_ENV_URL`, which `--with NAME` sets."""
    token_env: str = TOKEN_VARIABLE
    """The environment variable that holds its token; nothing is sent while that is not set."""
    timeout: float = Field(300.0, gt=0, le=MOST)
    """Seconds one request may take, or an environment in this process to start."""
    busy_timeout: float = Field(600.0, ge=0, le=MOST)
    """Seconds to wait for room in a service that is full."""
    params: dict[str, Any] = Field({})
    """What every instance and its list of tasks are made with; the environment says what it knows."""


class Services(OpenSection):
    """Services that ``--with NAME`` starts: one sub-section for each that takes options."""


class TaskReader(OpenSection):
    type: str = ""
    """The task reader: a registered name, `module->Class` or `path/to/file.py->Class`."""


class TaskJudge(OpenSection):
    judge: str | None = None
    """The judge: a registered name, `module->Class` or `path/to/file.py->Class`; none if the workflow sets rewards."""
    judge_timeout: float = Field(60.0, gt=0, le=MOST)
    """Seconds one verdict may take; then the episode counts as a judge failure. How long the judge's questions queue
    for a helper model's `rpm`, `tpm` or `concurrency` is not counted."""


class AlgorithmSection(Section):
    adv_estimator: str = "grpo"
    """How rewards become advantages: `grpo`, `dr_grpo`, `rloo`, `reinforce_plus_plus`, `none`, or one of your own."""
    loss: str = "grpo"
    """The policy loss: `grpo`, `dr_grpo`, `dapo`, `gspo`, `cispo`, `rloo`, `reinforce_plus_plus`, or one of your own
    (`losses.py->mine`). A name that implies an estimator, clipping or aggregation sets those not written."""
    clip_ratio_low: float = Field(0.2, ge=0, le=MOST)
    """The importance ratio is clipped below at 1 - this."""
    clip_ratio_high: float = Field(0.2, ge=0, le=MOST)
    """The importance ratio is clipped above at 1 + this (0.28 is DAPO's clip-higher)."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "seq-mean-token-mean"
    )
    """How token losses are added up; "seq" is the episode, so one that forks weighs no more."""
    adv_compare: Literal["role", "agent"] = "role"
    """Whose rewards an agent's is compared with in its group: of the agents of its role, or of its own name."""
    norm_adv_by_std: bool = True
    """Divide advantages by the group's standard deviation (GRPO); Dr. GRPO does not."""
    filter_zero_advantage: bool = True
    """Leave out samples whose advantage is 0: without a KL or entropy term they carry no gradient."""
    dynamic_sampling: bool = False
    """DAPO: draw groups until `train_batch_size` of them have different rewards (at most `max_draws` batches)."""
    max_draws: int = Field(4, ge=1, le=AT_ONCE)
    """Dynamic sampling gives up after this many batches of draws in a step."""
    use_kl_in_reward: bool = False
    """Subtract KL to the reference model from the reward (needs `kl_loss_coef`)."""
    rollout_is: Literal["auto", "none", "token-truncate", "token-mask", "sequence-truncate", "sequence-mask"] = "auto"
    """Importance-ratio correction (Yao et al. 2025); `auto`: token-truncate where VERL or Trinity round to 16 bits."""
    rollout_is_threshold: float = Field(2.0, gt=0, le=MOST)
    """Where that ratio is truncated, or beyond which tokens or sequences are masked."""


class Optim(Section):
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon` orthogonalises the update of 2-D hidden weights (AdamW for the rest); better for tiny models."""
    lr: float = Field(1e-6, ge=0, le=1)
    """Peak learning rate."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """AdamW's moment decays."""
    weight_decay: float = Field(0.0, ge=0, le=1)
    """Decoupled weight decay."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Muon's momentum."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; `linear` and `cosine` end at `min_lr_ratio`."""
    lr_warmup_steps: int = Field(0, ge=0, le=MOST)
    """Optimizer steps over which the rate rises linearly from 0."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """The schedule's end, as a share of `lr`."""
    grad_clip: float = Field(1.0, gt=0, le=MOST)
    """Gradients are scaled down to this global norm."""


class FsdpConfig(Section):
    param_offload: bool = False
    """Keep parameters in CPU memory between steps (verl)."""
    optimizer_offload: bool = False
    """Keep optimizer state in CPU memory between steps (verl)."""


class TrainerCommon(Section):
    total_epochs: int = Field(1, ge=1, le=MOST)
    """Passes over the training tasks."""
    total_steps: int | None = Field(None, ge=1, le=MOST)
    """Steps of the run, over as many epochs as that takes; with `total_epochs` written too, the smaller of the two."""
    save_freq: Every = 50
    """Checkpoint every n steps, or `never`; the last step is always saved."""
    resume_freq: int = Field(1, ge=1, le=MOST)
    """Every n steps, replace the state that `--resume` continues from; raise it where saving is slow."""
    save_episodes: int = Field(16, ge=-1, le=MOST)
    """Episodes per step written out in readable form; -1 writes all."""
    save_tokens: bool = True
    """Write every episode with its tokens and logprobs, compactly: the episode log, which `astuner export` reads."""
    max_checkpoints: int | None = Field(3, ge=1, le=MOST)
    """Keep the newest n checkpoints, and the one that did best in its validation; None keeps all."""
    test_freq: Every = 50
    """Validate every n steps, or `never`; after the last step always."""
    val_before_train: bool = True
    """Validate before the first step too, so that there is a before and an after."""
    val_pass_n: int = Field(1, ge=1, le=AT_ONCE)
    """Episodes per validation task (pass@n); same as `rollout.val_kwargs.num_repeat`."""
    watts: float | None = Field(None, gt=0)
    """What the machine draws while it trains, for the report's energy where the machine does not count it itself."""
    logger: str | list[str] = Field(["console", "jsonl"])
    """Log sinks, by name; the run folder's own files are always written."""
    algorithm: AlgorithmSection = AlgorithmSection()
    """Advantages and loss."""
    mini_batch_num: int = Field(1, ge=1, le=AT_ONCE)
    """Optimizer steps per batch of episodes."""
    ppo_epochs: int = Field(1, ge=1, le=AT_ONCE)
    """Passes over a batch of episodes."""
    micro_batch_tokens: int | None = Field(None, ge=1, le=MOST)
    """Tokens per forward and backward pass (gradient accumulation); None: what fits a quarter of the free memory."""
    optim: Optim = Optim()
    """Optimizer and schedule."""
    use_kl_loss: bool = False
    """Add KL to the reference model (the starting weights) to the loss."""
    kl_loss_coef: float = Field(0.001, ge=0, le=MOST)
    """Its weight, in the loss or (use_kl_in_reward) in the reward."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k3"
    """The estimator (Schulman 2020): k1 = log ratio, k2 = half its square, k3 = `low_var_kl`, unbiased and positive."""
    entropy_coeff: float = Field(0.0, ge=-MOST, le=MOST)
    """Weight of the entropy bonus."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    nnodes: int = Field(1, ge=1, le=AT_ONCE)
    """Machines."""
    n_gpus_per_node: int | None = Field(None, ge=0, le=AT_ONCE)
    """GPUs per machine; None takes what there is."""
    ulysses_sequence_parallel_size: int = Field(1, ge=1, le=AT_ONCE)
    """GPUs that share one sequence (verl, Trinity)."""
    fsdp_config: FsdpConfig = FsdpConfig()
    """Where parameters and optimizer state live (verl, Trinity)."""


class DebugSection(Section):
    debug_max_parallel: int = Field(1, ge=1, le=AT_ONCE)
    """Episodes at once; 1 keeps breakpoints readable."""
    debug_first_n_tasks: int = Field(2, ge=1, le=MOST)
    """How many training tasks to try, one episode each."""
    engine: Literal["local", "openai", "vllm"] = "local"
    """Where tokens come from: the local engine, a running OpenAI-compatible server, or a vLLM started here."""
    base_url: str = "http://127.0.0.1:8000/v1"
    """The running server, for `engine: openai`."""
    api_key_env: str = "OPENAI_API_KEY"
    """The environment variable that holds the server's key."""
    debug_vllm_port: int = Field(18000, ge=1, le=65535)
    """Port of the vLLM started here (on loopback)."""
    debug_vllm_seed: int = Field(12345, ge=0, le=2**32 - 1)
    """Its seed."""
    debug_tensor_parallel_size: int = Field(1, ge=1, le=AT_ONCE)
    """Its tensor parallelism."""
    startup_timeout: float = Field(1800.0, gt=0, le=MOST)
    """Seconds it may take to answer."""


class AstunerSection(Section):
    project_name: str = "astuner"
    """Groups experiments in trackers."""
    experiment_name: str = "read_yaml_name"
    """Names the run folder; `read_yaml_name` takes the file's name."""
    experiment_dir: str = "launcher_record"
    """Run folders are made below this folder."""
    backbone: str = "debug"
    """What runs it; `--backbone` wins."""
    seed: int = Field(0, ge=0, le=2**32 - 1)
    """Seeds shuffling, sampling and initial adapters."""
    model: ModelSection
    """The model inside the agent."""
    agents: dict[str, AgentSection] = Field({})
    """Agents or roles by name: which policy speaks for them, and whether it trains. Empty: all are one and train."""
    policies: dict[str, Policy] = Field({})
    """Policies by name, where they differ in more than the name; each that an agent names exists anyway."""
    endpoint: EndpointSection = EndpointSection()
    """The HTTP endpoint for agents in other frameworks, languages or processes."""
    env_service: EnvService = EnvService()
    """The worlds that agents act in: where they run, and how."""
    services: Services = Services()
    """Options of the services that `--with NAME` starts beside the run, by the service's name."""
    data: Data = Data()
    """Batches and lengths."""
    rollout: Rollout = Rollout()
    """How episodes run."""
    task_reader: TaskReader = TaskReader()
    """Where tasks come from."""
    task_judge: TaskJudge = TaskJudge()
    """How good an episode was."""
    trainer_common: TrainerCommon = TrainerCommon()
    """Training, the same words for every backbone."""
    debug: DebugSection = DebugSection()
    """The `debug` backbone."""


@functools.lru_cache(maxsize=32)
def with_packages(manager: PluginManager) -> type[AstunerSection]:
    """``AstunerSection`` with the keys that plugins add (``register_config_keys``).

    :raises astuner.contracts.errors.PluginError: what one of them adds cannot be imported.
    """
    added: dict[str, list[type[Section]]] = {}
    for _, name, provider in manager.offers("config key"):
        added.setdefault(name.rpartition(".")[0], []).append(registry.import_target(provider.target))
    found: type[AstunerSection] = _composed(AstunerSection, "", added, tuple(sorted(manager.disabled)))
    return found


def _composed(
    model: type[BaseModel], at: str, added: Mapping[str, list[type[Section]]], off: tuple[str, ...]
) -> type[Any]:
    """``model``, which is the section ``at`` (empty: ``astuner`` itself), with what is added to it and below it.

    Such a class is in no module, so an instance of it goes to another process as what `_again` makes.
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
    """An instance without values, which unpickling sets."""
    model: type[BaseModel] = with_packages(load_plugins(off))
    for name in filter(None, at.split(".")):
        model = section_of(model.model_fields[name]) or model
    return model.__new__(model)


if not TYPE_CHECKING:
    __getattr__ = astuner.older_names(__name__)
