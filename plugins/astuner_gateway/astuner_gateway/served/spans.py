"""Send completions to a collector as spans with OpenTelemetry's conventions for generative AI.

There is one span per completion, including its messages. `gen_ai.response.id` is the ID that the client receives, so
that ratings find it; `gen_ai.conversation.id` stays the same over the turns of a conversation. Spans wait in the
bounded queue of `astuner_trackers.telemetry.export`, which a separate thread empties. Invariant: no answer waits for
the collector.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from astuner.contracts.errors import ConfigError
from astuner.contracts.messages import mapping_of
from astuner.contracts.types import SamplingParams
from astuner_gateway.served.handler import Exchange
from astuner_trackers.telemetry import messages as said
from astuner_trackers.telemetry.collector import Collector, collector
from astuner_trackers.telemetry.settings import Telemetry
from astuner_trackers.telemetry.spans import PROVIDER, SERVER, Attribute, Span, known

_PARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
"""W3C Trace Context, level 1: version, trace ID, parent ID, flags."""


def collector_at(url: str, headers_env: str | None) -> Collector:
    """Return the collector of ``--trace URL``.

    :param headers_env: Variable with its headers; see `astuner_trackers.telemetry.settings.Telemetry`.
    :raises ConfigError: The URL is invalid, or the variable is not set.
    """
    try:
        telemetry = Telemetry.model_validate({"otlp_endpoint": url, "headers_env": headers_env})
    except ValueError as e:
        why = str(e).split("Value error, ")[-1].split(" [type=")[0]
        raise ConfigError(f"--trace {url.rpartition('@')[2]}: {why}") from None
    return replace(collector(telemetry, "traces"), url_from="--trace", headers_from="--trace-headers-env")


def feedback_url(to: Collector) -> str:
    """Return the URL to which users' ratings are sent if the collector is `astuner data collect`."""
    return to.shown.removesuffix("/v1/traces") + "/feedback"


class CompletionTracer:
    """Send every completion to a collector.

    :param remark: Called with messages about failures: that the collector rejects spans, that it accepts them again,
        and at the end how many were lost.
    """

    def __init__(self, to: Collector, sampling: SamplingParams, remark: Callable[[str], None]) -> None:
        from astuner import __version__
        from astuner_trackers.telemetry.export import SpanSender, resource

        who = resource({"service.version": __version__, "service.instance.id": secrets.token_hex(8)})
        self._sampling = sampling
        self._sender = SpanSender(to, who, __version__, remark)

    def completed(self, exchange: Exchange) -> None:
        """Queue a completion; return immediately."""
        self._sender.send([completion_span(exchange, self._sampling)])

    def metrics(self) -> Mapping[str, int]:
        made, sent = self._sender.made_and_sent
        return {"spans": made, "spans_sent": sent}

    def close(self) -> None:
        """Send the queue; wait only a few seconds for a collector that accepts nothing."""
        self._sender.close()


def completion_span(exchange: Exchange, sampling: SamplingParams) -> Span:
    """Return the span of a completion; it joins the trace that the request names."""
    about, request, answers = exchange.about, exchange.request, exchange.answers
    trace_id, parent_id = parent_of(exchange.traceparent)
    everything = [*request.messages, *(each.reply.message for each in answers)]
    is_cut = any(len(said.shown(message.get("content"))) > said.LONGEST for message in everything)
    attributes: dict[str, Attribute | None] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": about.name,
        "gen_ai.response.model": about.name,
        "gen_ai.response.id": exchange.completion_id,
        "gen_ai.conversation.id": exchange.conversation_id,
        "gen_ai.usage.input_tokens": answers[0].reply.prompt_tokens,
        "gen_ai.usage.output_tokens": sum(each.reply.completion_tokens for each in answers),
        "gen_ai.response.finish_reasons": tuple(each.reply.finish_reason for each in answers),
        **_asked(request.sampling, sampling),
        "gen_ai.input.messages": said.input_messages(request.messages),
        "gen_ai.output.messages": _output(answers),
        "gen_ai.request.choice.count": len(answers) if len(answers) > 1 else None,
        "gen_ai.tool.definitions": said.as_json([mapping_of(t) for t in request.tools]) if request.tools else None,
        "astuner.policy": about.policy,
        "astuner.checkpoint": about.checkpoint,
        "astuner.step": about.step,
        "astuner.lost": exchange.lost or None,
        "astuner.cut": is_cut or None,
    }
    name, own, times = f"chat {about.name}", secrets.randbits(64) or 1, (exchange.started, exchange.ended)
    return Span(name, trace_id, own, parent_id, *times, known(attributes), kind=SERVER)


def parent_of(traceparent: str) -> tuple[int, int | None]:
    """Return the trace and parent of a ``traceparent`` header, or a new trace."""
    named = _PARENT.fullmatch(traceparent)
    if named and int(named[1], 16) and int(named[2], 16):
        return int(named[1], 16), int(named[2], 16)
    return secrets.randbits(128) or 1, None


def _asked(options: Mapping[str, Any], sampling: SamplingParams) -> dict[str, Attribute | None]:
    """Return the attributes ``gen_ai.request.*`` with the sampling parameters of the answer."""
    top_p = float(options.get("top_p", sampling.top_p))
    return {
        "gen_ai.request.temperature": float(options.get("temperature", sampling.temperature)),
        "gen_ai.request.max_tokens": min(sampling.max_tokens, options.get("max_tokens", sampling.max_tokens)),
        "gen_ai.request.top_p": top_p if top_p < 1 else None,
        "gen_ai.request.seed": options.get("seed"),
    }


def _output(answers: Sequence[Any]) -> str:
    """Return one message for each choice."""
    lists = [said.output_messages(each.reply.message, each.reply.finish_reason) for each in answers]
    return lists[0] if len(lists) == 1 else f"[{', '.join(text[1:-1] for text in lists)}]"
