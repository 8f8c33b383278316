"""CPU time of a model call over HTTP, compared with proxies of other projects; see also `call_in_process`."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from benchmarks import templates
from benchmarks.clients import Talked, talk
from benchmarks.episodes import replies
from benchmarks.peers import COMMAND, LIGHTNING, VERIFIERS, Peer
from benchmarks.report import Report
from benchmarks.side import Side

AT_ONCE, TURNS, MORE_TURNS = 64, 8, 32
TEMPLATE = "qwen3"
"""Template of the benchmark; verifiers has a renderer for it."""
MOST_OVER_HTTP = 0.9
"""Goal in milliseconds of CPU per call."""
_numbers = itertools.count(1)
"""Numbers of the conversations; see `benchmarks.records`."""


def run(*, quick: bool) -> Report:
    report = Report(
        "CPU time per model call over HTTP",
        f"{AT_ONCE} concurrent agents, each with a conversation of {TURNS} turns: tool calls of about 30 tokens, "
        "results of about 80, and an answer at the end. The model answers immediately. Messages, chat template, "
        "tool calls, recorder and checks are real; all conversations differ. The vocabulary is a byte-level BPE "
        "trained on this repository's text.",
    )
    _over_http(report, repeats=1 if quick else 5)
    return report


# --- over HTTP ----------------------------------------------------------------------------------------------------


@dataclass
class _Load:
    """Measurements of a server with a number of concurrent conversations."""

    cpu: list[float] = field(default_factory=list)
    """CPU seconds of the server's process per call, for each repetition."""
    talked: list[Talked] = field(default_factory=list)

    def latency(self, share: float) -> str:
        """Return the latency in milliseconds at this quantile."""
        found = sorted(seconds for talked in self.talked for seconds in talked.latencies)
        return f"{found[min(int(share * len(found)), len(found) - 1)] * 1e3:.1f}"

    def per_second(self) -> str:
        return f"{statistics.median(len(t.latencies) / t.wall for t in self.talked):.0f}"

    @property
    def ms(self) -> float:
        """CPU per call."""
        return statistics.median(self.cpu) * 1e3

    @property
    def spread(self) -> str:
        return f"{min(self.cpu) * 1e3:.2f}–{max(self.cpu) * 1e3:.2f}"


def over_http(repeats: int) -> tuple[float, float]:
    """Return CPU seconds per call of the bare server and of ASTuner with the engine in process (best repetition)."""
    with ExitStack() as stack:
        sides, _ = _start(stack, peers=False)
        found = _loaded(sides, {AT_ONCE: repeats})
    return min(found[_STUB][AT_ONCE].cpu), min(found[_IN_PROCESS][AT_ONCE].cpu)


def _loaded(sides: Mapping[str, Side], loads: Mapping[int, int]) -> dict[str, dict[int, _Load]]:
    """Measure all sides in turns.

    :param loads: Concurrent agents -> number of repetitions.
    """
    found = {name: {at_once: _Load() for at_once in loads} for name in sides}
    for name, side in sides.items():
        _measure(name, side, AT_ONCE, _Load())  # warms up
    for at_once, times in loads.items():
        for _, (name, side) in itertools.product(range(times), sides.items()):
            _measure(name, side, at_once, found[name][at_once])
    return found


def _over_http(report: Report, *, repeats: int) -> None:
    loads = {AT_ONCE: repeats, 8: repeats, 1: 2 * repeats}
    with ExitStack() as stack:
        sides, notes = _start(stack)
        found = _loaded(sides, loads)
    report.heading("Over HTTP: `POST /v1/chat/completions`")
    report.table(
        ("CPU ms per call of the server", f"{AT_ONCE} at once", "spread", "8 at once", "1"),
        [
            (name, f"{by[AT_ONCE].ms:.2f}", by[AT_ONCE].spread, f"{by[8].ms:.2f}", f"{by[1].ms:.2f}")
            for name, by in found.items()
        ],
    )
    report.table(
        ("latency in ms", f"{AT_ONCE} at once: p50", "p99", "calls/s", "1: p50", "p99"),
        [
            (
                name,
                by[AT_ONCE].latency(0.5),
                by[AT_ONCE].latency(0.99),
                by[AT_ONCE].per_second(),
                by[1].latency(0.5),
                by[1].latency(0.99),
            )
            for name, by in found.items()
        ],
    )
    ours = found[_IN_PROCESS][AT_ONCE].ms
    report.text(
        f"With the engine in the process, ASTuner's server process takes {_goal(ours, MOST_OVER_HTTP)}. This includes "
        "HTTP, API keys, request validation, the core's work for a call in process "
        "([call_in_process.md](call_in_process.md)) and the JSON of the response."
    )
    report.text(_HOW)
    for note in notes:
        report.text(note)
    report.text(_STACKS)


