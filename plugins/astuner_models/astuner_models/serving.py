"""A model of an experiment that answers: what `astuner eval` and `astuner chat` do, as Python functions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astuner import (
    AgentRegistry,
    ChatCodec,
    Config,
    EpisodeRunner,
    EpisodesHere,
    Group,
    Models,
    PolicyModel,
    RolloutPool,
    RunDir,
    evaluate_groups,
    find_backbone,
    load_config,
    read_tasks,
    run_services,
    sampling_for,
)
from astuner.contracts.backbone import Backbone, Served
from astuner.contracts.errors import CheckpointError, ConfigError, MissingDependency
from astuner.contracts.types import DEFAULT_POLICY, Episode, Split, Task
from astuner_models.hub import Downloads, is_folder_name, require_model
from astuner_models.pretrained import load_pretrained
from astuner_models.promoted import PROMOTED, served_checkpoint

if TYPE_CHECKING:
    from astuner.rollout.metrics import Evaluation

TEMPLATES = {file.stem: file for file in Path(__file__).with_name("templates").glob("*.jinja")}
"""Chat templates that come with this package, by the name that ``astuner.model.chat_template`` may have."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The models of an experiment, loaded and answering."""

    config: Config
    served: Mapping[str, Served]
    """By policy."""
    models: Models
    """The same, as episodes need them."""

    def policy(self, name: str | None = None) -> tuple[Served, ChatCodec]:
        """One policy's model; the first one's by default.

        :raises ConfigError: there is no such policy.
        """
        chosen = name or next(iter(self.served))
        if chosen not in self.served:
            raise ConfigError(f"no policy is called {chosen!r}; there are {', '.join(self.served)}")
        return self.served[chosen], self.models[chosen].codec


@contextlib.contextmanager
def serve(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    backbone: str | None = None,
    checkpoint: str = "best",
    services: Sequence[str] = (),
    disabled_plugins: Sequence[str] = (),
) -> Iterator[Serving]:
    """Load the models of the experiment in ``path`` and answer until the block ends.

    :param checkpoint: ``best`` (validated) or ``latest`` of the run, ``base`` (the configured models), or a folder.
    :param services: what runs beside it, as for `astuner.run`.
    :raises CheckpointError: there is no such checkpoint.
    """
    config = load_config(path, overrides, backbone=backbone, disabled_plugins=disabled_plugins)
    folder = find_checkpoint(config, checkpoint)
    serving, _ = find_backbone(config)
    if folder is None:
        Downloads().require(config, serving.capabilities)
    with run_services(config, services), serve_policies(serving, config, folder) as (served, models):
        yield Serving(config=config, served=served, models=models)


@contextlib.contextmanager
def serve_policies(
    backbone: Backbone, config: Config, checkpoint: Path | None = None
) -> Iterator[tuple[Mapping[str, Served], Models]]:
    """Load every policy's model; policies that start from the same one share it.

    :param checkpoint: a checkpoint folder; None: the configured models.
    :raises CheckpointError: the checkpoint lacks the model of a policy that trains.
    """
    roster = AgentRegistry.of(config.astuner)
    with contextlib.ExitStack() as stack:
        loaded: dict[str, tuple[Served, PolicyModel]] = {}
        served: dict[str, Served] = {}
        models: dict[str, PolicyModel] = {}
        for policy in roster.policies:
            folder = policy_folder(checkpoint, policy) if checkpoint else None
            if checkpoint and not folder and policy in roster.trained_policies:
                raise CheckpointError(f"{checkpoint} holds no model of the policy {policy!r}, which trains")
            path = str(folder) if folder else config.locate_model(policy=policy)
            template = config.astuner.model.chat_template
            if template is not None and config.model_of(policy).path != config.astuner.model.path:
                raise ConfigError(
                    f"astuner.model.chat_template: {template} would replace the template of the policy {policy!r} too, "
                    f"whose model is another one ({config.model_of(policy).path}); save its tokenizer with the template"
                )
            if path not in loaded:
                one = stack.enter_context(backbone.serve(path))
                loaded[path] = one, PolicyModel(one.engine, make_codec(config, one.tokenizer))
            served[policy], models[policy] = loaded[path]
        yield served, models


