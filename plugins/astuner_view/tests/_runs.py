"""Run folders with real logs in them, a viewer that serves them, and a small client."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from astuner.contracts.types import (
    Episode,
    ExternalTurn,
    FinishReason,
    Generation,
    JudgeOutput,
    Sample,
    Split,
    StopReason,
    Task,
    Turn,
    WorkflowOutput,
    WorkflowTask,
)
from astuner.rollout.turns import build_samples
from astuner.support.json_lines import append_jsonl
from astuner_gateway.gate import running
from astuner_record.episode_log import EpisodeLogWriter
from astuner_view.app import Viewer
from astuner_view.page import STATIC
from astuner_view.runs import Runs
from astuner_view.serving import open_socket

HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
    "\u2028 & \u202egnp.exe\u2066 \U0001f600 \x00"
)
END = 256
OLDER = Path(__file__).parents[2] / "astuner_record" / "tests" / "data" / "format1" / "episodes"
"""A log of an earlier ASTuner, with five episodes that count."""
"""The id of the special token ``<|end|>``; those below are bytes."""


def byte_tokenizer(path: Path) -> Path:
    """A tokenizer with a token for each byte, and one for the end of a message."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = byte_alphabet()
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return path


def byte_alphabet() -> dict[str, int]:
    """Character -> byte, as the library spells bytes: each byte is its own id."""
    from tokenizers import pre_tokenizers

    alphabet: dict[str, int] = {}
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    of_each_length = (range(0x800), range(0x800, 0x10000, 0x800), range(0x10000, 0x110000, 0x10000))
    for character in (chr(code) for codes in of_each_length for code in codes if not 0xD800 <= code < 0xE000):
        spelled = "".join(piece for piece, _ in level.pre_tokenize_str(character))
        alphabet.update(zip(spelled, character.encode(), strict=True))
    unused = sorted(set(range(256)) - set(alphabet.values()))  # bytes that UTF-8 never has
    alphabet |= dict(zip((c for c in level.alphabet() if c not in alphabet), unused, strict=False))
    return alphabet


def ids(text: str) -> tuple[int, ...]:
    """The tokens of `byte_tokenizer` for a text."""
    return tuple(text.encode())


def generation(prompt: Sequence[int], said: Sequence[int], version: int = 3) -> Generation:
    logprobs = tuple(-0.25 * i for i in range(len(said)))
    return Generation(
        prompt_ids=tuple(prompt),
        response_ids=tuple(said),
        logprobs=logprobs,
        finish_reason=FinishReason.STOP,
        policy_version=version,
    )


def turn(index: int, prompt: Sequence[int], said: Sequence[int], continues: int | None = None, **more: Any) -> Turn:
    return Turn(
        index=index,
        agent=more.pop("agent", "solver"),
        generation=generation(prompt, said),
        continues=continues,
        **{
            "request": ({"role": "user", "content": f"question {index}"},),
            "message": {"role": "assistant", "content": f"answer {index}"},
            **more,
        },
    )


def episode(name: str = "g0-0", reward: float | None = 1.0, **more: Any) -> Episode:
    """A solver of two turns, where the first is continued in two ways, a critic that is not trained, an outsider."""
    call = {"id": "c", "type": "function", "function": {"name": "search", "arguments": '{"q": "pears"}'}}
    first, said = ids("Hi"), (*ids("an é"), END)
    turns = (
        turn(0, first, said, tools=({"type": "function", "function": {"name": "search"}},)),
        turn(1, [*first, *said, *ids("more")], ids("ok"), 0, message={"role": "assistant", "tool_calls": [call]}),
        turn(3, ids("judge"), ids("fine"), agent="critic", trained=False, branch_reason="another agent"),
        turn(4, [*first, *said, *ids("else")], ids("no!"), 0),
    )
    outside = ExternalTurn(
        index=2, agent="oracle", role="default", model="big", request=({"role": "user", "content": "help"},),
        message={"role": "assistant", "content": "bananas"}, prompt_tokens=11, completion_tokens=2,
    )  # fmt: skip
    group, _, attempt = name.rpartition("-")
    settings: dict[str, Any] = {
        "workflow_task": WorkflowTask(
            task=Task(task_id=f"task-{group}", main_query=f"What is {group}?", metadata={"answer": 4}),
            episode_id=name,
            group_id=group,
            split=more.pop("split", Split.TRAIN),
            attempt=int(attempt),
        ),
        "turns": turns,
        "output": WorkflowOutput(reward=reward, metadata={"final": 4}),
        "verdict": None if reward is None else JudgeOutput(reward=reward, is_success=reward >= 1),
        "reward_source": "" if reward is None else "judge",
        "stop_reason": StopReason.MODEL_FAILED if reward is None else StopReason.COMPLETED,
        "error": "the engine is gone\nTraceback …" if reward is None else "",
        "seconds": 1.5,
        "external": (outside,),
    }
    return Episode(**settings | more)


