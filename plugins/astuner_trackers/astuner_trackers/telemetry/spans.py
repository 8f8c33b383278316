"""Convert episodes and steps to spans with OpenTelemetry's semantic conventions for generative AI.

The names follow version 1.41.0 of the conventions; its GenAI pages have since moved to their own repository. Facts
without a standard name are below ``astuner.``. This module does not need OpenTelemetry.

::

    invoke_workflow WORKFLOW          the episode
      invoke_agent AGENT              from its first request to its last reply
        chat MODEL                    a model call
        execute_tool TOOL             from the reply that calls it to the request that brings its result
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from astuner.contracts.messages import call_id, call_parts, mapping_of
from astuner.contracts.types import Episode, ExternalTurn, FinishReason, Split, Turn
from astuner_trackers.telemetry import messages as said
from astuner_trackers.telemetry.run_ids import RunIds

PROVIDER = "astuner"
"""`gen_ai.provider.name` of the run's policies. For external models it is `external`."""
Attribute = str | bool | int | float | Sequence[str]
CLIENT, SERVER, INTERNAL = "client", "server", "internal"
"""Span kinds: a call to a server, the server side of a call, and all other spans."""
VALIDATION_TIME = "time/validation"
"""Metric that only validations have."""


Event: TypeAlias = tuple[str, float, Mapping[str, Attribute]]
"""Event of a span: name, time, and attributes."""


@dataclass(frozen=True)
class Span:
    """A span. Times are seconds since 1970."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int | None
    start: float
    end: float
    attributes: Mapping[str, Attribute]
    kind: str = INTERNAL
    error: str = ""
    """Error message; empty on success."""
    events: Sequence[Event] = ()
    links: Sequence[tuple[int, int]] = ()
    """(trace ID, span ID) of linked spans."""


def known(attributes: Mapping[str, Attribute | None]) -> dict[str, Attribute]:
    """Return the attributes that have a value."""
    return {name: value for name, value in attributes.items() if value is not None}


def step_span(step: int, metrics: Mapping[str, float], ids: RunIds, links: Sequence[tuple[int, int]]) -> Span:
    """Return the span of a step or validation: a separate trace with its metrics, linked to its episodes' traces."""
    name = "validation" if VALIDATION_TIME in metrics else "train_step"
    seconds = metrics.get(VALIDATION_TIME, metrics.get("time/step", 0.0))
    attributes = {f"astuner.metrics.{dotted(key)}": value for key, value in metrics.items()}
    own, trace, now = ids.span(name, step), ids.trace(f"{name} {step}"), time.time()
    return Span(
        name, trace, own, None, now - max(seconds, 0.0), now, {"astuner.step": step, **attributes}, links=tuple(links)
    )


def dotted(metric: str) -> str:
    """Return a metric name with OpenTelemetry's separator."""
    return metric.replace("/", ".")


@dataclass(frozen=True, kw_only=True)
class Naming:
    """Facts about the run for the spans of its episodes."""

    ids: RunIds
    workflow: str
    models: Mapping[str, str]
    """Policy -> model name."""
    default_model: str
    sampling: Mapping[str, Attribute] = field(default_factory=dict)
    """``gen_ai.request.*`` of training. The values of validations are not recorded."""
    content: bool = False


def episode_spans(step: int, episode: Episode, naming: Naming, *, now: float) -> list[Span]:
    """Return the trace of an episode, with the root span first.

    :param now: End of the episode if its start is unknown.
    """
    return list(_OfEpisode(step, episode, naming, now).spans())


