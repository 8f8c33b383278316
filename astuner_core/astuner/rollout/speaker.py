"""Answer requests of one agent in one episode: encode, apply limits, generate, decode, record, check.

Invariant: a reply is recorded as a turn before the agent sees it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import astuner
from astuner.chat.reply import STRUCTURED_TOOL, cut_at_stop, structured_tool
from astuner.contracts.errors import (
    ContextOverflow,
    EpisodeAborted,
    EpisodeError,
    ModelFailed,
    PromptTooLong,
    TurnLimitReached,
    UnsupportedRequest,
    told,
)
from astuner.contracts.messages import ChatReply, normalise, parse_arguments, refused_message
from astuner.contracts.types import ExternalTurn, FinishReason, Generation, SamplingParams, Split, Turn, WorkflowTask
from astuner.plugins import registry

if TYPE_CHECKING:
    from astuner.chat.codec import EncodedPrompt
    from astuner.config import Config
    from astuner.config.schema import AgentSection
    from astuner.contracts.parts import ExternalModelPart
    from astuner.rollout.models import PolicyModel
    from astuner.rollout.parts import OutputChecks
    from astuner.rollout.turns import EpisodeRecorder


_ANY_LENGTH = 1 << 40
"""Token limit for a prompt that is only counted."""


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A request of an agent; see `astuner.rollout.model_tuner.ModelTuner.chat`."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: Sequence[str] = ()
    seed: int | None = None
    tool_choice: Any = None
    response_schema: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class EpisodeState:
    """State shared by all agents of an episode."""

    config: Config
    workflow_task: WorkflowTask
    recorder: EpisodeRecorder
    sampling: SamplingParams
    check_open: Callable[[], None]
    """Raise if the episode is over."""
    complain: Callable[[EpisodeAborted], None]
    """Receive a check's complaint and raise it if it ends the episode."""
    checks: OutputChecks | None = None

    def reply_id(self, index: int) -> str:
        """Return the ID of a turn."""
        return f"{self.workflow_task.episode_id}:{index}"


@dataclass
class _Limit:
    """Counter of one agent's model calls, limited by `rollout.multi_turn.max_steps`."""

    agent: str
    most: int | None
    calls: int = 0

    def __enter__(self) -> None:
        """Count a call. A call without a reply (refused, cancelled or failed) is not counted."""
        if self.most is not None and self.calls >= self.most:
            raise TurnLimitReached(
                f"agent {self.agent!r} has used its {self.most} model calls; if good attempts need more, raise "
                "astuner.rollout.multi_turn.max_steps"
            )
        self.calls += 1

    def __exit__(self, kind: object, *_: object) -> None:
        self.calls -= kind is not None


