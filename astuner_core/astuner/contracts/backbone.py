"""What learns.

A backbone owns an engine that turns token ids into token ids, and (except `debug`) a trainer that turns samples
into better weights.  It drives: Trinity's explorer and VERL's trainer both insist on that.  The core hands it an
`Run`, which knows the tasks, runs episodes, assigns credit, and records what happened.
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
    """The only way to a model: token ids in, token ids out."""

    max_model_len: int
    """Prompt and response together never exceed this many tokens."""

    @abstractmethod
    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, session: str = "") -> Generation:
        """Continue ``prompt_ids``.

        Many calls run at once.  Cancelling the awaiting task cancels the generation.

        :param session: stable for one agent of one episode, so that engines can reuse its KV cache.
        :raises astuner.contracts.errors.ContextOverflow: the prompt leaves no room for a single token.
        :raises astuner.contracts.errors.ModelFailed: the engine failed, or cannot honour a sampling parameter.
        """


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The capability contract: which ``astuner.*`` keys a backbone honours.

    A key the person wrote that neither the core nor the backbone honours is an error naming the key, never a
    silent no-op.
    """

    trains: bool = True
    """False: training keys are not used, which one note says (the `debug` backbone)."""
    in_process: bool = True
    """Whether agents and judges run in the run's own process, where breakpoints have its terminal; else in workers."""
    policies: bool = False
    """Whether several policies can be in one run, each with weights and a trainer of its own."""
    honours: frozenset[str] = frozenset()
    """Dotted keys below ``astuner.`` (a section name covers all keys below it)."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys that are honoured for these values only, e.g. ``{"rollout.tensor_model_parallel_size": (1,)}``."""
    instead: Mapping[str, str] = field(default_factory=dict)
    """For refused keys: what to write or use instead."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model that is loaded and answers: what `eval`, `chat` and `debug` work with."""

    engine: InferenceEngine
    tokenizer: Any
    """A Hugging Face tokenizer with a chat template."""
    name: str
    note: str = ""
    """What a person should know about it before trusting its answers."""


class Backbone(Built, ABC):
    """Runs episodes with its engine and updates the weights from their samples."""

    capabilities: ClassVar[Capabilities] = Capabilities()

    def __init__(self, config: Config) -> None:
        self.config = config

    @classmethod
    def from_config(cls, section: Any, context: BuildContext) -> Any:
        return cls(context.config)  # which has the section too: `Config.backbone_section`

    def plan(self) -> Mapping[str, str]:
        """Lines for ``astuner run --dry-run``: engine, trainer, memory estimate; loads no weights.

        Raises as `check`.
        """
        return {}

    def check(self) -> None:
        """Look at what this experiment asks of the model and this machine; loads no weights.

        `plan` refuses the same; a backbone whose plan takes long has this too.

        :raises astuner.contracts.errors.ConfigError: what `train` would refuse before the first episode.
        :raises astuner.contracts.errors.RunError: what is to be looked at is not here, and cannot be fetched.
        """
        self.plan()

    def native(self) -> Mapping[str, Any]:
        """What the engine underneath is told, in its own words, for ``astuner config show --native``.

        :raises astuner.contracts.errors.ConfigError: there is no engine with a configuration of its own.
        """
        raise ConfigError(
            f"the backbone {self.config.astuner.backbone!r} has no configuration but the one that "
            "`astuner config show` prints; leave out --native"
        )

    def saved_states(self, run_dir: RunDir) -> Iterable[tuple[Path, str]]:
        """What a run may go on from, newest first, each with why it cannot be used (empty: it is whole)."""
        newest = self.latest_state(run_dir.resume)
        return () if newest is None else [(newest, "")]

    def has_saved_state(self, run_dir: RunDir) -> bool:
        """Return whether there is a state to resume from. May go by names, where checking the files takes long."""
        return any(not problem for _, problem in self.saved_states(run_dir))

    def latest_state(self, folder: Path) -> Path | None:
        """What a backbone had before there was `saved_states`: the newest complete state in ``folder``, or None."""
        return None

    @abstractmethod
    def serve(self, model_path: str | None = None) -> AbstractContextManager[Served]:
        """Load the model (``astuner.model.path`` unless ``model_path`` is given) and answer until the block ends."""

    @abstractmethod
    def train(self, run: Run) -> None:
        """Train to the end of the run, or raise `RunError` with everything finished saved."""

    @property
    def lends(self) -> bool:
        """Whether this command has no run of its own, but lends a part to the run of another; then `lend` is called
        in place of `train`.
        """
        return False

    def lend(self, folder: Path, interrupt: Interrupt, note: Callable[[str], None]) -> str:
        """Lend the part until the other command's run ends; what came of it, in a line.

        :param folder: for logs; the run folder is the other command's, and is not to be touched.
        :param note: tells the person something.
        :raises astuner.contracts.errors.RunError: the run failed, or was stopped; or nobody wanted the part.
        """
        raise NotImplementedError(f"{type(self).__name__} says that it `lends`: write its method `lend`")
