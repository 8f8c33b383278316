"""Reads recordings of conversations: a run's own ``episodes/*.jsonl``, or requests and responses in OpenAI's words.

One JSON object per line.  A recorded request has ``messages`` (at the top, or in ``request`` or ``body``), perhaps
``tools``, and what came back as ``response`` or ``choices``; ``session`` (or another of `SESSIONS`) says which lines
belong together, otherwise all do.

Invariant: a line that cannot be read is an error with its place; nothing is skipped in silence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from astuner.contracts.errors import DataError, UnsupportedRequest
from astuner.contracts.messages import normalise
from astuner.contracts.types import FinishReason

SESSIONS = ("session", "session_id", "conversation_id", "episode_id", "key", "api_key")
"""Fields that tell conversations apart; the values of the last two are secret, and are not shown."""
_SECRET = ("key", "api_key")


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """One request and its reply."""

    place: str
    """``file:line``, and the turn where a line holds several."""
    messages: tuple[Mapping[str, Any], ...]
    """Normalised."""
    tools: tuple[Mapping[str, Any], ...]
    reply: Mapping[str, Any]
    """Normalised."""
    cut: bool
    """A length limit ended it."""


@dataclass(kw_only=True)
class Recording:
    """What one agent was asked, in order."""

    name: str
    turns: list[Recorded] = field(default_factory=list)


def read_trace(path: Path) -> list[Recording]:
    """Every conversation in ``path``, in order of appearance.

    :raises DataError: the file cannot be read, or a line of it; names file and line.
    """
    recordings: dict[str, Recording] = {}
    names: dict[tuple[str, str], str] = {}
    for place, line in _lines(path):
        try:
            if "turns" in line:
                for name, recorded in _turns(line, place):
                    recordings.setdefault(name, Recording(name=name)).turns.append(recorded)
            else:
                name = _session(line, names)
                recordings.setdefault(name, Recording(name=name)).turns.append(_request(line, place))
        except UnsupportedRequest as e:
            raise DataError(f"{place}: {e}") from e
        except (KeyError, IndexError, TypeError, AttributeError) as e:
            raise DataError(
                f"{place}: this is neither an episode of a run nor a recorded request ({type(e).__name__}: {e}); write "
                '{"messages": […], "tools": […], "response": {"choices": […]}, "session": "…"}'
            ) from e
    if not recordings:
        raise DataError(f"{path}: there is no conversation in it")
    return list(recordings.values())


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f"{path} cannot be read: {e}") from e
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise DataError(f"{place}: this line is not JSON: {e}") from e
        if not isinstance(value, dict):
            raise DataError(f"{place}: this line is a JSON {type(value).__name__}, not an object")
        yield place, value


def _turns(line: Mapping[str, Any], place: str) -> Iterator[tuple[str, Recorded]]:
    """The turns of a transcript (`astuner.rollout.transcript`), whole requests made of what was new in each."""
    known: dict[int, Recorded] = {}
    offered = line.get("tools", [])
    for number, turn in enumerate(line["turns"]):
        if "model" in turn and "messages" in turn:  # what a model outside of the run said
            continue
        index, before = turn.get("turn", number), known.get(turn["continues"])
        if turn["continues"] is not None and before is None:
            raise DataError(f"{place}: turn {index} continues turn {turn['continues']}, which is not there")
        earlier = (*before.messages, before.reply) if before else ()
        tools = offered[turn["tools"]] if "tools" in turn else before.tools if before else ()
        known[index] = Recorded(
            place=f"{place}, turn {index}",
            messages=(*earlier, *(normalise(m) for m in turn["new_messages"])),
            tools=tuple(tools),
            reply=normalise(turn["reply"]),
            cut=turn["finish_reason"] == FinishReason.LENGTH.value,
        )
        yield f"{line['episode_id']}/{turn['agent']}", known[index]


def _request(line: Mapping[str, Any], place: str) -> Recorded:
    request = next((line[name] for name in ("request", "body") if isinstance(line.get(name), Mapping)), line)
    response = line.get("response", line)
    finish = None
    if isinstance(response, Mapping) and response.get("choices"):
        choice = response["choices"][0]
        message, finish = choice["message"], choice.get("finish_reason")
    elif isinstance(response, Mapping) and isinstance(response.get("message"), Mapping):
        message, finish = response["message"], response.get("finish_reason")
    elif response is not line and isinstance(response, Mapping) and {"content", "tool_calls"} & response.keys():
        message, finish = response, response.get("finish_reason")
    else:
        raise DataError(
            f'{place}: there is no response in it; record what came back as "response", an OpenAI chat completion '
            "(one that was streamed, put together) or its message"
        )
    return Recorded(
        place=place,
        messages=tuple(normalise(m) for m in request["messages"]),
        tools=tuple(request.get("tools") or ()),
        reply=normalise({**message, "role": "assistant"}),
        cut=finish == "length",
    )


def _session(line: Mapping[str, Any], names: dict[tuple[str, str], str]) -> str:
    """Which conversation a line belongs to; a name that may be shown."""
    for label in SESSIONS:
        value = line.get(label)
        if isinstance(value, (str, int)):
            known = (label, str(value))
            if known not in names:
                names[known] = f"{label} no. {len(names) + 1}" if label in _SECRET else str(value)
            return names[known]
    return "trace"
