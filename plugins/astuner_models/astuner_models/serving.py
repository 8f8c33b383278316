"""Load and evaluate the models of an experiment: the Python functions of `astuner chat` and `astuner eval`."""

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
"""Chat templates of this package, by their name in ``astuner.model.chat_template``."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The loaded models of an experiment."""

    config: Config
    served: Mapping[str, Served]
    """Served models by policy."""
    models: Models
    """The same models in the form that episodes use."""

    def policy(self, name: str | None = None) -> tuple[Served, ChatCodec]:
        """Return the model of one policy; the first policy by default.

        :raises ConfigError: There is no such policy.
        """
        chosen = name or next(iter(self.served))
        if chosen not in self.served:
            raise ConfigError(f"no policy is called {chosen!r}; the policies are {', '.join(self.served)}")
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
    """Load and serve the models of the experiment in ``path`` until the block ends.

    :param checkpoint: ``best`` (validated) or ``latest`` of the run, ``base`` (the configured models), or a folder.
    :param services: Services to run, as for `astuner.run`.
    :raises CheckpointError: There is no such checkpoint.
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
    """Load the model of every policy. Policies with the same model share it.

    :param checkpoint: Checkpoint folder; None for the configured models.
    :raises CheckpointError: The checkpoint lacks the model of a trained policy.
    """
    roster = AgentRegistry.of(config.astuner)
    with contextlib.ExitStack() as stack:
        loaded: dict[str, tuple[Served, PolicyModel]] = {}
        served: dict[str, Served] = {}
        models: dict[str, PolicyModel] = {}
        for policy in roster.policies:
            folder = policy_folder(checkpoint, policy) if checkpoint else None
            if checkpoint and not folder and policy in roster.trained_policies:
                raise CheckpointError(f"{checkpoint} lacks the model of the trained policy {policy!r}")
            path = str(folder) if folder else config.locate_model(policy=policy)
            template = config.astuner.model.chat_template
            if template is not None and config.model_of(policy).path != config.astuner.model.path:
                raise ConfigError(
                    f"astuner.model.chat_template: {template} also replaces the template of the policy {policy!r}, "
                    f"which has another model ({config.model_of(policy).path}). Save the template with its tokenizer"
                )
            if path not in loaded:
                one = stack.enter_context(backbone.serve(path))
                loaded[path] = one, PolicyModel(one.engine, make_codec(config, one.tokenizer))
            served[policy], models[policy] = loaded[path]
        yield served, models


def policy_folder(checkpoint: Path, policy: str) -> Path | None:
    """Return the folder of a policy's model in a checkpoint: a subfolder, or the checkpoint of a single policy.

    Return None if the checkpoint lacks it, because policies that are not trained are not saved.
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
    """Return the success of a checkpoint on the validation tasks, with a 95 % interval.

    :param tasks: Use only the first tasks, up to this number.
    :param repeat: Episodes per task; `rollout.val_kwargs.num_repeat` by default.
    :raises RunError: No episode could be scored, or more failed than `rollout.max_failed_share` allows.
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
                f"{config.path}: the task reader yields no validation tasks, which are required for an evaluation"
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
    """Run ``repeat`` episodes of every task, as in a validation, and return one group per task, in order."""
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
    """Load a model's tokenizer, with its chat template.

    :param model: Folder, or name on the hub.
    :param trust_remote_code: Whether Python files of the model may run; see `load_pretrained`.
    :raises ConfigError: The tokenizer needs such files, but they may not run.
    :raises MissingDependency: transformers is not installed.
    """
    require_model(model)
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise MissingDependency(
            "loading a tokenizer requires transformers, which is not installed: pip install transformers"
        ) from None
    options: dict[str, Any] = {} if revision is None else {"revision": revision}
    return load_pretrained(AutoTokenizer, model, trust_remote_code=trust_remote_code, **options)


def chat_template(config: Config) -> str | None:
    """Return the Jinja text of ``astuner.model.chat_template``; None if it is not set.

    :raises ConfigError: It is neither a readable file nor a name in `TEMPLATES`.
    """
    written = config.astuner.model.chat_template
    return None if written is None else read_template(written, config.base_dir)


def read_template(written: str, base_dir: Path) -> str:
    """Return the Jinja text of a file (relative to ``base_dir``) or a named template; raises as `chat_template`."""
    file = TEMPLATES[written] if written in TEMPLATES else base_dir / written
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(
            f"astuner.model.chat_template: cannot read {file}: {e}. Use a Jinja file, or one of {', '.join(TEMPLATES)}"
        ) from None


def make_codec(config: Config, tokenizer: Any) -> ChatCodec:
    """Return the chat codec of an experiment, with the tokenizer's template unless the config sets another.

    A configured template is also set on the tokenizer, so that saved checkpoints keep the template used in training.
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

    They are often more than the tokenizer's (``eos_token_id: [151645, 151643]``), and engines end a reply at each of
    them. Without a ``generation_config.json``, they are read from ``config.json``, as in transformers and vLLM.

    :param tokenizer: Hugging Face tokenizer; its ``name_or_path`` is the model's folder or hub name.
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
    """Return the folder of a checkpoint: ``best``, ``latest``, ``promoted``, ``base``, a path, or a checkpoint's name.

    Without a validated checkpoint, the newest one is the best. None means the configured model.

    :raises CheckpointError: There is no such checkpoint, or the folder has no model.
    """
    if checkpoint == "base":
        return None
    if checkpoint == PROMOTED:
        return served_checkpoint(config.run_dir)
    run_dir = RunDir(config.run_dir)
    if checkpoint in ("best", "latest"):
        if not run_dir.models:
            raise CheckpointError(
                f"no checkpoint in {run_dir.checkpoints}. Train first, use --checkpoint base for the model before "
                "training, or --run-dir DIR if the run is elsewhere"
            )
        return (run_dir.best if checkpoint == "best" else None) or run_dir.models[-1]
    folder = next((model for model in run_dir.models if model.name == checkpoint), Path(checkpoint))
    if not (folder / "config.json").is_file() and not any(folder.glob("*/config.json")):
        known = ", ".join(model.name for model in run_dir.models) or "none"
        raise CheckpointError(
            f"{folder} is not a model folder (no config.json). Use best, latest, promoted, base, a folder, or a "
            f"checkpoint in {run_dir.checkpoints}: {known}"
        )
    return folder