class PolicySpeaker:
    """Answers for an agent with a policy of the run."""

    def __init__(
        self, episode: EpisodeState, *, agent: str, role: str, policy: str, trained: bool, model: PolicyModel
    ) -> None:
        self._episode = episode
        self._agent, self._role, self._policy, self._trained = agent, role, policy, trained
        self._engine, self._codec = model.engine, model.codec
        self._conversation = model.codec.conversation()
        self._limit = _Limit(agent, episode.config.astuner.rollout.multi_turn.max_steps)
        self._stop_token_ids = tuple(dict.fromkeys((*episode.sampling.stop_token_ids, *model.codec.stop_token_ids)))
        self._first_prompt: dict[int, int] = {}
        """Turn -> length of its branch's first prompt."""

    async def answer(self, request: ChatRequest) -> ChatReply:
        """Generate and record one reply.

        :raises EpisodeAborted: A check fired and ends the episode; the turn is recorded.
        """
        with self._limit:
            turn, stop, tools = await self._speak(request)
        self._check(turn, tools, cut_off=stop is not None or turn.generation.finish_reason is not FinishReason.STOP)
        return self._reply(turn, stop, request.response_schema)

    async def count_prompt_tokens(self, request: ChatRequest) -> int:
        """Return the number of prompt tokens of a request. Nothing is generated or recorded."""
        tools, callable_tools = _offered(request)
        encoded = await self._conversation.encode_within(
            _ANY_LENGTH, request.messages, tools, callable_tools=callable_tools
        )
        return len(encoded.prompt_ids)

    async def _speak(self, request: ChatRequest) -> tuple[Turn, str | None, list[Mapping[str, Any]]]:
        """Return the recorded turn, the stop string that ended it, and the offered tools."""
        began, since = time.time(), time.perf_counter()
        schema = request.response_schema
        tools, callable_tools = _offered(request)
        may_call = _reads_tools(request.tool_choice, request.tools)
        try:
            encoded = await self._conversation.encode_within(
                self._engine.max_model_len, request.messages, tools, callable_tools=callable_tools
            )
        except ContextOverflow as e:
            raise self._too_long(str(e)) from e
        sampling = self._fit(encoded, request)
        generation = await self._generate(encoded, sampling)
        self._episode.check_open()
        generation, stop = cut_at_stop(generation, request.stop, self._codec.template.decode)
        index = self._episode.recorder.reserve()
        message = self._conversation.accept(
            encoded,
            generation,
            index,
            stop=stop,
            structured_tool=STRUCTURED_TOOL if schema is not None else "",
            no_other_call=not may_call,
        )
        self._first_prompt[index] = self._branch_start(encoded)
        turn = Turn(
            index=index,
            agent=self._agent,
            generation=generation,
            continues=encoded.continues,
            branch_reason=encoded.branch_reason,
            request=encoded.request,
            tools=encoded.tools,
            message=message,
            role=self._role,
            policy=self._policy,
            trained=self._trained,
            approximation=encoded.approximation,
            started=began,
            seconds=time.perf_counter() - since,
            notes={"rollout/control_texts": encoded.control_texts} if encoded.control_texts else {},
        )
        self._episode.recorder.add(turn)
        return turn, stop, tools

    def _check(self, turn: Turn, tools: Sequence[Mapping[str, Any]], *, cut_off: bool) -> None:
        """Check a turn of a trained agent; other agents are not checked."""
        checks = self._episode.checks
        if checks is not None and self._trained and (complaint := checks.check(turn.message, tools, cut_off=cut_off)):
            self._episode.complain(
                EpisodeAborted(f"turn {turn.index} of agent {self._agent!r}: {complaint}", turn=turn)
            )

    def _reply(self, turn: Turn, stop: str | None, schema: Mapping[str, Any] | None) -> ChatReply:
        generation, message = turn.generation, turn.message
        if generation.finish_reason is not FinishReason.STOP:
            finish = "length"
        else:
            finish = "tool_calls" if message.get("tool_calls") else "stop"
        return ChatReply(
            message=message,
            finish_reason=finish,
            prompt_tokens=len(generation.prompt_ids),
            completion_tokens=len(generation.response_ids),
            turn_index=turn.index,
            reply_id=self._episode.reply_id(turn.index),
            turn=turn,
            stop_sequence=stop,
            structured=parse_arguments(message["content"]) if schema is not None else None,
            _decode=self._codec.template.decode,
            _bytes_of=self._codec.template.token_bytes,
        )

    def _fit(self, encoded: EncodedPrompt, request: ChatRequest) -> SamplingParams:
        """Return sampling parameters that keep the answer within every limit."""
        common, rollout = self._episode.sampling, self._episode.config.astuner.rollout
        data, n = self._episode.config.astuner.data, len(encoded.prompt_ids)
        wanted = self._wanted(request)
        if not self._first_prompt and data.max_prompt_length is not None and n > data.max_prompt_length:
            raise self._too_long(
                f"its first prompt has {n} tokens, but data.max_prompt_length is {data.max_prompt_length}",
                "data.max_prompt_length",
            )
        room = [common.max_tokens, rollout.max_response_length_in_one_turn]
        if request.max_tokens is not None:
            room.append(request.max_tokens)
        left = self._engine.max_model_len - n
        if left < 1:
            raise self._too_long(f"its prompt has {n} tokens, but the context is {self._engine.max_model_len}")
        room.append(left)
        if data.max_response_length is not None:
            left = self._branch_start(encoded) + data.max_response_length - n
            if left < 1:
                raise self._too_long(
                    f"it has used its data.max_response_length = {data.max_response_length} tokens",
                    "data.max_response_length",
                )
            room.append(left)
        stop = tuple(text for text in request.stop if text)
        return replace(common, **wanted, max_tokens=min(room), stop_token_ids=self._stop_token_ids, stop=stop)

    def _wanted(self, request: ChatRequest) -> dict[str, Any]:
        """Return the requested sampling parameters, if they keep the log-probabilities of the trained policy."""
        common, training = self._episode.sampling, self._trained and self._episode.workflow_task.split is Split.TRAIN
        wanted: dict[str, Any] = {
            "temperature": common.temperature if request.temperature is None else float(request.temperature),
            "top_p": common.top_p if request.top_p is None else float(request.top_p),
        }
        for name, value in wanted.items():
            if training and value != getattr(common, name):
                raise UnsupportedRequest(
                    f"{name} is {value:g}, but the policy is trained at rollout.{name} = {getattr(common, name):g}. "
                    f"Omit it from the request, or set rollout.{name} (validation and chat accept other values)"
                )
        if training and request.seed is not None:
            raise UnsupportedRequest(
                f"seed is {request.seed}, which would make all attempts at a task equal, without a learning signal. "
                "Omit it from the request (validation and chat accept it)"
            )
        return {**wanted, "seed": request.seed}

    async def _generate(self, encoded: EncodedPrompt, sampling: SamplingParams) -> Generation:
        session = f"{self._episode.workflow_task.episode_id}/{self._agent}"
        try:
            generation = await self._engine.generate(encoded.prompt_ids, sampling, session=session)
        except ContextOverflow as e:
            raise self._too_long(str(e)) from e
        except EpisodeError:
            raise
        except Exception as e:
            raise ModelFailed(f"the inference engine raised {told(e)}") from e
        if generation.finish_reason is FinishReason.CANCELLED:
            raise ModelFailed("the inference engine cancelled a generation that was still needed")
        return generation

    def _too_long(self, why: str, key: str = "rollout.max_model_len") -> EpisodeError:
        """Return the error for a prompt that is too long. The policy is responsible once it has generated a turn.

        :param key: Key of the limit.
        """
        task = self._episode.workflow_task
        of = f"task {task.task.task_id!r} (episode {task.episode_id})"
        if any(turn.trained for turn in self._episode.recorder.turns):
            return ContextOverflow(f"{of}: {why}; raise astuner.{key}, or let the agent keep less of its history")
        return PromptTooLong(f"{of}: {why}; raise astuner.{key}, or remove the task")

    def _branch_start(self, encoded: EncodedPrompt) -> int:
        """Return the length of the first prompt in the branch of ``encoded``."""
        return len(encoded.prompt_ids) if encoded.continues is None else self._first_prompt[encoded.continues]


