"""Parts: what the core itself asks for, and leaves to packages, each under a name that the core fixes.

Unlike a judge or a backbone, nobody writes a part's name into an experiment: it is looked for when it is needed, among
what the plugins register by ``register_parts``.  One that is missing where something cannot do without it is an error
that says which package brings it; whoever turns the package off turns the part off.

Invariant: a part is known to the core by its class here and by nothing else; it may hold whatever it likes.
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
"""Overrides for who looks at one episode by hand, before those of the person: nothing takes too long."""


class Access(Protocol):
    """Where a program finds the model of one agent: ``base_url, api_key = access``, or by name.

    The key is in the pair and in `environment`; printing an access does not show it.
    """

    @property
    def base_url(self) -> str:
        """For clients that speak as OpenAI's do; ends with ``/v1``."""

    @property
    def api_key(self) -> str:
        """Good for this agent until the episode ends."""

    @property
    def model(self) -> str:
        """The name that the endpoint lists; it takes any."""

    @property
    def anthropic_base_url(self) -> str:
        """For Anthropic's clients, which add ``/v1`` themselves."""

    def environment(self) -> dict[str, str]:
        """Variables with which a program that knows nothing of ASTuner speaks to this model."""

    def __iter__(self) -> Iterator[str]:
        """``base_url`` and ``api_key``."""


class EndpointPart(ABC):
    """``endpoint``: the models of running episodes over HTTP.

    A runner of episodes has one at most, which it makes when the first agent asks.  The methods may be called from any
    thread, since workflows that are plain functions run in threads of their own.
    """

    @classmethod
    @abstractmethod
    def of(cls, section: EndpointSection) -> EndpointPart:
        """The one that ``astuner.endpoint`` describes; listens to nothing yet.

        :raises astuner.contracts.errors.ConfigError: it cannot be as the section says.
        """

    @abstractmethod
    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Serve on ``loop``, from now on; nothing happens if it does that already.

        :raises astuner.contracts.errors.ConfigError: it cannot listen where it should.
        :raises astuner.contracts.errors.MissingDependency: a package that it needs is not installed.
        """

    @abstractmethod
    def issue(self, tuner: ModelTuner, agent_name: str, role: str | None = None) -> Access:
        """The URL and key for one agent of an episode, the same ones each time; it is open.

        :param role: as for `ModelTuner.chat`, by which requests are answered.
        """

    @abstractmethod
    def revoke(self, tuner: ModelTuner) -> None:
        """The episode is over: its keys are worth nothing any more, and what is under way is cancelled."""

    @abstractmethod
    async def close(self) -> None:
        """Stop serving; it may be opened again."""


class Waiting(NamedTuple):
    """A tool call that an agent still waited for when its workflow returned."""

    message: str
    """What the agent waited for, and what to change."""
    is_answer: bool
    """Whether the workflow returned the agent's notice that it waits as the answer."""


class AgentScopePart(ABC):
    """``agentscope``: an episode's model, as an AgentScope agent takes one. Made without arguments."""

    @abstractmethod
    def make_model(self, tuner: ModelTuner, agent_name: str, role: str | None) -> Any:
        """An ``agentscope.model.ChatModelBase`` that answers by `ModelTuner.chat`, of the AgentScope that is installed.

        `ModelTuner` hands on to it what agents look for on a model: a call, ``formatter``, ``context_size``,
        ``count_tokens``, ``generate_structured_output``; it sets ``stream``.

        :raises astuner.contracts.errors.MissingDependency: AgentScope is not installed, or a package that it needs is
            not.
        """

    def find_waiting(self, model: Any, output: WorkflowOutput) -> Waiting | None:
        """Return a tool call of the model's agent that waited for a person or another program to the end.

        :param model: one that `make_model` returned; its episode's workflow has returned.
        """
        return None


class HelperModelsPart(ABC):
    """``helper_models``: what `astuner.contracts.building.BuildContext.helper_models` is."""

    @classmethod
    @abstractmethod
    def of(cls, config: Config, *, part: str = "") -> HelperModelsPart:
        """Those of an experiment (``astuner.helper_models``); the same ones each time, within a process.

        :param part: what is counted apart from the run itself, such as the making of its tasks.
        """

    @abstractmethod
    def get(self, name: str, *, where: str) -> Any:
        """The helper of this name, which can be asked.

        :param where: the key that names it, for the message.
        :raises astuner.contracts.errors.ConfigError: there is none of this name, or it cannot be made.
        """

    @abstractmethod
    def begin(self) -> None:
        """The run starts over: what it used before no longer counts."""


class DownloadsPart(ABC):
    """``downloads``: what a run would download. Optional: without it, whoever loads that finds out. Made without
    arguments."""

    @abstractmethod
    def require(self, config: Config, capabilities: Capabilities) -> None:
        """Make sure that the models and the data set of an experiment are here, or that the hub can be asked for them.

        :param capabilities: of the backbone; only one that honours all of ``astuner.model`` loads that model itself.
        :raises astuner.contracts.errors.RunError: they are not and it cannot; says, for each, where it was written and
            what is here.
        """


class TaskCheckPart(ABC):
    """``task_check``: what is wrong with a run's tasks, before its first step. Optional. Made without arguments."""

    @abstractmethod
    def look(self, config: Config, train: Sequence[Task], validation: Sequence[Task]) -> Mapping[str, Any]:
        """What was found, as JSON; ``plan`` in it holds lines of the run's plan.

        :raises astuner.contracts.errors.ConfigError: an experiment with such tasks is refused.
        """