_STUB, _IN_PROCESS, _HTTP_ENGINE = "the stub itself", "ASTuner, engine in process", "ASTuner, engine over HTTP"
_HOW = f"""\
How to read this:

- **CPU** covers all threads of the server process only. Clients and the stub inference server run in separate
  processes. The measurement starts before the first request and ends after all calls are recorded.
- **The sides do different work.** *ASTuner, engine in process* has no inference server: it turns messages into token
  IDs and calls the engine, as the `local` backbone does. All others call the stub over HTTP. *ASTuner, engine over
  HTTP* sends token IDs to the stub's `/inference/v1/generate` and reads IDs and log-probabilities. *verifiers, train
  client* is the closest match: it renders with its own Qwen3 renderer and calls the same route. *verifiers, eval
  client* and *Agent Lightning* forward the messages to the stub's `/v1/chat/completions` and leave tokens to the
  inference server (the stub sends none). verifiers keeps a message graph, Agent Lightning keeps OpenTelemetry spans in
  its in-memory store.
- **The stub** is a bare aiohttp handler that reads the JSON and returns a prepared response: about the minimum that
  any server costs here.
- **Garbage collection** in ASTuner's processes works as in a run: objects loaded before the first episode are excluded
  ([collector.md](collector.md)).
- **Latency** with {AT_ONCE} agents is mostly queueing, because the model takes no time: each agent sends its next
  request as soon as it has its answer, and one process serves all agents. With 1 agent it is the duration of a call.
  The machine has few cores, which clients and stub share, so latencies depend on the machine more than CPU time does.
- **The peers run with their defaults**: verifiers' `InterceptionServer` with one session per rollout, Agent
  Lightning's `LLMProxy` in thread mode with its default middleware and callbacks, one process each, no tuning."""


_STACKS = """\
## Choice of the HTTP server

Echo servers that read the JSON, check two headers and return a prepared chat completion with an ID: 64 concurrent
agents with 24 calls each, bodies of 0.8 to 5.4 kB, CPU of the server's process, median of 7 rounds in turns.
2026-11-24, commit a22d09a, 2 cores (load 3), aiohttp 3.14.5, starlette 1.10.0, uvicorn 0.54.0, httptools 0.9.0.

| CPU ms per call                                           | median |      spread |
|-----------------------------------------------------------|-------:|------------:|
| aiohttp, low-level server, handlers cancelled (ASTuner)   |  0.052 | 0.051–0.061 |
| aiohttp, application with routes                          |  0.056 | 0.054–0.061 |
| uvicorn with httptools, Starlette                         |  0.064 | 0.060–0.073 |
| uvicorn with httptools, no framework                      |  0.049 | 0.048–0.053 |
| uvicorn with h11, Starlette                               |  0.126 | 0.121–0.136 |

All applications therefore use aiohttp. Its low-level server also detects disconnected clients, which needs a task per
request with ASGI. Only the page of `astuner view`, which serves one user, uses Starlette.

The endpoint with a model that answers immediately, without template and tokens, takes 0.209 ms (0.191 to 0.241) under
the same load at commit 0b2c185, where each application handled hosts, keys, bodies and errors separately, and 0.205 ms
(0.186 to 0.232) with the current shared gate."""
"""Result of an earlier comparison of HTTP servers, which is not repeated here."""


def _start(stack: ExitStack, *, peers: bool = True) -> tuple[dict[str, Side], list[str]]:
    """Start all servers and return them with a note about each peer: its versions, or why it is missing."""
    tokenizer, folder = templates.tokenizer(TEMPLATE), stack.enter_context(tempfile.TemporaryDirectory())
    tokenizer.save_pretrained(folder)  # it is trained on files that may change: the sides must not train their own
    model = json.dumps(replies(tokenizer, TURNS))

    def start(python: Any, module: str, *arguments: str) -> Side:
        side = Side(python, f"benchmarks.{module}", *arguments)
        stack.callback(side.close)
        return side

    stub = start(sys.executable, "upstream_side", str(TURNS), model)
    url = stub.started["url"]
    sides = {
        _STUB: stub,
        _IN_PROCESS: start(sys.executable, "astuner_side", folder, model, ""),
        _HTTP_ENGINE: start(sys.executable, "astuner_side", folder, model, url),
    }
    notes: list[str] = []
    if not peers:
        return sides, notes
    if python := _python_of(VERIFIERS, notes):
        sides["verifiers, eval client"] = start(python, "verifiers_side", "eval", url, folder)
        sides["verifiers, train client"] = start(python, "verifiers_side", "train", url, folder)
        notes.append(_versions(sides["verifiers, train client"]))
    if python := _python_of(LIGHTNING, notes):
        sides["Agent Lightning, LLM proxy"] = start(python, "lightning_side", url)
        notes.append(_versions(sides["Agent Lightning, LLM proxy"]))
    return sides, notes


def _python_of(peer: Peer, notes: list[str]) -> Any:
    if peer.python is None:
        notes.append(
            f"**{peer.name} was not measured**: {peer.folder.name} does not exist; create it with `{COMMAND}`."
        )
    return peer.python


def _versions(side: Side) -> str:
    return ", ".join(f"{name} {version}" for name, version in side.started.items()) + "."


def _measure(name: str, side: Side, at_once: int, into: _Load) -> None:
    """Run one conversation of every agent."""
    calls = at_once * TURNS
    episodes = side.ask("begin", episodes=at_once)
    before = side.cpu()
    talked = talk(episodes, turns=TURNS, first_number=next(_numbers) * AT_ONCE)
    side.ask("settle")
    into.cpu.append((side.cpu() - before) / calls)
    into.talked.append(talked)
    recorded = side.ask("end", calls=calls)
    if recorded != calls:
        raise RuntimeError(f"{name} recorded {recorded} of {calls} calls: the measurement is invalid")


def _goal(ms: float, most: float) -> str:
    return f"{ms:.2f} ms per call (goal ≤ {most:g} ms: {'reached' if ms <= most else 'MISSED'})"
