"""Interfaces of parts: components of the core that packages implement, with fixed names.

Experiments do not name parts. When the core needs one, it looks for it among the objects that plugins register with
``register_parts``. If a required part is missing, the error names the package to install. Disabling a package disables
its parts.

Invariant: the core uses a part only through its class in this module.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from astuner.contracts.environment import Environment
from astuner.contracts.service import Service

if TYPE_CHECKING:
    from astuner.chat.history import Said
    from astuner.config import Config
    from astuner.config.schema import AgentSection, EndpointSection
    from astuner.contracts.backbone import Backbone, Capabilities
    from astuner.contracts.messages import Message
    from astuner.contracts.places import Report, Tree
    from astuner.contracts.types import Task, WorkflowOutput
    from astuner.plugins.loader import PluginManager
    from astuner.rollout.model_tuner import ModelTuner

_DAY = 86400
AT_LEISURE = (
    f"astuner.rollout.episode_timeout={_DAY}",
    f"astuner.task_judge.judge_timeout={_DAY}",
    f"astuner.env_service.timeout={_DAY}",
    "astuner.rollout.max_env_worker=1",
)
"""Overrides for interactive debugging, applied before the user's: no time limits, one episode at a time."""


class Access(Protocol):
    """URL and key of one agent's model. Unpack it: ``base_url, api_key = access``.

    Printing an access does not show the key.
    """

    @property
    def base_url(self) -> str:
        """Return the URL for OpenAI-compatible clients; it ends with ``/v1``."""

    @property
    def api_key(self) -> str:
        """Return the key of this agent, valid until the episode ends."""

    @property
    def model(self) -> str:
        """Return the model name that the endpoint lists. The endpoint accepts any name."""

    @property
    def anthropic_base_url(self) -> str:
        """Return the URL for Anthropic clients, which append ``/v1`` themselves."""

    def environment(self) -> dict[str, str]:
        """Return environment variables that direct an ordinary program to this model."""

    def __iter__(self) -> Iterator[str]:
        """Yield ``base_url`` and ``api_key``."""


class EndpointPart(ABC):
    """``endpoint``: serves the models of running episodes over HTTP.

    An episode runner creates at most one, when the first agent requests access. Methods may be called from any thread,
    because synchronous workflows run in separate threads.
    """

    @classmethod
    @abstractmethod
    def of(cls, section: EndpointSection) -> EndpointPart:
        """Create the endpoint from ``astuner.endpoint`` without listening yet.

        :raises astuner.contracts.errors.ConfigError: The section is invalid.
        """

    @abstractmethod
    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start serving on ``loop``, unless it already serves.

        :raises astuner.contracts.errors.ConfigError: It cannot listen on the configured address.
        :raises astuner.contracts.errors.MissingDependency: A required package is not installed.
        """

    @abstractmethod
    def issue(self, tuner: ModelTuner, agent_name: str, role: str | None = None) -> Access:
        """Return the URL and key of an agent in an episode, the same for each call. The endpoint must be open.

        :param role: As for `ModelTuner.chat`, which answers the requests.
        """

    @abstractmethod
    def revoke(self, tuner: ModelTuner) -> None:
        """Invalidate the keys of an ended episode and cancel its running requests."""

    @abstractmethod
    async def close(self) -> None:
        """Stop serving. It can be opened again."""


class Waiting(NamedTuple):
    """A tool call that an agent was still waiting for when its workflow returned."""

    message: str
    """Description of the tool call and the required change."""
    is_answer: bool
    """Whether the workflow returned the agent's notice that it is waiting as the answer."""


class AgentScopePart(ABC):
    """``agentscope``: wraps an episode's model for AgentScope agents. Created without arguments."""

    @abstractmethod
    def make_model(self, tuner: ModelTuner, agent_name: str, role: str | None) -> Any:
        """Return an ``agentscope.model.ChatModelBase`` of the installed AgentScope that answers with `ModelTuner.chat`.

        `ModelTuner` delegates the model interface of agents to it: calls, ``formatter``, ``context_size``,
        ``count_tokens``, ``generate_structured_output``. It sets ``stream``.

        :raises astuner.contracts.errors.MissingDependency: AgentScope or a package that it requires is not installed.
        """

    def find_waiting(self, model: Any, output: WorkflowOutput) -> Waiting | None:
        """Return a tool call for which the agent still waits for a user or another program, or None.

        :param model: Result of `make_model`; the episode's workflow has returned.
        """
        return None


