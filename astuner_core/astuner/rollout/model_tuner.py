"""The model, as the workflow sees it.

Everything an agent asks goes through `ModelTuner.chat`, which finds out who speaks (`rollout.agents`) and lets that
one answer (`rollout.speaker`).  Adapters only translate, and are parts that packages bring (`astuner.contracts.parts`):
``agentscope``, to which this model hands on what an AgentScope agent asks of it, and ``endpoint``.  The engine lives on
one event loop; a call from another thread, or from another loop in such a thread, is carried over to it.

Invariant: a reply that the workflow gets to see is recorded before that, and a recorded reply that nobody got to see
is never trained.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from astuner.contracts.errors import (
    AstunerError,
    ConfigError,
    ContextOverflow,
    EpisodeAborted,
    EpisodeError,
    MissingDependency,
    PluginError,
    UnsupportedRequest,
)
from astuner.contracts.messages import ChatReply
from astuner.contracts.types import DEFAULT_AGENT, SamplingParams, WorkflowOutput, WorkflowTask
from astuner.plugins import registry
from astuner.rollout.endings import BEARABLE
from astuner.rollout.models import AgentRegistry
from astuner.rollout.speaker import ChatRequest, EpisodeState, ExternalSpeaker, PolicySpeaker, external_model
from astuner.rollout.world import World

if TYPE_CHECKING:
    from astuner.chat.template import ChatTemplate
    from astuner.config import Config
    from astuner.contracts.parts import Access, AgentScopePart, EndpointPart, Waiting
    from astuner.plugins.loader import PluginManager
    from astuner.rollout.models import Models
    from astuner.rollout.parts import OutputChecks
    from astuner.rollout.turns import EpisodeRecorder


T = TypeVar("T")

_OF_AGENTSCOPE = frozenset({"count_tokens", "context_size", "formatter", "generate_structured_output"})


class ModelTuner:
    """The model of one episode. Pass it as an AgentScope model, call `chat`, or hand out a URL and a key."""

    model_name = model = "astuner"
    """AgentScope 1.x asks for the first, 2.x for the second; the endpoint lists it."""
    stream = False
    """True is honoured where it is an AgentScope model: the answer then comes as a stream, all of it in one piece."""

    def __init__(
        self,
        *,
        models: Models,
        recorder: EpisodeRecorder,
        sampling: SamplingParams,
        config: Config,
        workflow_task: WorkflowTask,
        checks: OutputChecks | None = None,
        agent_name: str = DEFAULT_AGENT,
        endpoint: Callable[[], EndpointPart] | None = None,
        world: World | None = None,
    ) -> None:
        """:param world: the task's environment; None: one that is opened when it is first stepped."""
        self.config = config
        self.workflow_task = workflow_task
        self.agent_name = agent_name
        self.failure: EpisodeError | None = None
        """What was raised or found first; kept because agent frameworks swallow and wrap what is raised.

        What an agent can bear (`endings.BEARABLE`) gives way to anything else that comes later.
        """
        self.mistake: ConfigError | None = None
        """A mistake in the config that showed in a call; it ends the run, even if a framework swallowed it."""
        self.complaints: list[EpisodeAborted] = []
        """Every check that fired."""
        self._models = models
        self._agentscope_models: list[Any] = []
        self._episode = EpisodeState(
            config=config,
            workflow_task=workflow_task,
            recorder=recorder,
            sampling=sampling,
            check_open=self._check_open,
            complain=self._complain,
            checks=checks,
        )
        self._agents = AgentRegistry.of(config.astuner)
        self._speakers: dict[str, tuple[str, PolicySpeaker | ExternalSpeaker]] = {}
        self._endpoint = endpoint
        self._world = World(config, workflow_task.task) if world is None else world
        self._aborted: EpisodeAborted | None = None
        self._closed = False
        self._carrying = threading.Lock()
        self._under_way: set[concurrent.futures.Future[Any] | asyncio.Task[Any]] = set()
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:  # built outside a loop: the first call decides
            self._loop = None

    @property
    def context_overflow(self) -> bool:
        """Whether a later prompt of this episode no longer fitted, and nothing worse happened."""
        return isinstance(self.failure, ContextOverflow)

    # ------------------------------------------------------------------- chat

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        agent_name: str | None = None,
        role: str | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        stop: Sequence[str] | None = None,
        seed: int | None = None,
        tool_choice: Any = None,
        response_schema: Mapping[str, Any] | None = None,
    ) -> ChatReply:
        """Answer OpenAI-style ``messages``.

        :param tools: OpenAI-style tool descriptions.
        :param agent_name: whose conversation this is; the tuner's own name by default.
        :param role: the entry of ``astuner.agents`` that applies to the agent; the one of its name by default.
        :param max_tokens: fewer tokens than the configured budget leaves.
        :param temperature: instead of the configured one; in validation only, since the trainer takes the
            log-probabilities for those of `rollout.temperature`. So too ``top_p`` and ``seed``.
        :param stop: the answer ends before the first of these; the tokens behind it are not recorded.
        :param tool_choice: ``none`` reads no tool calls. ``required`` or a tool's name never constrains the sampling
            (the log-probabilities would no longer be the policy's); the agent sees whether the model complied.
        :param response_schema: the JSON schema of an object that the answer should be; the model is offered a tool
            that takes it, and the call's arguments become the content. Never constrains the sampling.
        :raises astuner.contracts.errors.PromptTooLong: the first prompt of the episode does not fit.
        :raises astuner.contracts.errors.ContextOverflow: a later prompt leaves no room for an answer.
        :raises astuner.contracts.errors.TurnLimitReached: the agent has used its `rollout.multi_turn.max_steps` calls.
        :raises astuner.contracts.errors.EpisodeAborted: a check fired, or the episode is over.
        :raises astuner.contracts.errors.ModelFailed: the engine failed.
        :raises UnsupportedRequest: the request cannot be turned into tokens, or would spoil the training.
        """
        self._begin()
        request = ChatRequest(
            messages=messages,
            tools=tools or (),
            max_tokens=_number("max_tokens", max_tokens, at_least=1, whole=True),
            temperature=_number("temperature", temperature, at_least=0),
            top_p=_number("top_p", top_p, at_least=0, at_most=1),
            stop=_strings("stop", stop),
            seed=_number("seed", seed, whole=True),
            tool_choice=tool_choice,
            response_schema=response_schema,
        )
        return await self._on_loop(self._chat(request, agent_name or self.agent_name, role))

    async def count_prompt_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        agent_name: str | None = None,
        role: str | None = None,
        tool_choice: Any = None,
        response_schema: Mapping[str, Any] | None = None,
    ) -> int:
        """Return how many tokens the prompt of the same `chat` would have; it is no turn, and no call of the agent.

        :raises UnsupportedRequest: The request cannot be turned into tokens, or an external model would answer it.
        """
        self._begin()
        request = ChatRequest(
            messages=messages, tools=tools or (), tool_choice=tool_choice, response_schema=response_schema
        )
        return await self._on_loop(self._count(request, agent_name or self.agent_name, role))

    def prompt_template(self, agent_name: str | None = None, role: str | None = None) -> ChatTemplate | None:
        """Return the chat template that writes an agent's prompts; None for an external model."""
        _, entry = self._agents.find(agent_name or self.agent_name, role)
        model = None if entry.model == "external" else self._models.get(entry.policy)
        return None if model is None else model.codec.template

    @property
    def sampling(self) -> SamplingParams:
        """How tokens are drawn where a request does not state it."""
        return self._episode.sampling

    def chat_sync(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> ChatReply:
        """`chat` for a workflow that is a plain function, which runs in a thread of its own."""
        self._check_open()
        try:
            running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:  # as it should be: no loop runs in this thread
            running = None
        if running is not None or self._loop is None:
            raise RuntimeError("chat_sync works in a thread beside the event loop; in async code write: await chat(…)")
        try:
            return self._carry(self.chat(messages, tools, **options)).result()
        except concurrent.futures.CancelledError:
            raise EpisodeAborted(self._over()) from None

    # ---------------------------------------------------- other ways to ask

    def base_url_and_key(self, agent_name: str | None = None, role: str | None = None) -> Access:
        """Where a program finds the model of one agent: ``base_url, api_key = model_tuner.base_url_and_key()``.

        :param agent_name: whose conversation this is; the tuner's own name by default.
        :param role: the entry of ``astuner.agents`` that applies to it; the one of its name by default.

        The endpoint speaks OpenAI's chat completions and responses and Anthropic's messages, on loopback unless
        ``astuner.endpoint.host`` says otherwise.  The key is good for this agent until the episode ends.

        :raises astuner.contracts.errors.MissingDependency: the part ``endpoint`` is not installed, or what it needs.
        """
        self._check_open()
        if self._endpoint is None:
            raise AstunerError("this model_tuner was made without an endpoint; run it by an EpisodeRunner")
        agent_name = agent_name or self.agent_name
        self._agents.find(agent_name, role)  # an agent that nobody knows shows here, and not inside a framework
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        try:
            endpoint = self._endpoint()
            endpoint.open(self._loop)
        except (ConfigError, PluginError) as e:  # no other episode would fare better
            self._mistaken(e)
            raise
        return endpoint.issue(self, agent_name, role)

    def as_openai_client(self, agent_name: str | None = None, role: str | None = None, **client_options: Any) -> Any:
        """An ``openai.AsyncOpenAI`` for one agent of this episode.

        :param client_options: passed on, e.g. ``max_retries=0``.
        """
        try:
            from openai import AsyncOpenAI, DefaultAsyncHttpxClient
        except ImportError as e:
            raise MissingDependency(f"as_openai_client needs the openai package ({e}): pip install openai") from e
        access = self.base_url_and_key(agent_name, role)
        if "http_client" not in client_options:  # a proxy for the way out has no business here
            client_options["http_client"] = DefaultAsyncHttpxClient(trust_env=False)
        return AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, **client_options)

    # ------------------------------------------------- as an AgentScope model

    async def __call__(self, *args: Any, **options: Any) -> Any:
        """Answer as the model of an AgentScope agent: ``model=model_tuner``.

        :returns: an ``agentscope.model.ChatResponse`` whose id names the turn.
        :raises astuner.contracts.errors.MissingDependency: AgentScope, or the part ``agentscope``, is not installed, or
            a package that it needs is not.
        """
        return await self._as_set()(*args, **options)

    def as_agentscope_model(self, agent_name: str | None = None, role: str | None = None) -> Any:
        """An ``agentscope.model.ChatModelBase``, of 1.x or 2.x, that speaks for one agent of this episode.

        On 2.x its ``formatter`` may be replaced, as with any model there.

        :param agent_name: whose conversation this is; the tuner's own name by default.
        :param role: the entry of ``astuner.agents`` that applies; the agent's name by default.
        :raises astuner.contracts.errors.MissingDependency: as for a call.
        """
        try:
            part = _agentscope(self.config.plugins)
        except PluginError as e:  # no other episode would fare better
            self._mistaken(e)
            raise
        model = part().make_model(self, agent_name or self.agent_name, role)
        self._agentscope_models.append(model)
        return model

    def __getattr__(self, name: str) -> Any:
        """What AgentScope 2.x looks for on a model, of the one that `as_agentscope_model` makes."""
        if name not in _OF_AGENTSCOPE:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._as_set(), name)

    # ------------------------------------------------------------ environment

    def gym_step(self, action: Mapping[str, Any]) -> tuple[str, float, bool, dict[str, Any]]:
        """Act in the task's environment (``env_type``), as Gym did: ``observation, reward, terminated, info``.

        It blocks until the environment has answered.  That holds up no other episode: the ``async def execute`` of a
        task with an environment runs on an event loop of its own.

        :param action: an assistant message, e.g. ``{"role": "assistant", "content": "…"}``.
        :returns: terminated is true when the environment is over for whatever reason; ``info`` says which, as
            ``terminated`` and ``truncated``.
        :raises astuner.contracts.errors.EnvironmentFailed: the task has no environment, or it failed.
        :raises RuntimeError: it was over before.
        """
        self._check_open()
        try:
            return self._world.step(action)
        except EpisodeError as e:
            self._remember(e)
            raise

    async def gym_step_async(self, action: Mapping[str, Any]) -> tuple[str, float, bool, dict[str, Any]]:
        """`gym_step` beside the event loop."""
        from astuner.support.threads import in_daemon_thread

        return await in_daemon_thread(self.gym_step, action)

    def leave_out(self, turn_indices: Sequence[int]) -> None:
        """These replies reached nobody (a client that went away), so they are not trained."""
        for index in turn_indices:
            self._episode.recorder.leave_out(index)

    def close(self) -> None:
        """The episode is over: calls still under way from other threads are cancelled, later ones refused."""
        with self._carrying:
            self._closed = True
            under_way = list(self._under_way)
        for call in under_way:
            call.cancel()

    def find_waiting(self, output: WorkflowOutput) -> Waiting | None:
        """Return a tool call that an AgentScope agent still waited for when the workflow returned ``output``."""
        if not self._agentscope_models:
            return None
        part = _agentscope(self.config.plugins)()
        waiting = [found for m in self._agentscope_models if (found := part.find_waiting(m, output)) is not None]
        return max(waiting, key=lambda found: found.is_answer, default=None)

    @property
    def has_spoken(self) -> bool:
        """Whether there is a turn."""
        return bool(self._episode.recorder.turns)

    @property
    def world(self) -> World:
        """The environment behind `gym_step`; the runner closes it."""
        return self._world

    # ---------------------------------------------------------------- private

    @functools.cached_property
    def _agentscope_model(self) -> Any:
        return self.as_agentscope_model()

    def _as_set(self) -> Any:
        """The AgentScope model, which streams if this one does."""
        self._agentscope_model.stream = self.stream
        return self._agentscope_model

    def _begin(self) -> None:
        """Take the first caller's loop as the engine's, and refuse what comes after the episode.

        :raises EpisodeAborted: The episode is over.
        """
        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.get_running_loop()
        self._check_open()

    async def _on_loop(self, call: Coroutine[Any, Any, T]) -> T:
        """Await ``call`` on the engine's loop, from whichever loop."""
        if asyncio.get_running_loop() is self._loop:
            return await self._asked(call)
        try:
            return await asyncio.wrap_future(self._carry(call))
        except asyncio.CancelledError:
            self._check_open()  # perhaps close() cancelled the call, and nobody the caller
            raise

    async def _count(self, request: ChatRequest, agent_name: str, role: str | None) -> int:
        speaker = self._speaker(agent_name, role)
        if isinstance(speaker, ExternalSpeaker):
            raise UnsupportedRequest(
                f"the model of agent {agent_name!r} is an external one, whose tokens are not known"
            )
        return await speaker.count_prompt_tokens(request)

    async def _asked(self, call: Coroutine[Any, Any, T]) -> T:
        """Await ``call`` as a task, so that it ends with the episode, whoever awaits it."""
        task = asyncio.ensure_future(call)
        self._under_way.add(task)
        try:
            return await task
        finally:
            self._under_way.discard(task)

    def _carry(self, call: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run ``call`` on the engine's loop."""
        assert self._loop is not None  # the callers looked
        with self._carrying:  # a call is either known to close(), or refused by it
            try:
                self._check_open()
                future = asyncio.run_coroutine_threadsafe(call, self._loop)
            except (RuntimeError, EpisodeAborted):  # RuntimeError: the loop is closed
                call.close()
                raise EpisodeAborted(self._over()) from None
            self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future

    def _check_open(self) -> None:
        if self._closed:
            raise EpisodeAborted(self._over())

    def _over(self) -> str:
        return f"episode {self.workflow_task.episode_id} is over; its model answers no more calls"

    async def _chat(self, request: ChatRequest, agent_name: str, role: str | None) -> ChatReply:
        try:
            if self._aborted is not None:
                raise self._aborted
            return await self._speaker(agent_name, role).answer(request)
        except EpisodeError as e:
            self._remember(e)
            raise
        except ConfigError as e:
            self._mistaken(e)
            raise

    def _speaker(self, agent_name: str, role: str | None) -> PolicySpeaker | ExternalSpeaker:
        """Who answers for an agent; the first call decides its role."""
        known = self._speakers.get(agent_name)
        if known is not None and role in (None, known[0]):
            return known[1]
        found, entry = self._agents.find(agent_name, role)
        if known is not None:
            raise UnsupportedRequest(
                f"agent {agent_name!r} has the role {known[0]!r} in this episode and is now given {found!r}; use "
                "another agent_name for another role"
            )
        speaker: PolicySpeaker | ExternalSpeaker
        if entry.model == "external":
            speaker = ExternalSpeaker(self._episode, agent_name, found, external_model(self.config, found, entry))
        else:
            if entry.policy not in self._models:
                raise ConfigError(f"astuner.agents.{found}.policy: no model is loaded for the policy {entry.policy!r}")
            speaker = PolicySpeaker(
                self._episode,
                agent=agent_name,
                role=found,
                policy=entry.policy,
                trained=entry.train,
                model=self._models[entry.policy],
            )
        self._speakers[agent_name] = found, speaker
        return speaker

    def _complain(self, found: EpisodeAborted) -> None:
        """A check fired: the episode counts as aborted, and ends at once if `agent_madness_termination` says so."""
        self._remember(found)
        self.complaints.append(found)
        if self.config.astuner.rollout.agent_madness_termination:
            self._aborted = found
            raise found

    def _mistaken(self, error: ConfigError | PluginError) -> None:
        """Keep what ends the run."""
        self.mistake = self.mistake or (error if isinstance(error, ConfigError) else ConfigError(str(error)))

    def _remember(self, error: EpisodeError) -> None:
        before = self.failure  # what a refused request is to blame for, a later call tells
        if before is None or isinstance(before, UnsupportedRequest if isinstance(error, BEARABLE) else BEARABLE):
            self.failure = error


@functools.lru_cache(maxsize=8)
def _agentscope(plugins: PluginManager) -> type[AgentScopePart]:
    """Looked for once, and not for every episode."""
    part: type[AgentScopePart] = registry.find_part(plugins, "agentscope", wanted_by="model=model_tuner")
    return part


def _number(name: str, value: Any, *, at_least: float = -(2**63), at_most: float = 2**63, whole: bool = False) -> Any:
    """``value``, if it is a number such as the request may have.

    :raises UnsupportedRequest: it is not.
    """
    kinds: Any = int if whole else (int, float)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, kinds) or not at_least <= value <= at_most:
        bounds = [f"at least {at_least:g}"] * (at_least > -(2**63)) + [f"at most {at_most:g}"] * (at_most < 2**63)
        kind = "a whole number" if whole else "a number"
        shown = repr(value) if len(repr(value)) < 50 else f"{repr(value)[:50]}…"
        raise UnsupportedRequest(f"{name} is {shown}; it must be {kind}{' of ' * bool(bounds)}{' and '.join(bounds)}")
    return value


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    given = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(text, str) and text for text in given):
        raise UnsupportedRequest(f"{name} is {value!r}; it must be a text, or a list of texts, none of them empty")
    return given