class EnvironmentsPart(ABC):
    """``environments``: environments that are not of this process, or not of today's contract. Made without arguments.

    Without it, every environment is a class that is imported here.
    """

    @abstractmethod
    def hosts(self, config: Config, env_type: str) -> bool:
        """Whether a task's environment is elsewhere, in a service; asked for every episode, so it takes no time."""

    @abstractmethod
    def connect(self, config: Config, env_type: str) -> Environment:
        """An instance that `hosts` says is elsewhere; it has time limits of its own, and its calls may block.

        :raises astuner.contracts.errors.ConfigError: it is not known where that is.
        """

    @abstractmethod
    def service(self, config: Config, names: Sequence[str]) -> Service:
        """What serves these environments beside a run, for ``astuner run --with NAME``; not started.

        :param names: registered ones, or code as ``path/to/file.py->Class``.
        """

    @abstractmethod
    def adapt(self, cls: type) -> type[Environment] | None:
        """The `Environment` that runs a class which was written for something older; None: it is none of those."""

    @abstractmethod
    def prepare_import(self) -> None:
        """A person's environment is imported next: what files for something older import can now be imported."""


class Found(NamedTuple):
    """The turn that a request goes on from."""

    said: Said
    new_from: int
    """Index in the request of the first message behind the reply."""
    approximation: str
    """One of `APPROXIMATIONS`; empty when nothing was overlooked."""


class LooserHistoryPart(ABC):
    """``looser_history``: what one agent has said, for `rollout.merge_level: text`. Made without arguments."""

    @abstractmethod
    def add(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], said: Said, *, text: str) -> None:
        """Remember the reply to ``messages``.

        :param text: the whole reply, reasoning and tool calls included; it may come back like that.
        """

    @abstractmethod
    def find(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Found | None:
        """The last turn that ``messages`` go on from."""


@dataclass(frozen=True)
class ExternalReply:
    """One answer of a model outside of the run."""

    message: Mapping[str, Any]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


class ExternalModelPart(ABC):
    """``external_model``: a model outside of the run that speaks for an agent. Its words are never trained."""

    name: str
    """What its server calls it."""

    @abstractmethod
    def __init__(self, role: str, settings: AgentSection) -> None:
        """Look at ``settings``, the entry ``role`` of ``astuner.agents``; connect to nothing yet.

        :raises astuner.contracts.errors.ConfigError: the server, the model's name or the key is missing.
        """

    @abstractmethod
    async def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> ExternalReply:
        """One answer.

        :param messages: normalised.
        :param options: further fields of the request; those that are None are left out.
        :raises astuner.contracts.errors.ModelFailed: there is none, or it is no chat completion.
        """


class EpisodeContextPart(ABC):
    """``episode_context``: what is to hold while a workflow runs. Optional. Made without arguments, once a runner."""

    @abstractmethod
    def around(self, episode_id: str) -> AbstractContextManager[None]:
        """Entered before an attempt's workflow is called and left when it is over, in the task that awaits it.

        It is paid for by every episode, and may not raise.
        """


class DebuggerPart(ABC):
    """``debugger``: the breakpoints of one command, and what happens at one (`astuner.bp`)."""

    overrides: Sequence[str] = AT_LEISURE
    """For `load_config`, before those of the person."""
    note: Callable[[str], None]
    """Tells the person something; standard error until the run puts its own here."""

    @abstractmethod
    def __init__(self, tags: Sequence[str], *, listen: bool = False) -> None:
        """
        :param tags: each one tag, or several as ``A|B`` or ``A,B``.
        :param listen: wait for a debugger though there is a terminal.
        :raises astuner.contracts.errors.ConfigError: that is no tag, or there is none.
        """

    @abstractmethod
    def check(self, backbone: Backbone) -> str:
        """What a person should know of it.

        :raises astuner.contracts.errors.ConfigError: no episode runs for this command.
        """

    @abstractmethod
    def active(self) -> AbstractContextManager[None]:
        """In this block `astuner.bp` stops, here and in workers: the variable ``ASTUNER_DEBUG_TAGS`` has the tags."""

    @abstractmethod
    def end(self) -> None:
        """The run is over: say which tags nobody came to."""

    @staticmethod
    @abstractmethod
    def stop(tag: str, frame: FrameType) -> None:
        """Stop at ``frame``, which called `astuner.bp`; in whatever process that is."""

    @staticmethod
    @abstractmethod
    def hearing_workers() -> AbstractContextManager[None]:
        """While this process is connected to Ray: hear which workers have come to a breakpoint."""


class OlderSpellingsPart:
    """``older_spellings``: keys of older experiment files, in today's words. Optional. Made without arguments.

    This class is the one that knows none.
    """

    roots: Sequence[str] = ()
    """Older names of the root section ``astuner``."""
    renamed: Mapping[str, str] = {}
    """Older key -> today's key."""
    gone: Mapping[str, str] = {}
    """Older key, or section -> why there is none today."""

    def modernise(self, tree: Tree, backbones: Iterable[str], report: Report) -> None:
        """Rewrite the older spellings of one source, the file or the overrides, in place, each with a note.

        :param backbones: names of backbones, installed or not.
        """

    def command_line(self, arguments: Sequence[str]) -> list[str]:
        """The words behind ``astuner`` in today's spelling; asked of those that begin with an option."""
        return list(arguments)

    def settle(self, tree: Tree, plugins: PluginManager, report: Report) -> None:
        """The same, of those that need all of the experiment: ``tree`` is the file and the overrides together."""


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
"""The parts there are, and the class that each is a subclass of."""