class HelperModelsPart(ABC):
    """``helper_models``: the value of `astuner.contracts.building.BuildContext.helper_models`."""

    @classmethod
    @abstractmethod
    def of(cls, config: Config, *, part: str = "") -> HelperModelsPart:
        """Return the helper models of an experiment (``astuner.helper_models``), the same objects within a process.

        :param part: Category to count separately from the run itself, such as the generation of tasks.
        """

    @abstractmethod
    def get(self, name: str, *, where: str) -> Any:
        """Return the helper model with this name.

        :param where: Key that names it, for the message.
        :raises astuner.contracts.errors.ConfigError: The name is unknown, or the helper model cannot be created.
        """

    @abstractmethod
    def begin(self) -> None:
        """Reset the usage counters, because the run starts over."""


class DownloadsPart(ABC):
    """``downloads``: checks the downloads that a run needs. Created without arguments.

    Optional: without it, missing files are detected when they are loaded.
    """

    @abstractmethod
    def require(self, config: Config, capabilities: Capabilities) -> None:
        """Check that the models and the data set of an experiment are available locally or on a reachable hub.

        :param capabilities: Capabilities of the backbone. Only a backbone that supports all of ``astuner.model`` loads
            that model itself.
        :raises astuner.contracts.errors.RunError: Something is missing and the hub is unreachable. The message lists
            each missing item with the place of its key, and the available ones.
        """


class TaskCheckPart(ABC):
    """``task_check``: checks a run's tasks before the first step. Optional. Created without arguments."""

    @abstractmethod
    def look(self, config: Config, train: Sequence[Task], validation: Sequence[Task]) -> Mapping[str, Any]:
        """Return findings as JSON data; its entry ``plan`` contains lines of the run's plan.

        :raises astuner.contracts.errors.ConfigError: The experiment rejects such tasks.
        """


class EnvironmentsPart(ABC):
    """``environments``: environments in a service, and legacy environment classes. Created without arguments.

    Without it, every environment is a class imported in this process.
    """

    @abstractmethod
    def hosts(self, config: Config, env_type: str) -> bool:
        """Return whether a task's environment runs in a service. Called for every episode, so it must be fast."""

    @abstractmethod
    def connect(self, config: Config, env_type: str) -> Environment:
        """Return an instance in a service. It has its own time limits, and its calls may block.

        :raises astuner.contracts.errors.ConfigError: The address of the service is unknown.
        """

    @abstractmethod
    def service(self, config: Config, names: Sequence[str]) -> Service:
        """Return a service that serves these environments during a run (``--with NAME``), not started.

        :param names: Registered names, or code as ``path/to/file.py->Class``.
        """

    @abstractmethod
    def adapt(self, cls: type) -> type[Environment] | None:
        """Return an `Environment` class that runs a legacy class, or None if ``cls`` is not one."""

    @abstractmethod
    def prepare_import(self) -> None:
        """Make modules that legacy environments import available, before a user's environment is imported."""


class Found(NamedTuple):
    """The turn that a request continues."""

    said: Said
    new_from: int
    """Index in the request of the first message after the reply."""
    approximation: str
    """Ignored difference, one of `APPROXIMATIONS`; empty for an exact match."""


