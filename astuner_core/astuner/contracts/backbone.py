"""Interface of backbones and inference engines.

A backbone owns an engine that generates token IDs and (except `debug`) a trainer that updates weights from samples. The
backbone controls the training loop, because Trinity's explorer and VERL's trainer require that. The core passes it a
`Run`, which provides tasks, runs episodes, assigns credit and records events.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from astuner.contracts.building import BuildContext, Built
from astuner.contracts.errors import ConfigError
from astuner.contracts.types import Generation, SamplingParams

if TYPE_CHECKING:
    from astuner.config import Config
    from astuner.contracts.interrupt import Interrupt
    from astuner.contracts.run import Run
    from astuner.runs.run_dir import RunDir


class InferenceEngine(ABC):
    """Interface to a model: token IDs in, token IDs out."""

    max_model_len: int
    """Maximum tokens of prompt and response together."""

    @abstractmethod
    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, session: str = "") -> Generation:
        """Generate a continuation of ``prompt_ids``.

        Many calls run concurrently. Canceling the awaiting task cancels the generation.

        :param session: Identifier of one agent in one episode, so that engines can reuse its KV cache.
        :raises astuner.contracts.errors.ContextOverflow: The prompt fills the context completely.
        :raises astuner.contracts.errors.ModelFailed: The engine failed, or does not support a sampling parameter.
        """


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Declaration of the ``astuner.*`` keys that a backbone supports.

    Invariant: a key that the user set and that neither the core nor the backbone supports is an error, never ignored.
    """

    trains: bool = True
    """Whether the backbone trains. If not (`debug`), it ignores training keys, with one note."""
    in_process: bool = True
    """Whether agents and judges run in the run's process, so that breakpoints can use its terminal, or in workers."""
    policies: bool = False
    """Whether a run can have several policies, each with its own weights and trainer."""
    honours: frozenset[str] = frozenset()
    """Supported keys, dotted, below ``astuner.``. A section covers all keys below it."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys with restricted values, e.g. ``{"rollout.tensor_model_parallel_size": (1,)}``."""
    instead: Mapping[str, str] = field(default_factory=dict)
    """Rejected keys -> the alternative to use."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """A loaded model that answers requests, as used by `eval`, `chat` and `debug`."""

    engine: InferenceEngine
    tokenizer: Any
    """A Hugging Face tokenizer with a chat template."""
    name: str
    note: str = ""
    """Note for the user about the quality of its answers."""


class Backbone(Built, ABC):
    """Runs episodes with its engine and updates the weights from their samples."""

    capabilities: ClassVar[Capabilities] = Capabilities()

    def __init__(self, config: Config) -> None:
        self.config = config

    @classmethod
    def from_config(cls, section: Any, context: BuildContext) -> Any:
        return cls(context.config)  # the config includes the section: `Config.backbone_section`

    def plan(self) -> Mapping[str, str]:
        """Return lines for ``astuner run --dry-run``: engine, trainer, memory estimate. Loads no weights.

        Raises the errors of `check`.
        """
        return {}

    def check(self) -> None:
        """Check whether the model and this machine support the experiment. Loads no weights.

        `plan` performs the same checks. Override this method if planning takes long.

        :raises astuner.contracts.errors.ConfigError: `train` would reject the experiment before the first episode.
        :raises astuner.contracts.errors.RunError: A required file is missing and cannot be downloaded.
        """
        self.plan()

    def native(self) -> Mapping[str, Any]:
        """Return the engine's own configuration, for ``astuner config show --native``.

        :raises astuner.contracts.errors.ConfigError: The backbone's engine has no separate configuration.
        """
        raise ConfigError(
            f"the backbone {self.config.astuner.backbone!r} has no native configuration; omit --native to print the "
            "settings"
        )

    def saved_states(self, run_dir: RunDir) -> Iterable[tuple[Path, str]]:
        """Return the states a run may resume from, newest first, each with why it is unusable (empty: it is intact)."""
        newest = self.latest_state(run_dir.resume)
        return () if newest is None else [(newest, "")]

    def has_saved_state(self, run_dir: RunDir) -> bool:
        """Return whether a state to resume from exists. May check names only, if checking the files takes long."""
        return any(not problem for _, problem in self.saved_states(run_dir))

    def latest_state(self, folder: Path) -> Path | None:
        """Return the newest complete state in ``folder``, or None. Legacy method; implement `saved_states` instead."""
        return None

    @abstractmethod
    def serve(self, model_path: str | None = None) -> AbstractContextManager[Served]:
        """Load a model and serve it during the block.

        :param model_path: Model to load instead of ``astuner.model.path``.
        """

    @abstractmethod
    def train(self, run: Run) -> None:
        """Train until the run ends.

        :raises astuner.contracts.errors.RunError: The run cannot continue. All finished work is saved.
        """

    @property
    def lends(self) -> bool:
        """Whether this command contributes resources to the run of another command.

        If so, `lend` is called instead of `train`.
        """
        return False

    def lend(self, folder: Path, interrupt: Interrupt, note: Callable[[str], None]) -> str:
        """Contribute resources until the other command's run ends, and return a one-line summary.

        :param folder: Folder for logs. The run folder belongs to the other command and must not be changed.
        :param note: Prints a note for the user.
        :raises astuner.contracts.errors.RunError: The run failed or was stopped, or no run used the resources.
        """
        raise NotImplementedError(
            f"{type(self).__name__}.lends is True, but the method `lend` is missing; implement it"
        )