def policy_folder(checkpoint: Path, policy: str) -> Path | None:
    """Where a checkpoint keeps one policy's model: a folder of its name, or the checkpoint itself if it has but one.

    None: it holds none, since a policy that nobody trains is not saved.
    """
    own = checkpoint / policy
    if (own / "config.json").is_file():
        return own
    return checkpoint if (checkpoint / "config.json").is_file() else None


def evaluate(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    backbone: str | None = None,
    checkpoint: str = "best",
    tasks: int | None = None,
    repeat: int | None = None,
    services: Sequence[str] = (),
    disabled_plugins: Sequence[str] = (),
) -> Evaluation:
    """Success of a checkpoint on the validation tasks, with a 95 % interval.

    :param tasks: only the first so many.
    :param repeat: episodes per task; `rollout.val_kwargs.num_repeat` by default.
    :raises RunError: no episode could be scored, or more failed than `rollout.max_failed_share` allows.
    """
    with serve(
        path,
        overrides,
        backbone=backbone,
        checkpoint=checkpoint,
        services=services,
        disabled_plugins=disabled_plugins,
    ) as serving:
        config = serving.config
        held_out = read_tasks(config).validation[:tasks]
        if not held_out:
            raise ConfigError(
                f"{config.path}: the task reader yields no validation tasks, so there is nothing to evaluate on"
            )
        n = repeat or config.astuner.rollout.val_kwargs.num_repeat
        groups = validate(config, serving.models, held_out, repeat=n)
        return evaluate_groups(groups, repeat=n, max_failed_share=config.astuner.rollout.max_failed_share)


def validate(
    config: Config,
    models: Models,
    tasks: Sequence[Task],
    *,
    repeat: int,
    on_episode: Callable[[Episode], None] | None = None,
) -> list[Group]:
    """``repeat`` episodes of every task, as in a validation: a group for each, in their order."""
    runner = EpisodeRunner(config)
    runner.prepare()
    run_episode = partial(EpisodesHere(runner, models).run, sampling=sampling_for(config, Split.VALIDATION))
    workers = config.astuner.rollout.max_env_worker
    pool = RolloutPool(run_episode, max_parallel=workers, on_episode=on_episode, judge_group=runner.judge_group)
    draws = [(f"v{i:05d}", task) for i, task in enumerate(tasks)]

    async def run_all() -> list[Group]:
        try:
            return await pool.run_groups(draws, repeat=repeat, split=Split.VALIDATION)
        finally:
            await runner.close()

    return asyncio.run(run_all())


def load_tokenizer(model: str, revision: str | None = None, *, trust_remote_code: bool = False) -> Any:
    """A model's tokenizer, with its chat template.

    :param model: a folder, or a name on the hub.
    :param trust_remote_code: whether Python files of the model may run; see `load_pretrained`.
    :raises ConfigError: the tokenizer needs such files, and they may not run.
    :raises MissingDependency: transformers is not installed.
    """
    require_model(model)
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise MissingDependency(
            "a model's tokenizer is read with transformers, which is not installed: pip install transformers"
        ) from None
    options: dict[str, Any] = {} if revision is None else {"revision": revision}
    return load_pretrained(AutoTokenizer, model, trust_remote_code=trust_remote_code, **options)


def chat_template(config: Config) -> str | None:
    """The Jinja text that ``astuner.model.chat_template`` stands for; None where it is not written.

    :raises ConfigError: it is no file that can be read, and no template of `TEMPLATES`.
    """
    written = config.astuner.model.chat_template
    return None if written is None else read_template(written, config.base_dir)


def read_template(written: str, base_dir: Path) -> str:
    """The Jinja text of a file (from ``base_dir``) or of the template of that name; raises as `chat_template`."""
    file = TEMPLATES[written] if written in TEMPLATES else base_dir / written
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(
            f"astuner.model.chat_template: cannot read {file}: {e}; name a Jinja file, or one of {', '.join(TEMPLATES)}"
        ) from None


