"""What the tests of traces share: spans and chats as files, a collector in a thread, and the pipeline in one call."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from astuner_flywheel.receiver.server import Handler
from astuner_flywheel.receiver.store import Store
from astuner_flywheel.traces.settings import TracingConfig
from astuner_flywheel.tracing_reader import Prepared, prepare
from astuner_gateway.gate import running
from astuner_gateway.listening import bind

SAMPLE = Path(__file__).parent / "data" / "studio_sample.sqlite"


def prepared(*sources: Path, helper_models: Any = None, **settings: Any) -> Prepared:
    config = TracingConfig.model_validate({"sources": [str(s) for s in sources], **settings})
    return prepare(config, Path(), helper_models)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def chat(question: str, answer: str, **more: Any) -> dict[str, Any]:
    return {"messages": [user(question), assistant(answer)], **more}


def parts(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


def span(
    trace: int, number: int, operation: str, *, parent: int = 0, start: int | None = None, **attributes: Any
) -> dict[str, Any]:
    """A span in OTLP's JSON; keywords with __ for dots, lists and objects as JSON text."""
    begun = 1_700_000_000_000_000_000 + (number if start is None else start) * 1_000_000
    flat = {"gen_ai.operation.name": operation, **{k.replace("__", "."): v for k, v in attributes.items()}}
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in flat.items()}
    return {
        "traceId": f"{trace:032x}",
        "spanId": f"{number:016x}",
        "parentSpanId": f"{parent:016x}" if parent else "",
        "name": operation,
        "kind": 1,
        "startTimeUnixNano": str(begun),
        "endTimeUnixNano": str(begun + 900_000),
        "attributes": [{"key": k, "value": {"stringValue": v}} for k, v in texts.items()],
        "status": {},
    }


def request(*spans: dict[str, Any], scope: str = "test", version: str = "1") -> dict[str, Any]:
    """An ExportTraceServiceRequest in OTLP's JSON."""
    scope_spans = [{"scope": {"name": scope, "version": version}, "spans": list(spans)}]
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "app"}}]}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": scope_spans}]}


def reply(trace: int, question: str, answer: str, *, first: int = 1, **more: Any) -> list[dict[str, Any]]:
    """A trace: an agent's span, and the call of its model."""
    asked, said = [parts("user", question)], [parts("assistant", answer)]
    whole = [parts("system", "Be brief."), *asked]
    base = trace * 100 + first
    return [
        span(trace, base, "invoke_agent", gen_ai__input__messages=asked, gen_ai__output__messages=said, **more),
        span(
            trace,
            base + 1,
            "chat",
            parent=base,
            gen_ai__input__messages=whole,
            gen_ai__output__messages=said,
            gen_ai__request__model="m",
            gen_ai__response__id=f"r-{trace}",
        ),
    ]


class Collecting:
    """A collector that runs in a thread."""

    def __init__(self, path: Path, handler: Handler, url: str) -> None:
        self.path, self.handler, self.url = path, handler, url


@contextmanager
def collecting(path: Path, *, key: str = "") -> Iterator[Collecting]:
    """The collector's own handler and store on a free port of loopback."""
    store, over = Store(path), threading.Event()
    listening = bind("127.0.0.1", 0, listen=True)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    made: list[Handler] = []
    ready = threading.Event()

    async def serve() -> None:
        made.append(Handler(store, host="127.0.0.1", key=key))
        async with running(made[0], listening, grace=1.0):
            ready.set()
            while not over.is_set():
                await asyncio.sleep(0.02)
        await made[0].finished()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(60)
        yield Collecting(path, made[0], url)
    finally:
        over.set()
        thread.join()
        listening.close()
        store.close()
