"""``astuner data collect``: take traces and feedback until Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

DEFAULT_PORT = 4318
"""OTLP over HTTP's own."""


def collect(
    database: Annotated[
        Path, typer.Argument(metavar="DB", help="The SQLite file; made, or added to.", show_default=False)
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0 takes a free port.")] = DEFAULT_PORT,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Anything but loopback needs --key-env.")] = "127.0.0.1",
    key_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The variable with the key that every request must bring. Default: none."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: where it listens, and counts at the end.")
    ] = False,
) -> None:
    """Collect traces (OTLP over HTTP) and users' feedback in one SQLite file, until Ctrl-C.

    An application sends its spans to http://127.0.0.1:4318/v1/traces, for example with
    OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318 or agentscope.init(tracing_url="http://127.0.0.1:4318/v1/traces"),
    and what users think of an answer to POST /feedback. The task reader `tracing` and `astuner data import` read the
    file, also while this runs.
    """
    from astuner_flywheel.receiver.serving import access_file, serve, terms_of, url_of
    from astuner_flywheel.receiver.store import Store
    from astuner_gateway.listening import bind

    terms = terms_of(host, key_env)
    path = database.expanduser()
    with closing(Store(path)) as store:
        if store.remark:
            typer.echo(store.remark, err=True)
        with bind(host, port, listen=True) as listening:
            url = url_of(host, listening)
            with access_file(url, terms, listening.getsockname()[1], path) as access:

                def ready() -> None:
                    where = {"traces_url": f"{url}/v1/traces", "feedback_url": f"{url}/feedback", "access": str(access)}
                    if as_json:
                        typer.echo(json.dumps({**where, "database": str(path)}))
                    else:
                        typer.echo(
                            f"traces:   POST {where['traces_url']}\nfeedback: POST {where['feedback_url']}\n"
                            f"kept in {path}; an application finds all this in {access}\nCtrl-C stops it."
                        )
                    sys.stdout.flush()

                counts = asyncio.run(serve(terms, store, listening, ready))
        kept = store.counts()
    if as_json:
        typer.echo(json.dumps({"since_start": dict(counts), "in_file": kept}))
    else:
        typer.echo(
            f"stopped: {counts['spans']:,} new spans, {counts['feedback']:,} pieces of feedback; "
            f"{path} holds {kept['spans']:,} and {kept['feedback']:,}",
            err=True,
        )