class _OfEpisode:
    def __init__(self, step: int, episode: Episode, naming: Naming, now: float) -> None:
        self._step, self._episode, self._naming = step, episode, naming
        self._of = episode.workflow_task
        self._trace, self._root = naming.ids.root(self._of.episode_id)
        self._start = now - episode.seconds if episode.started is None else episode.started
        self._end = self._start + episode.seconds
        everybody: list[Turn | ExternalTurn] = [*episode.turns, *episode.external]
        self._turns = sorted(everybody, key=lambda turn: turn.index)
        self._agents = list(dict.fromkeys(turn.agent for turn in self._turns))
        self._common: dict[str, Attribute] = {"gen_ai.conversation.id": naming.ids.conversation(self._of.episode_id)}

    def spans(self) -> Iterator[Span]:
        yield self._episode_span()
        for agent in self._agents:
            mine = [turn for turn in self._turns if turn.agent == agent]
            yield self._agent_span(agent, mine)
            for turn in mine:
                yield self._chat_span(turn)
            yield from self._tool_spans(mine)

    # ----------------------------------------------------------------- spans

    def _episode_span(self) -> Span:
        episode, of, verdict, output = self._episode, self._of, self._episode.verdict, self._episode.output
        error = "" if episode.stop_reason.is_scored else episode.stop_reason.value
        attributes: dict[str, Attribute | None] = {
            "gen_ai.operation.name": "invoke_workflow",
            "gen_ai.workflow.name": self._naming.workflow,
            **self._common,
            "astuner.episode.id": of.episode_id,
            "astuner.group.id": of.group_id,
            "astuner.task.id": of.task.task_id,
            "astuner.attempt": of.attempt,
            "astuner.split": of.split.value,
            "astuner.step": self._step,
            "astuner.stop_reason": episode.stop_reason.value,
            "astuner.retries": episode.retries,
            "astuner.turns": len(self._turns),
            "astuner.success": episode.is_success,
            "error.type": error or None,
        }
        if verdict is not None:
            attributes |= {"astuner.reward": verdict.reward, "astuner.reward.source": episode.reward_source}
            attributes |= {f"astuner.judge.{name}": value for name, value in verdict.metrics.items()}
        if output is not None:
            attributes |= {f"astuner.workflow.{name}": value for name, value in output.metrics.items()}
        if self._naming.content:
            attributes["astuner.query"] = said.short(of.task.main_query)
            asked = {"role": "user", "content": of.task.main_query}
            attributes["gen_ai.input.messages"] = said.input_messages([asked])  # viewers use it as a trace's title
            attributes["astuner.error"] = said.short(episode.error) or None
            if self._turns:
                last = self._turns[-1]
                attributes["gen_ai.output.messages"] = said.output_messages(last.message, _finish(last))
        name, times = f"invoke_workflow {self._naming.workflow}", (self._start, self._end)
        return Span(name, self._trace, self._root, None, *times, known(attributes), error=error, events=self._verdict())

    def _verdict(self) -> tuple[Event, ...]:
        """Return the conventional event for a verdict, as a span event because not all collectors accept logs."""
        episode = self._episode
        if episode.verdict is None:
            return ()
        attributes: dict[str, Attribute] = {
            "gen_ai.evaluation.name": "reward",
            "gen_ai.evaluation.score.value": episode.verdict.reward,
            "gen_ai.evaluation.score.label": "pass" if episode.is_success else "fail",
            "astuner.reward.source": episode.reward_source,
        }
        return (("gen_ai.evaluation.result", self._end, attributes),)

    def _agent_span(self, agent: str, turns: Sequence[Turn | ExternalTurn]) -> Span:
        last = turns[-1]
        attributes: dict[str, Attribute | None] = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": _provider(last),
            "gen_ai.agent.name": agent,
            "gen_ai.request.model": self._model(last),
            **self._common,
            "gen_ai.usage.input_tokens": sum(_usage(turn)[0] for turn in turns),
            "gen_ai.usage.output_tokens": sum(_usage(turn)[1] for turn in turns),
            "astuner.role": last.role,
            "astuner.turns": len(turns),
            "astuner.reward": self._episode.reward_of(agent, last.role),
        }
        if self._naming.content:
            attributes |= _said(turns[0], last)
        times = [self._times(turn) for turn in turns]
        start, end = min(start for start, _ in times), max(end for _, end in times)
        own = self._id("agent", agent)
        return Span(f"invoke_agent {agent}", self._trace, own, self._root, start, end, known(attributes))

    def _chat_span(self, turn: Turn | ExternalTurn) -> Span:
        model = self._model(turn)
        input_tokens, output_tokens = _usage(turn)
        attributes: dict[str, Attribute | None] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": _provider(turn),
            "gen_ai.request.model": model,
            "gen_ai.agent.name": turn.agent,
            **self._common,
            "gen_ai.response.id": f"{self._of.episode_id}:{turn.index}",
            "gen_ai.usage.input_tokens": input_tokens,
            "gen_ai.usage.output_tokens": output_tokens,
            "gen_ai.response.finish_reasons": (_finish(turn),),
            "astuner.turn": turn.index,
            "astuner.role": turn.role,
            "astuner.times_known": False if turn.started is None else None,
        }
        if isinstance(turn, Turn):
            attributes |= {
                "astuner.policy": turn.policy,
                "astuner.policy.version": turn.generation.policy_version,
                "astuner.trained": turn.trained,
                **(self._naming.sampling if self._of.split is Split.TRAIN else {}),
                "astuner.continues": turn.continues,
                "astuner.branch_reason": turn.branch_reason or None,
                "astuner.approximation": turn.approximation or None,
                "astuner.lost": turn.lost or None,
            }
        if self._naming.content:
            attributes |= _said(turn, turn)
            if isinstance(turn, Turn) and turn.tools:
                attributes["gen_ai.tool.definitions"] = said.as_json([mapping_of(tool) for tool in turn.tools])
        own, above = self._id("chat", turn.index), self._id("agent", turn.agent)
        return Span(f"chat {model}", self._trace, own, above, *self._times(turn), known(attributes), kind=CLIENT)

    def _tool_spans(self, turns: Sequence[Turn | ExternalTurn]) -> Iterator[Span]:
        """Yield spans for one agent's calls with results, each once, because a branch repeats its history."""
        waiting: dict[str, tuple[Turn | ExternalTurn, str, str]] = {}
        for turn in turns:
            for message in map(mapping_of, turn.request):
                if message.get("role") == "tool" and (name := str(message.get("tool_call_id"))) in waiting:
                    yield self._tool_span(name, *waiting.pop(name), turn, message)
            for call in turn.message.get("tool_calls") or ():
                waiting[str(call_id(call))] = (turn, *call_parts(call))

    def _tool_span(
        self,
        name: str,
        caller: Turn | ExternalTurn,
        tool: str,
        arguments: str,
        answered: Turn | ExternalTurn,
        message: Mapping[str, Any],
    ) -> Span:
        start = self._times(caller)[1]
        attributes: dict[str, Attribute] = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": tool,
            "gen_ai.tool.type": "function",
            "gen_ai.tool.call.id": name,
            "gen_ai.agent.name": caller.agent,
            **self._common,
            "astuner.turn": caller.index,
        }
        if self._naming.content:
            attributes["gen_ai.tool.call.arguments"] = said.short(arguments)
            attributes["gen_ai.tool.call.result"] = said.short(said.shown(message.get("content")))
        end = max(self._times(answered)[0], start)
        own, above = self._id("tool", caller.index, name), self._id("agent", caller.agent)
        return Span(f"execute_tool {tool}", self._trace, own, above, start, end, attributes)

    # ----------------------------------------------------------------- parts

    def _id(self, *name: object) -> int:
        return self._naming.ids.span(self._of.episode_id, *name)

    def _times(self, turn: Turn | ExternalTurn) -> tuple[float, float]:
        """Return start and end of a turn, or of the episode if they are unknown."""
        if turn.started is None:
            return self._start, self._end
        return turn.started, turn.started + (turn.seconds or 0.0)

    def _model(self, turn: Turn | ExternalTurn) -> str:
        if isinstance(turn, ExternalTurn):
            return turn.model
        return self._naming.models.get(turn.policy, self._naming.default_model)


def _said(first: Turn | ExternalTurn, last: Turn | ExternalTurn) -> dict[str, Attribute]:
    return {
        "gen_ai.input.messages": said.input_messages(first.request),
        "gen_ai.output.messages": said.output_messages(last.message, _finish(last)),
    }


def _provider(turn: Turn | ExternalTurn) -> str:
    return "external" if isinstance(turn, ExternalTurn) else PROVIDER


def _usage(turn: Turn | ExternalTurn) -> tuple[int, int]:
    """Return the number of prompt and reply tokens."""
    if isinstance(turn, ExternalTurn):
        return turn.prompt_tokens, turn.completion_tokens
    return len(turn.generation.prompt_ids), len(turn.generation.response_ids)


def _finish(turn: Turn | ExternalTurn) -> str:
    """Return the finish reason as a value of the conventions."""
    if isinstance(turn, Turn) and turn.generation.finish_reason is FinishReason.LENGTH:
        return "length"
    return "tool_call" if turn.message.get("tool_calls") else "stop"
