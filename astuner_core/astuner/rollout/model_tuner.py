"""The model that a workflow calls.

All requests of agents pass through `ModelTuner.chat`, which finds the agent's entry (`rollout.models`) and lets its
speaker answer (`rollout.speaker`). Adapters only translate. They are parts from plugins (`astuner.contracts.parts`):
``agentscope`` answers AgentScope agents, ``endpoint`` serves HTTP. The engine runs on one event loop; calls from other
threads or loops are forwarded to it.

Invariant: a reply is recorded before the workflow sees it, and a recorded reply that no one received is never trained.
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
    """The model of one episode. Pass it as an AgentScope model, call `chat`, or use its URL and key."""

    model_name = model = "astuner"
    """Model name: AgentScope 1.x reads ``model_name``, 2.x reads ``model``; the endpoint lists it."""
    stream = False
    """Whether AgentScope receives answers as a stream. A streamed answer arrives in one piece."""

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
        """Create the model of an episode.

        :param world: Environment of the task; None for one that opens on its first step.
        """
        self.config = config
        self.workflow_task = workflow_task
        self.agent_name = agent_name
        self.failure: EpisodeError | None = None
        """First error that was raised or found, because agent frameworks swallow and wrap exceptions.

        Errors that an agent can recover from (`endings.BEARABLE`) are replaced by any later other error.
        """
        self.mistake: ConfigError | None = None
        """A mistake in the config found by a call. It ends the run, even if a framework swallowed it."""
        self.complaints: list[EpisodeAborted] = []
        """All output checks that fired."""
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
        except RuntimeError:  # created outside a loop: the first call sets it
            self._loop = None

    @property
    def context_overflow(self) -> bool:
        """Whether a later prompt of this episode was too long, and no worse error occurred."""
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
        :param agent_name: Agent of this conversation; the tuner's own agent name by default.
        :param role: Entry of ``astuner.agents`` for the agent; the entry with the agent's name by default.
        :param max_tokens: Limit below the configured one.
        :param temperature: Replaces the configured value. Only in validation, because training assumes
            `rollout.temperature` for the log-probabilities. The same applies to ``top_p`` and ``seed``.
        :param stop: Generation ends when one of these strings is complete; the text excludes it, and later tokens are
            not recorded.
        :param tool_choice: ``none`` ignores tool calls. ``required`` or a tool's name does not constrain sampling
            (log-probabilities would no longer be the policy's); the agent sees whether the model complied.
        :param response_schema: JSON schema of an object to answer with. The model is offered a tool that takes it, and
            the arguments of the call become the content. Sampling is not constrained.
        :raises astuner.contracts.errors.PromptTooLong: The first prompt of the episode is too long.
        :raises astuner.contracts.errors.ContextOverflow: A later prompt leaves no space for an answer.
        :raises astuner.contracts.errors.TurnLimitReached: The agent has used its `rollout.multi_turn.max_steps` calls.
        :raises astuner.contracts.errors.EpisodeAborted: A check fired, or the episode is over.
        :raises astuner.contracts.errors.ModelFailed: The engine failed.
        :raises UnsupportedRequest: The request cannot be converted to tokens, or would invalidate training.
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
        """Return the number of prompt tokens of the same `chat` call. It is not a turn and not counted as a call.

        :raises UnsupportedRequest: The request cannot be converted to tokens, or an external model would answer it.
        """
        self._begin()
        request = ChatRequest(
            messages=messages, tools=tools or (), tool_choice=tool_choice, response_schema=response_schema
        )
        return await self._on_loop(self._count(request, agent_name or self.agent_name, role))

    def prompt_template(self, agent_name: str | None = None, role: str | None = None) -> ChatTemplate | None:
        """Return the chat template that renders an agent's prompts; None for an external model."""
        _, entry = self._agents.find(agent_name or self.agent_name, role)
        model = None if entry.model == "external" else self._models.get(entry.policy)
        return None if model is None else model.codec.template

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters for requests that do not set them."""
        return self._episode.sampling

    def chat_sync(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> ChatReply:
        """Call `chat` from a workflow that is a plain function, which runs in its own thread."""
        self._check_open()
        try:
            running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:  # expected: no loop runs in this thread
            running = None
        if running is not None or self._loop is None:
            raise RuntimeError("chat_sync cannot run on the event loop. In async code, use: await chat(…)")
        try:
            return self._carry(self.chat(messages, tools, **options)).result()
        except concurrent.futures.CancelledError:
            raise EpisodeAborted(self._over()) from None

    # ---------------------------------------------------- other ways to ask

    def base_url_and_key(self, agent_name: str | None = None, role: str | None = None) -> Access:
        """Return URL and key of one agent's model: ``base_url, api_key = model_tuner.base_url_and_key()``.

        The endpoint supports OpenAI chat completions and responses, and Anthropic messages. It listens on loopback
        unless ``astuner.endpoint.host`` is set. The key is valid for this agent until the episode ends.

        :param agent_name: Agent of this conversation; the tuner's own agent name by default.
        :param role: Entry of ``astuner.agents`` for the agent; the entry with the agent's name by default.
        :raises astuner.contracts.errors.MissingDependency: The part ``endpoint``, or one of its packages, is not
            installed.
        """
        self._check_open()
        if self._endpoint is None:
            raise AstunerError("this model_tuner has no endpoint; create it with an EpisodeRunner")
        agent_name = agent_name or self.agent_name
        self._agents.find(agent_name, role)  # raises for an unknown agent here, not inside a framework
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        try:
            endpoint = self._endpoint()
            endpoint.open(self._loop)
        except (ConfigError, PluginError) as e:  # every other episode would fail, too
            self._mistaken(e)
            raise
        return endpoint.issue(self, agent_name, role)

    def as_openai_client(self, agent_name: str | None = None, role: str | None = None, **client_options: Any) -> Any:
        """Return an ``openai.AsyncOpenAI`` client for one agent of this episode.

        :param client_options: Options of the client, for example ``max_retries=0``.
        """
        try:
            from openai import AsyncOpenAI, DefaultAsyncHttpxClient
        except ImportError as e:
            raise MissingDependency(f"as_openai_client needs the openai package ({e}): pip install openai") from e
        access = self.base_url_and_key(agent_name, role)
        if "http_client" not in client_options:  # never use a proxy for a local endpoint
            client_options["http_client"] = DefaultAsyncHttpxClient(trust_env=False)
        return AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, **client_options)

    # ------------------------------------------------- as an AgentScope model

    async def __call__(self, *args: Any, **options: Any) -> Any:
        """Answer as the model of an AgentScope agent: ``model=model_tuner``.

        :returns: An ``agentscope.model.ChatResponse`` whose ID names the turn.
        :raises astuner.contracts.errors.MissingDependency: AgentScope, the part ``agentscope``, or one of its packages
            is not installed.
        """
        return await self._as_set()(*args, **options)

    def as_agentscope_model(self, agent_name: str | None = None, role: str | None = None) -> Any:
        """Return an ``agentscope.model.ChatModelBase`` (1.x or 2.x) for one agent of this episode.

        In 2.x its ``formatter`` can be replaced, as for any model.

        :param agent_name: Agent of this conversation; the tuner's own agent name by default.
        :param role: Entry of ``astuner.agents`` for the agent; the entry with the agent's name by default.
        :raises astuner.contracts.errors.MissingDependency: As for a call.
        """
        try:
            part = _agentscope(self.config.plugins)
        except PluginError as e:  # every other episode would fail, too
            self._mistaken(e)
            raise
        model = part().make_model(self, agent_name or self.agent_name, role)
        self._agentscope_models.append(model)
        return model

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that AgentScope 2.x reads, from the model of `as_agentscope_model`."""
        if name not in _OF_AGENTSCOPE:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._as_set(), name)

    # ------------------------------------------------------------ environment

    def gym_step(self, action: Mapping[str, Any]) -> tuple[str, float, bool, dict[str, Any]]:
        """Act in the task's environment (``env_type``) as in Gym: ``observation, reward, terminated, info``.

        The call blocks until the environment has answered. It does not block other episodes: the ``async def execute``
        of a task with an environment runs on its own event loop.

        :param action: Assistant message, for example ``{"role": "assistant", "content": "…"}``.
        :returns: ``terminated`` is true when the environment is over for any reason; ``info`` has the reason in
            ``terminated`` and ``truncated``.
        :raises astuner.contracts.errors.EnvironmentFailed: The task has no environment, or the environment failed.
        :raises RuntimeError: The environment was already over.
        """
        self._check_open()
        try:
            return self._world.step(action)
        except EpisodeError as e:
            self._remember(e)
            raise

    async def gym_step_async(self, action: Mapping[str, Any]) -> tuple[str, float, bool, dict[str, Any]]:
        """Call `gym_step` without blocking the event loop."""
        from astuner.support.threads import in_daemon_thread

        return await in_daemon_thread(self.gym_step, action)

    def leave_out(self, turn_indices: Sequence[int]) -> None:
        """Exclude replies from training that no one received, for example because a client disconnected."""
        for index in turn_indices:
            self._episode.recorder.leave_out(index)

    def close(self) -> None:
        """End the episode: cancel calls in progress from other threads and refuse later ones."""
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
        """The environment of `gym_step`. The runner closes it."""
        return self._world

    # ---------------------------------------------------------------- private

    @functools.cached_property
    def _agentscope_model(self) -> Any:
        return self.as_agentscope_model()

    def _as_set(self) -> Any:
        """Return the AgentScope model, with streaming as set on this one."""
        self._agentscope_model.stream = self.stream
        return self._agentscope_model

    def _begin(self) -> None:
        """Use the first caller's loop as the engine's, and refuse calls after the episode.

        :raises EpisodeAborted: The episode is over.
        """
        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.get_running_loop()
        self._check_open()

    async def _on_loop(self, call: Coroutine[Any, Any, T]) -> T:
        """Await ``call`` on the engine's loop, from any loop."""
        if asyncio.get_running_loop() is self._loop:
            return await self._asked(call)
        try:
            return await asyncio.wrap_future(self._carry(call))
        except asyncio.CancelledError:
            self._check_open()  # close() may have cancelled the call, rather than the caller
            raise

    async def _count(self, request: ChatRequest, agent_name: str, role: str | None) -> int:
        speaker = self._speaker(agent_name, role)
        if isinstance(speaker, ExternalSpeaker):
            raise UnsupportedRequest(f"agent {agent_name!r} uses an external model, whose tokens are unknown")
        return await speaker.count_prompt_tokens(request)

    async def _asked(self, call: Coroutine[Any, Any, T]) -> T:
        """Await ``call`` as a task, so that it ends with the episode."""
        task = asyncio.ensure_future(call)
        self._under_way.add(task)
        try:
            return await task
        finally:
            self._under_way.discard(task)

    def _carry(self, call: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run ``call`` on the engine's loop."""
        assert self._loop is not None  # checked by the callers
        with self._carrying:  # so that close() either knows the call or refuses it
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
        return f"episode {self.workflow_task.episode_id} is over; its model accepts no more calls"

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
        """Return the speaker of an agent. The first call sets the agent's role."""
        known = self._speakers.get(agent_name)
        if known is not None and role in (None, known[0]):
            return known[1]
        found, entry = self._agents.find(agent_name, role)
        if known is not None:
            raise UnsupportedRequest(
                f"agent {agent_name!r} has the role {known[0]!r} in this episode, but the request has {found!r}. Use "
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
        """Handle a check that fired: abort the episode, immediately if `agent_madness_termination` is set."""
        self._remember(found)
        self.complaints.append(found)
        if self.config.astuner.rollout.agent_madness_termination:
            self._aborted = found
            raise found

    def _mistaken(self, error: ConfigError | PluginError) -> None:
        """Record an error that ends the run."""
        self.mistake = self.mistake or (error if isinstance(error, ConfigError) else ConfigError(str(error)))

    def _remember(self, error: EpisodeError) -> None:
        before = self.failure  # a later call shows the consequence of a refused request
        if before is None or isinstance(before, UnsupportedRequest if isinstance(error, BEARABLE) else BEARABLE):
            self.failure = error


@functools.lru_cache(maxsize=8)
def _agentscope(plugins: PluginManager) -> type[AgentScopePart]:
    """Return the part ``agentscope``; cached, instead of a search per episode."""
    part: type[AgentScopePart] = registry.find_part(plugins, "agentscope", wanted_by="model=model_tuner")
    return part


def _number(name: str, value: Any, *, at_least: float = -(2**63), at_most: float = 2**63, whole: bool = False) -> Any:
    """Return ``value`` if it is a valid number for the request.

    :raises UnsupportedRequest: It is not valid.
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
        raise UnsupportedRequest(f"{name} is {value!r}; it must be a string or a list of strings, none of them empty")
    return given
