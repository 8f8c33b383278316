"""Implement ``astuner serve FILE``: serve the model of an experiment over an OpenAI-compatible API."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from astuner.contracts.commands import (
    BackboneOption,
    FileArgument,
    OverridesArgument,
    RunDirOption,
    WithOption,
    asked,
    only_data_on_stdout,
)
from astuner.contracts.errors import ConfigError

if TYPE_CHECKING:
    from astuner import Config
    from astuner.contracts.types import SamplingParams
    from astuner_gateway.served.following import Loader
    from astuner_gateway.served.handler import Handler
    from astuner_gateway.served.model import About
    from astuner_trackers.telemetry.collector import Collector


PORT = 8600


def serve(
    ctx: typer.Context,
    file: FileArgument,
    overrides: OverridesArgument = None,
    backbone: BackboneOption = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="promoted|best|latest|base|DIR",
            help="Checkpoint to serve. Default: the promoted one, switching to each new promotion; without a "
            "promotion, the best.",
            show_default=False,
        ),
    ] = None,
    run_dir: RunDirOption = None,
    policy: Annotated[
        str | None, typer.Option(metavar="NAME", help="Select the policy to serve, if there are several.")
    ] = None,
    workflow: Annotated[
        bool, typer.Option("--workflow", help="Answer with the experiment's agent and its tools.")
    ] = False,
    host: Annotated[str, typer.Option(help="Address to listen on; non-loopback needs --key-env.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 selects a free one.")] = PORT,
    key_env: Annotated[
        str | None, typer.Option(metavar="VAR", help="Variable with the key for clients. Default: a new key.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Temperature if a request sets none. Default: as in validation.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Maximum tokens. Default: max_response_length_in_one_turn.")
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Send every completion, including its messages, to this OTLP collector."),
    ] = None,
    trace_headers_env: Annotated[
        str | None, typer.Option(metavar="VAR", help="Variable with headers for the collector: key=value,…")
    ] = None,
    services: WithOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the address as one line of JSON when ready.")] = False,
) -> None:
    """Serve the model of an experiment over an OpenAI-compatible API.

    When ready, it prints the path of a file with the address and key for applications. Stop it with Ctrl-C.
    """
    from astuner import load_config, run_services
    from astuner_gateway import access_file
    from astuner_gateway.listening import bind, key_for, url_of
    from astuner_gateway.served.following import Loader, promoted_now
    from astuner_gateway.served.handler import Handler
    from astuner_gateway.served.spans import CompletionTracer, collector_at, feedback_url
    from astuner_models.promoted import PROMOTED

    given = asked(ctx, file, overrides, run_dir, services, backbone=backbone)
    stdout, key = sys.stdout, key_for(host, key_env, host_at="--host", key_at="--key-env", prefix="sk-astuner")
    if trace is None and trace_headers_env is not None:
        raise ConfigError("--trace-headers-env requires --trace URL")
    collector = collector_at(trace, trace_headers_env) if trace else None
    with ExitStack() as stack:
        listening = stack.enter_context(closing(bind(host, port, listen=True)))  # before the model is loaded
        stack.enter_context(only_data_on_stdout(as_json))
        beside = given.pop("services")
        config = load_config(**given)
        promoted = promoted_now(config) if checkpoint in (None, PROMOTED) else None
        sampling = _sampling(config, temperature, max_tokens)
        beside_it = stack.enter_context(run_services(config, beside))
        loader = Loader(config=config, policy=policy, workflow=workflow, sampling=sampling)
        current = loader.load(checkpoint or promoted or "best")
        about = current.about
        tracer = None
        if collector is not None:
            tracer = stack.enter_context(closing(CompletionTracer(collector, sampling, _remark)))
        handler = Handler(current, key=key, host=host, tracer=tracer)
        access: dict[str, Any] = {
            "base_url": f"{url_of(host, listening)}/v1",
            "api_key": key,
            "model": about.name,
            "pid": os.getpid(),
        }
        if collector is not None:
            access["feedback_url"] = feedback_url(collector)
        number = listening.getsockname()[1]
        access_path = stack.enter_context(access_file.kept("serve", number, access))

        def switched(to: About) -> None:
            access_file.write("serve", number, {**access, "model": to.name})
            _remark(f"now serving {to.name} ({to.checkpoint})")

        def ready() -> None:
            shown = {name: value for name, value in access.items() if name != "api_key"}
            shown |= {"access_file": str(access_path), "checkpoint": about.checkpoint}
            if as_json:
                print(json.dumps(shown, ensure_ascii=False), file=stdout, flush=True)
                return
            what = f"{about.name}{', with its agent' if workflow else ''} ({about.checkpoint})"
            typer.echo("\n".join([*beside_it, *_lines(what, current.note, shown, sampling, collector)]))
            sys.stdout.flush()

        follows = loader if checkpoint in (None, PROMOTED) else None
        asyncio.run(_run(handler, listening, ready, follows, promoted, switched))
        typer.echo(_summary(handler), err=as_json)


async def _run(
    handler: Handler,
    listening: Any,
    ready: Callable[[], None],
    follows: Loader | None,
    promoted: str | None,
    switched: Callable[[About], None],
) -> None:
    from astuner_gateway.gate import serve_until_told
    from astuner_gateway.served.following import follow, promoted_now

    following: list[asyncio.Task[None]] = []
    if follows is not None:
        wanted = partial(promoted_now, follows.config)
        following = [asyncio.create_task(follow(handler, promoted, wanted, follows.load, switched, _remark))]
    try:
        await serve_until_told(handler, listening, ready)
    finally:
        for task in following:
            task.cancel()
            await asyncio.wait({task})
        await handler.current.retire()


def _sampling(config: Config, temperature: float | None, max_tokens: int | None) -> SamplingParams:
    """Return the sampling parameters of validation, changed by the command line."""
    from dataclasses import replace

    from astuner import sampling_for
    from astuner.contracts.types import Split

    sampling = sampling_for(config, Split.VALIDATION)
    if temperature is not None:
        sampling = replace(sampling, temperature=temperature)
    return sampling if max_tokens is None else replace(sampling, max_tokens=max_tokens)


def _lines(
    what: str, note: str, shown: dict[str, Any], sampling: SamplingParams, collector: Collector | None
) -> list[str]:
    """Return the lines to print when the server is ready."""
    where = {
        "Serving": what,
        "Base URL": shown["base_url"],
        "Key": f"in {shown['access_file']}, readable only by you",
        "Sampling": f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}; requests can override",
        "Length": f"at most {sampling.max_tokens} tokens per answer (--max-tokens N), also if a request asks for more",
    }
    if collector is not None:
        where["Traces"] = f"completions are sent to {collector.shown}"
        where["Feedback"] = f"{shown['feedback_url']}, if the collector is `astuner data collect`"
    lines = [f"{name:<10}{value}" for name, value in where.items()]
    return [*lines, *([note] if note else []), "Stop with Ctrl-C"]


def _summary(handler: Handler) -> str:
    counts = handler.metrics()
    told = (
        f"answered {counts['answered']:,} requests in {counts['conversations']:,} conversations, rejected "
        f"{counts['refused']:,}"
    )
    return told + (f"; {counts['lost']:,} clients disconnected early" if counts["lost"] else "")


def _remark(text: str) -> None:
    print(f"astuner: {text}", file=sys.stderr, flush=True)
