"""The model, as the workflow sees it.

Everything an agent asks goes through `ModelTuner.chat`: encode, fit into the budget, generate, decode, record,
check.  Adapters (AgentScope here) only translate.  The engine lives on one event loop; a call from another thread,
or from another loop in such a thread, is carried over to it.

Invariant: a reply that the workflow gets to see is recorded as a turn, and nothing else is.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from astuner.chat.answer import ChatReply
from astuner.chat.errors import UnsupportedRequest
from astuner.errors import (
    ContextOverflow,
    EpisodeAborted,
    EpisodeError,
    ModelFailed,
    PromptTooLong,
    TurnLimitReached,
)
from astuner.types import Generation, SamplingParams, Split, Turn, WorkflowTask

if TYPE_CHECKING:
    from astuner.backbone import InferenceEngine
    from astuner.chat.codec import ChatCodec, Conversation, EncodedPrompt
    from astuner.config import Config
    from astuner.rollout.checks import OutputChecks
    from astuner.rollout.recorder import EpisodeRecorder

DEFAULT_AGENT = "default"

LIMITS = (ContextOverflow, TurnLimitReached)
"""What an agent may run into, cope with, and still be judged by what it returns."""


@dataclass
class _Agent:
    conversation: Conversation
    calls: int = 0
    first_prompt: dict[int, int] = field(default_factory=dict)
    """Turn -> length of the prompt that its branch began with."""


class ModelTuner:
    """The model of one episode. Pass it as an AgentScope 1.x model, or call `chat`."""

    model_name = "astuner"

    def __init__(
        self,
        *,
        engine: InferenceEngine,
        codec: ChatCodec,
        recorder: EpisodeRecorder,
        sampling: SamplingParams,
        config: Config,
        workflow_task: WorkflowTask,
        checks: OutputChecks | None = None,
        agent_name: str = DEFAULT_AGENT,
    ) -> None:
        self.config = config
        self.workflow_task = workflow_task
        self.agent_name = agent_name
        self.stream = False  # AgentScope reads it, and sets it to False for a while
        self.failure: EpisodeError | None = None
        """What was raised or found first; kept because agent frameworks swallow and wrap what is raised.

        One of `LIMITS` gives way to anything else that comes later.
        """
        self._engine = engine
        self._codec = codec
        self._recorder = recorder
        self._sampling = sampling
        self._checks = checks
        self._agents: dict[str, _Agent] = {}
        self._aborted: EpisodeAborted | None = None
        self._closed = False
        self._carrying = threading.Lock()
        self._carried: set[concurrent.futures.Future[ChatReply]] = set()
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:  # built outside a loop: the first call decides
            self._loop = None

    @property
    def context_overflow(self) -> bool:
        """Whether a later prompt of this episode no longer fitted, and nothing worse happened."""
        return isinstance(self.failure, ContextOverflow)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        agent_name: str | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        tool_choice: Any = None,
    ) -> ChatReply:
        """Answer OpenAI-style ``messages``.

        :param tools: OpenAI-style tool descriptions.
        :param agent_name: whose conversation this is; the tuner's own name by default.
        :param max_tokens: fewer tokens than the configured budget leaves.
        :param temperature: instead of the configured one; in validation only, since the trainer takes the
            log-probabilities for those of `rollout.temperature`.
        :param tool_choice: ``none`` reads no tool calls. ``required`` or a tool's name never constrains the sampling
            (the log-probabilities would no longer be the policy's); the agent sees whether the model complied.
        :raises astuner.errors.PromptTooLong: the first prompt of the episode does not fit.
        :raises astuner.errors.ContextOverflow: a later prompt leaves no room for an answer.
        :raises astuner.errors.TurnLimitReached: the agent has used its `rollout.multi_turn.max_steps` calls.
        :raises astuner.errors.EpisodeAborted: a check fired, or the episode is over.
        :raises astuner.errors.ModelFailed: the engine failed.
        :raises UnsupportedRequest: the request cannot be turned into tokens, or would spoil the training.
        """
        here = asyncio.get_running_loop()
        if self._loop is None or self._loop.is_closed():
            self._loop = here
        self._check_open()
        call = self._chat(messages, tools, agent_name or self.agent_name, max_tokens, temperature, tool_choice)
        return await (call if here is self._loop else asyncio.wrap_future(self._carry(call)))

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

    async def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        structured_model: Any = None,
        **options: Any,
    ) -> Any:
        """AgentScope 1.x: ``model=model_tuner``.

        :returns: an ``agentscope.model.ChatResponse`` whose id names the turn.
        """
        from astuner.chat.agentscope1 import respond

        return await respond(self, self.agent_name, messages, tools, tool_choice, structured_model, options)

    def as_agentscope_model(self, agent_name: str = DEFAULT_AGENT) -> Any:
        """An AgentScope 1.x ``ChatModelBase`` for one agent of this episode."""
        from astuner.chat.agentscope1 import make_model

        return make_model(self, agent_name)

    def close(self) -> None:
        """The episode is over: calls still under way from other threads are cancelled, later ones refused."""
        with self._carrying:
            self._closed = True
            under_way = list(self._carried)
        for future in under_way:
            future.cancel()

    def _carry(self, call: Coroutine[Any, Any, ChatReply]) -> concurrent.futures.Future[ChatReply]:
        """Run ``call`` on the engine's loop."""
        assert self._loop is not None  # the callers looked
        with self._carrying:  # a call is either known to close(), or refused by it
            try:
                self._check_open()
                future = asyncio.run_coroutine_threadsafe(call, self._loop)
            except (RuntimeError, EpisodeAborted):  # RuntimeError: the loop is closed
                call.close()
                raise EpisodeAborted(self._over()) from None
            self._carried.add(future)
        future.add_done_callback(self._carried.discard)
        return future

    def _check_open(self) -> None:
        if self._closed:
            raise EpisodeAborted(self._over())

    def _over(self) -> str:
        return f"episode {self.workflow_task.episode_id} is over; its model answers no more calls"

    async def _chat(
        self, messages: Any, tools: Any, agent_name: str, max_tokens: int | None, temperature: float | None, choice: Any
    ) -> ChatReply:
        try:
            return await self._answer(messages, tools, agent_name, max_tokens, temperature, choice)
        except EpisodeError as e:
            self._remember(e)
            raise

    async def _answer(
        self, messages: Any, tools: Any, agent_name: str, max_tokens: int | None, temperature: float | None, choice: Any
    ) -> ChatReply:
        if self._aborted is not None:
            raise self._aborted
        agent = self._agents.get(agent_name)
        if agent is None:
            agent = self._agents[agent_name] = _Agent(self._codec.conversation())
        limit = self.config.astuner.rollout.multi_turn.max_steps
        if limit is not None and agent.calls >= limit:
            raise TurnLimitReached(
                f"agent {agent_name!r} has used its {limit} model calls (rollout.multi_turn.max_steps)"
            )
        agent.calls += 1
        encoded = agent.conversation.encode(messages, tools, read_tools=_reads_tools(choice, tools))
        sampling = self._fit(agent, encoded, max_tokens, temperature)
        generation = await self._generate(encoded, sampling, f"{self.workflow_task.episode_id}/{agent_name}")
        self._check_open()
        index = self._recorder.reserve()
        message = agent.conversation.accept(encoded, generation, index)
        agent.first_prompt[index] = _first_prompt(agent, encoded)
        turn = Turn(
            index=index,
            agent=agent_name,
            generation=generation,
            continues=encoded.continues,
            branch_reason=encoded.branch_reason,
            request=encoded.request,
            tools=encoded.tools,
            message=message,
        )
        self._recorder.add(turn)
        if self._checks is not None and (complaint := self._checks.check(message)):
            aborted = EpisodeAborted(f"turn {index} of agent {agent_name!r}: {complaint}")
            self._remember(aborted)
            if self.config.astuner.rollout.agent_madness_termination:
                self._aborted = aborted
                raise aborted
        return ChatReply(turn)

    def _fit(
        self, agent: _Agent, encoded: EncodedPrompt, max_tokens: int | None, temperature: float | None
    ) -> SamplingParams:
        """Sampling parameters that keep the answer within every limit."""
        if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
            raise UnsupportedRequest(f"max_tokens is {max_tokens!r}; it must be a whole number of at least 1")
        if temperature is not None and not (isinstance(temperature, (int, float)) and temperature >= 0):
            raise UnsupportedRequest(f"temperature is {temperature!r}; it must be a number of at least 0")
        wanted = self._sampling.temperature if temperature is None else float(temperature)
        if wanted != self._sampling.temperature and self.workflow_task.split is Split.TRAIN:
            raise UnsupportedRequest(
                f"temperature is {wanted:g}, but what is trained is the policy at rollout.temperature = "
                f"{self._sampling.temperature:g}; leave it out of the request, or set rollout.temperature "
                "(validation and chat may ask for another one)"
            )
        data, n = self.config.astuner.data, len(encoded.prompt_ids)
        if not agent.first_prompt and data.max_prompt_length is not None and n > data.max_prompt_length:
            raise self._too_long(f"its first prompt has {n} tokens, data.max_prompt_length is {data.max_prompt_length}")
        room = [self._sampling.max_tokens, self.config.astuner.rollout.max_response_length_in_one_turn]
        if max_tokens is not None:
            room.append(max_tokens)
        left = self._engine.max_model_len - n
        if left < 1:
            raise self._too_long(f"its prompt has {n} tokens, and the context only {self._engine.max_model_len}")
        room.append(left)
        if data.max_response_length is not None:
            left = _first_prompt(agent, encoded) + data.max_response_length - n
            if left < 1:
                raise self._too_long(f"it has added its data.max_response_length = {data.max_response_length} tokens")
            room.append(left)
        return replace(
            self._sampling,
            max_tokens=min(room),
            temperature=wanted,
            stop_token_ids=tuple(dict.fromkeys((*self._sampling.stop_token_ids, *self._codec.stop_token_ids))),
        )

    async def _generate(self, encoded: EncodedPrompt, sampling: SamplingParams, session: str) -> Generation:
        try:
            return await self._engine.generate(encoded.prompt_ids, sampling, session=session)
        except ContextOverflow as e:
            raise self._too_long(str(e)) from e
        except EpisodeError:
            raise
        except Exception as e:
            raise ModelFailed(f"the inference engine raised {type(e).__name__}: {e}") from e

    def _remember(self, error: EpisodeError) -> None:
        if self.failure is None or (isinstance(self.failure, LIMITS) and not isinstance(error, LIMITS)):
            self.failure = error

    def _too_long(self, why: str) -> EpisodeError:
        """The policy is to blame for the length of a prompt once it has said something, and not before."""
        of = f"task {self.workflow_task.task.task_id!r} (episode {self.workflow_task.episode_id})"
        if self._recorder.turns:
            return ContextOverflow(f"{of}: {why}")
        return PromptTooLong(f"{of}: {why}; raise that limit, or leave the task out")


def _first_prompt(agent: _Agent, encoded: EncodedPrompt) -> int:
    """Length of the prompt that the branch of ``encoded`` began with."""
    return len(encoded.prompt_ids) if encoded.continues is None else agent.first_prompt[encoded.continues]


def _reads_tools(choice: Any, tools: Sequence[Mapping[str, Any]] | None) -> bool:
    """Whether this ``tool_choice`` lets the model call tools."""
    if isinstance(choice, Mapping):  # OpenAI's {"type": "function", "function": {"name": …}}
        choice = (choice.get("function") or {}).get("name")
    names = [(t.get("function") or {}).get("name") for t in tools or ()]
    if choice in (None, "auto", "required", "any", *names):
        return True
    if choice == "none":
        return False
    known = ", ".join(["auto", "none", "required", *map(str, names)])
    raise UnsupportedRequest(f"tool_choice is {choice!r}; it must be one of {known}")