def credited(*episodes: Episode, advantage: float = 0.5) -> list[Sample]:
    samples = [sample for one in episodes for sample in build_samples(one).samples]
    return [replace(s, advantage=advantage, token_weight=0.25) for s in samples]


def write_log(run: Path, episodes: Sequence[tuple[int, Episode]], credit: Mapping[int, Sequence[Sample]] = {}) -> None:
    log = EpisodeLogWriter(run / "episodes")
    for step, one in episodes:
        log.episode(step, one)
    for step, samples in credit.items():
        log.credit(step, samples)
    log.close()


def make_run(path: Path, *, ended: bool = False) -> Path:
    """A run folder with a config and two rows of metrics, and no log yet."""
    (path / "episodes").mkdir(parents=True)
    (path / "resolved.yaml").write_text(
        "astuner:\n  backbone: local\n  model: {path: tiny-calculator}\n  trainer_common: {total_steps: 7}\n"
    )
    (path / "run.log").write_text("2026-01-01 00:00:00 begun\n")
    add_metrics(path, {"step": 0, "time": 100.0, "val/success": 0.25})
    add_metrics(path, {"step": 1, "time": 101.0, "reward/mean": 0.5, "success/mean": 0.5, "loss": 0.125})
    if ended:
        (path / "summary.json").write_text('{"metrics": {}, "ledger": {}}')
    return path


def add_metrics(run: Path, row: Mapping[str, Any]) -> None:
    append_jsonl(run / "metrics.jsonl", row)


def good_run(path: Path) -> Path:
    """An ended run with two groups of two attempts, one of which failed, and a validation."""
    run = make_run(path, ended=True)
    first, second = episode("g0-0", 1.0), episode("g0-1", 0.0)
    others = [(2, episode("g1-0", 0.5)), (2, episode("g1-1", None))]
    write_log(
        run,
        [(0, episode("v0-0", 1.0, split=Split.VALIDATION)), (1, first), (1, second), *others],
        {1: credited(first, second)},
    )
    byte_tokenizer(run / "episodes" / "tokenizer" / "tokenizer.json")
    return run


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    raw: bytes

    @property
    def json(self) -> Any:
        assert self.headers["content-type"].startswith("application/json"), self.headers
        return json.loads(self.raw)

    @property
    def ok(self) -> Any:
        assert self.status == 200, (self.status, self.raw)
        return self.json

    @property
    def error(self) -> str:
        assert self.status >= 400, self.raw
        assert set(self.json) == {"error"}
        return self.json["error"]


@dataclass
class Client:
    """Requests to one viewer, each on a connection of its own."""

    port: int
    host: str = "127.0.0.1"

    def get(
        self,
        path: str,
        query: Sequence[tuple[str, Any]] | Mapping[str, Any] = (),
        method: str = "GET",
        body: str | None = None,
        **headers: str,
    ) -> Answer:
        full = path + (f"?{urlencode(query)}" if query else "")
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        try:
            connection.request(method, full, body, headers={k.replace("_", "-"): v for k, v in headers.items()})
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.headers.items()}, response.read())
        finally:
            connection.close()

    def of(self, run: str, what: str = "", query: Sequence[tuple[str, Any]] | Mapping[str, Any] = ()) -> Answer:
        return self.get(f"/api/runs/{quote(run, safe='')}" + (f"/{what}" if what else ""), query)

    def label(self, run: str, episode: str, said: Any, **headers: str) -> Answer:
        """What the page sends."""
        path = f"/api/runs/{run}/episodes/{episode}/label"
        return self.get(path, method="POST", body=json.dumps(said), **{"content_type": "application/json"} | headers)

    @contextmanager
    def live(self, run: str, cursor: str = "") -> Iterator[Iterator[tuple[str, Any]]]:
        """The events of a run, as they come."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        try:
            connection.request("GET", f"/api/runs/{run}/live?{urlencode({'cursor': cursor})}")
            yield _events(connection.getresponse())
        finally:
            connection.close()


def _events(response: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    name = ""
    while line := response.readline().decode():
        field, _, value = line.rstrip("\n").partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)


@contextmanager
def viewing(
    root: Path, *, only: Path | None = None, host: str = "127.0.0.1", token: str = "", static: Path = STATIC
) -> Iterator[Client]:
    """A viewer in a thread, on a free port."""
    over = threading.Event()
    with open_socket(host, 0) as listening:
        port = listening.getsockname()[1]
        viewer = Viewer(
            Runs(root, only=only), host=host, port=port, token=token, static=static, is_stopping=over.is_set
        )

        async def serve() -> None:
            async with running(viewer, listening, grace=3.0):
                await asyncio.to_thread(over.wait)
            viewer.close()

        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        try:
            yield Client(port)
        finally:
            over.set()
            thread.join(30)
            assert not thread.is_alive()