class LooserHistoryPart(ABC):
    """``looser_history``: the replies of one agent, for `rollout.merge_level: text`. Created without arguments."""

    @abstractmethod
    def add(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], said: Said, *, text: str) -> None:
        """Add the reply to ``messages``.

        :param text: Complete reply, including reasoning and tool calls, because a later request may contain it in this
            form.
        """

    @abstractmethod
    def find(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Found | None:
        """Return the last turn that ``messages`` continue, or None."""


@dataclass(frozen=True)
class ExternalReply:
    """A reply of an external model."""

    message: Mapping[str, Any]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


class ExternalModelPart(ABC):
    """``external_model``: an external model that an agent uses. Its replies are never trained."""

    name: str
    """Name of the model on its server."""

    @abstractmethod
    def __init__(self, role: str, settings: AgentSection) -> None:
        """Check ``settings``, the entry ``role`` of ``astuner.agents``. Do not connect yet.

        :raises astuner.contracts.errors.ConfigError: The server, the model's name or the key is missing.
        """

    @abstractmethod
    async def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> ExternalReply:
        """Return a reply.

        :param messages: Normalized messages.
        :param options: Further fields of the request; fields that are None are omitted.
        :raises astuner.contracts.errors.ModelFailed: The server returned no reply or not a chat completion.
        """


class EpisodeContextPart(ABC):
    """``episode_context``: a context around every workflow. Optional. Created without arguments, once per runner."""

    @abstractmethod
    def around(self, episode_id: str) -> AbstractContextManager[None]:
        """Return a context manager that is active while an attempt's workflow runs, in the task that awaits it.

        Every episode enters it, so it must be fast. It must not raise.
        """


class DebuggerPart(ABC):
    """``debugger``: the breakpoints of a command (`astuner.bp`)."""

    overrides: Sequence[str] = AT_LEISURE
    """Overrides for `load_config`, applied before the user's."""
    note: Callable[[str], None]
    """Prints a note for the user, on stderr unless the run replaces it."""

    @abstractmethod
    def __init__(self, tags: Sequence[str], *, listen: bool = False) -> None:
        """Check the tags.

        :param tags: Tags, or several tags as ``A|B`` or ``A,B``.
        :param listen: Wait for a debugger even if there is a terminal.
        :raises astuner.contracts.errors.ConfigError: A tag is invalid, or there are no tags.
        """

    @abstractmethod
    def check(self, backbone: Backbone) -> str:
        """Return a note for the user.

        :raises astuner.contracts.errors.ConfigError: This command runs no episodes.
        """

    @abstractmethod
    def active(self) -> AbstractContextManager[None]:
        """Enable `astuner.bp` in this block, here and in workers, which read the tags from ``ASTUNER_DEBUG_TAGS``."""

    @abstractmethod
    def end(self) -> None:
        """Report the tags that were never reached, at the end of the run."""

    @staticmethod
    @abstractmethod
    def stop(tag: str, frame: FrameType) -> None:
        """Stop at ``frame``, which called `astuner.bp`, in any process."""

    @staticmethod
    @abstractmethod
    def hearing_workers() -> AbstractContextManager[None]:
        """Report breakpoints of workers in this block, while this process is connected to Ray."""


class OlderSpellingsPart:
    """``older_spellings``: translates legacy keys of experiment files. Optional. Created without arguments.

    This base class has no legacy keys.
    """

    roots: Sequence[str] = ()
    """Legacy names of the root section ``astuner``."""
    renamed: Mapping[str, str] = {}
    """Legacy key -> current key."""
    gone: Mapping[str, str] = {}
    """Removed key or section -> why it was removed."""

    def modernise(self, tree: Tree, backbones: Iterable[str], report: Report) -> None:
        """Replace the legacy keys of one source (the file or the overrides) in place, each with a note.

        :param backbones: Names of backbones, installed or not.
        """

    def command_line(self, arguments: Sequence[str]) -> list[str]:
        """Return the current form of the arguments of ``astuner``. Called if they start with an option."""
        return list(arguments)

    def settle(self, tree: Tree, plugins: PluginManager, report: Report) -> None:
        """Replace legacy keys that depend on others. ``tree`` contains the file and the overrides."""


PARTS: Mapping[str, type] = {
    "agentscope": AgentScopePart,
    "debugger": DebuggerPart,
    "downloads": DownloadsPart,
    "endpoint": EndpointPart,
    "environments": EnvironmentsPart,
    "episode_context": EpisodeContextPart,
    "external_model": ExternalModelPart,
    "helper_models": HelperModelsPart,
    "looser_history": LooserHistoryPart,
    "older_spellings": OlderSpellingsPart,
    "task_check": TaskCheckPart,
}
"""Name of each part -> its base class."""