def make_codec(config: Config, tokenizer: Any) -> ChatCodec:
    """The chat codec of an experiment: the tokenizer's template unless the config names another.

    That template becomes the tokenizer's own, so that a checkpoint saved with it speaks as it was trained.
    """
    template = chat_template(config)
    if template is not None:
        tokenizer.chat_template = template
    rollout = config.astuner.rollout
    try:
        return ChatCodec(
            tokenizer,
            disable_tool_calls=rollout.disable_tool_calls,
            chat_template_kwargs=config.astuner.model.chat_template_kwargs,
            merge_level=rollout.merge_level,
            end_token_ids=end_token_ids(tokenizer, config.astuner.model.revision),
            plugins=config.plugins,
        )
    except ConfigError as e:
        if template is None:
            raise
        named = config.astuner.model.chat_template
        raise ConfigError(f"astuner.model.chat_template: {named} with this model's tokenizer: {e}") from e


def end_token_ids(tokenizer: Any, revision: str | None = None) -> tuple[int, ...]:
    """Return the end tokens that the generation config of the tokenizer's model lists.

    They often are more than the tokenizer's own (``eos_token_id: [151645, 151643]``), and engines end a reply at each
    of them. Without a ``generation_config.json``, ``config.json`` lists them, as in transformers and vLLM.

    :param tokenizer: A Hugging Face tokenizer; its ``name_or_path`` is the model's folder or its name on the hub.
    :raises ConfigError: ``generation_config.json`` is not valid.
    """
    from transformers import AutoConfig, GenerationConfig

    source = str(tokenizer.name_or_path or "")
    folder = Path(source)
    file = folder / "generation_config.json"
    if not source or (is_folder_name(source) and not (folder / "config.json").is_file()):
        return ()
    options: dict[str, Any] = {} if revision is None or folder.is_dir() else {"revision": revision}
    try:
        described: Any = load_pretrained(GenerationConfig, source, **options)
    except (OSError, ValueError, TypeError) as e:
        if file.exists():
            raise ConfigError(f"{file} cannot be read: {e}. Correct it, or copy the original model's file") from e
        try:
            described = load_pretrained(AutoConfig, source, **options)
        except (OSError, ValueError, ConfigError):  # what loads the model reports it
            return ()
    listed = described.eos_token_id
    ids = listed if isinstance(listed, (list, tuple)) else [listed]
    return tuple(i for i in ids if isinstance(i, int) and 0 <= i < len(tokenizer))


def policy_tokenizer(config: Config, policy: str = DEFAULT_POLICY) -> Any:
    """Return the tokenizer of a policy's model before training; raises as `load_tokenizer`."""
    model = config.model_of(policy)
    return load_tokenizer(config.locate_model(policy=policy), model.revision, trust_remote_code=model.trust_remote_code)


def find_checkpoint(config: Config, checkpoint: str) -> Path | None:
    """The model folder that ``best``, ``latest``, ``promoted``, ``base``, a path, or a checkpoint's name means.

    Where no kept checkpoint was validated, the best is the newest.

    None is the configured model.

    :raises CheckpointError: there is none, or the folder holds no model.
    """
    if checkpoint == "base":
        return None
    if checkpoint == PROMOTED:
        return served_checkpoint(config.run_dir)
    run_dir = RunDir(config.run_dir)
    if checkpoint in ("best", "latest"):
        if not run_dir.models:
            raise CheckpointError(
                f"there is no checkpoint in {run_dir.checkpoints}; train first, write --checkpoint base for the model "
                "before training, or --run-dir DIR if the run is elsewhere"
            )
        return (run_dir.best if checkpoint == "best" else None) or run_dir.models[-1]
    folder = next((model for model in run_dir.models if model.name == checkpoint), Path(checkpoint))
    if not (folder / "config.json").is_file() and not any(folder.glob("*/config.json")):
        known = ", ".join(model.name for model in run_dir.models) or "there is none yet"
        raise CheckpointError(
            f"{folder} is not a model folder (no config.json); write best, latest, promoted, base, a folder, or one of "
            f"the checkpoints in {run_dir.checkpoints}: {known}"
        )
    return folder