@dataclass
class ExternalSpeaker:
    """Answers for an agent with a model outside of the run."""

    episode: EpisodeState
    agent: str
    role: str
    model: ExternalModelPart
    _limit: _Limit = field(init=False)
    _heard: list[Mapping[str, Any]] = field(default_factory=list)
    """Messages of the last answered request."""

    def __post_init__(self) -> None:
        self._limit = _Limit(self.agent, self.episode.config.astuner.rollout.multi_turn.max_steps)

    async def answer(self, request: ChatRequest) -> ChatReply:
        """Get and record one reply.

        :raises UnsupportedRequest: The request has a response schema, which external models do not get.
        """
        if request.response_schema is not None:
            raise UnsupportedRequest(
                f"agent {self.agent!r} requests a structured answer, which is not supported for external models. "
                "Request plain text"
            )
        _reads_tools(request.tool_choice, request.tools)  # raises for an invalid choice
        with self._limit:
            return await self._ask(request)

    async def _ask(self, request: ChatRequest) -> ChatReply:
        options = {
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "stop": list(request.stop) or None,
            "seed": request.seed,
            "tool_choice": request.tool_choice if request.tools else None,
        }
        if (refusal := refused_message(request.messages)) is not None:
            raise refusal
        messages: list[Mapping[str, Any]] = [normalise(message) for message in request.messages]
        began, since = time.time(), time.perf_counter()
        said = await self.model.chat(messages, request.tools, options)
        self.episode.check_open()
        known = len(self._heard) if messages[: len(self._heard)] == self._heard else 0
        self._heard = messages
        index = self.episode.recorder.reserve()
        self.episode.recorder.add_external(
            ExternalTurn(
                index=index,
                agent=self.agent,
                role=self.role,
                model=self.model.name,
                request=tuple(messages[known:]),
                message=said.message,
                prompt_tokens=said.prompt_tokens,
                completion_tokens=said.completion_tokens,
                started=began,
                seconds=time.perf_counter() - since,
            )
        )
        return ChatReply(
            message=said.message,
            finish_reason=said.finish_reason,
            prompt_tokens=said.prompt_tokens,
            completion_tokens=said.completion_tokens,
            turn_index=index,
            reply_id=self.episode.reply_id(index),
        )


def _offered(request: ChatRequest) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Return the tools of a request, including the one for its structured answer, and the tools that may be called."""
    tools = [*request.tools]
    if request.response_schema is not None:
        tools.append(structured_tool(request.response_schema))
    return tools, tools if _reads_tools(request.tool_choice, request.tools) else tools[len(request.tools) :]


def _reads_tools(choice: Any, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether this ``tool_choice`` lets the model call tools."""
    if choice is None:
        return True
    if isinstance(choice, Mapping):  # OpenAI's {"type": "function", "function": {"name": …}}
        choice = (choice.get("function") or {}).get("name") or choice.get("type")
    names = [(t.get("function") or {}).get("name") for t in tools]
    if choice in ("required", "any") and not names:
        raise UnsupportedRequest(f"tool_choice is {choice!r}, but the request has no tools")
    if choice in ("auto", "required", "any", *names):
        return True
    if choice == "none":
        return False
    known = ", ".join(["auto", "none", "required", *map(str, names)])
    raise UnsupportedRequest(f"tool_choice is {choice!r}; it must be one of {known}")


def external_model(config: Config, role: str, settings: AgentSection) -> ExternalModelPart:
    """Return the model outside of the run that answers for a role.

    :raises astuner.contracts.errors.MissingDependency: No active plugin provides it.
    :raises astuner.contracts.errors.ConfigError: The server, the model's name or the key is missing.
    """
    part: type[ExternalModelPart] = registry.find_part(
        config.plugins, "external_model", wanted_by=f"astuner.agents.{role}.model: external"
    )
    return part(role, settings)


if not TYPE_CHECKING:
    __getattr__ = astuner.older_names(__name__)
