"""Convert exports of observability platforms to rows of the collector: spans as its rows, scores as feedback.

Phoenix (a span as an object or a row of a data frame), Langfuse (observations, traces and scores of its API, its web
export and its blob storage) and logfire (rows of a query) use different names, which ``tables.yaml`` lists. Invariant:
any other row is reported, and so is a score that is not from a person or has no value from -1 to 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from astuner_flywheel.receiver.store import Row, exported_row
from astuner_flywheel.traces.conversation import IDS, TABLES, BadFeedback, Given, read_given
from astuner_flywheel.traces.messages import decoded, lookup, nanoseconds

_LISTS = ("data", "traces", "observations", "scores")
_OF_SCORES = {"dataType", "data_type", "annotator_kind"}
_MACHINES = {"EVAL", "LLM", "CODE"}


class NoRow(ValueError):
    """The row cannot be used. The message has the reason."""


class LeftOut(NoRow):
    """The row is readable and intentionally ignored."""


def unfolded(row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows in an API response or a downloaded trace, or the row itself."""
    lists = [name for name in _LISTS if isinstance(row.get(name), list)]
    if not lists:
        yield row
        return
    trace = row["trace"] if isinstance(row.get("trace"), Mapping) else row
    of: dict[str, Any] = {}
    if trace.get("id"):
        of = {"traceId": trace["id"], "sessionId": trace.get("sessionId")}
        yield {name: value for name, value in trace.items() if name not in _LISTS}
    for item in (item for name in lists for item in row[name]):
        if isinstance(item, Mapping):  # traces in a list only have the IDs of their observations and scores
            yield from unfolded({**of, **{name: value for name, value in item.items() if value is not None}})


def kept(row: Mapping[str, Any]) -> Row | Given:
    """Return a span or feedback.

    :raises NoRow: The row is neither.
    """
    if _OF_SCORES & row.keys():
        return opinion(row)
    of = {what: _first(row, names) for what, names in TABLES["exported"].items()}
    if of["trace"] is None and of["startTimeUnixNano"] is not None and row.keys() & {"input", "output"}:
        of["trace"] = of["span"]  # a Langfuse trace has the input and output of its outermost call
    trace_id, span_id = of.pop("trace"), of.pop("span")
    if trace_id is None or span_id is None:
        raise NoRow(f"no messages (its fields: {', '.join(list(row)[:8]) or 'none'})")
    given = decoded(row.get("attributes"))
    attributes = dict(given) if isinstance(given, Mapping) else {}
    attributes |= {k.removeprefix("attributes."): v for k, v in row.items() if k.startswith("attributes.")}
    for name, columns in TABLES["exported_as"].items():
        if lookup(attributes, name) is None:
            attributes[name] = _first(row, columns)
    known = {column: _text(value) for column, value in of.items() if value is not None}
    made = exported_row(str(trace_id), str(span_id), {k: v for k, v in attributes.items() if v is not None}, **known)
    if isinstance(made, str):
        raise NoRow(made)
    return made


def opinion(row: Mapping[str, Any]) -> Given:
    """Return the feedback in a score.

    :raises NoRow: It is not a person's opinion on an answer.
    """
    if isinstance(subject := row.get("subject"), Mapping):  # version 3 of Langfuse's API
        row = {**row, **subject, f"{subject.get('kind')}Id": subject.get("id")}
    of = {what: _first(row, names) for what, names in TABLES["scored"].items()}
    if str(of["by"]).upper() in _MACHINES:
        raise LeftOut("a score given by a program")
    value, kind = of["value"], str(of["type"]).upper()
    said = {"comment": of["comment"], "rating": TABLES["labels"].get(str(of["label"] or value).lower())}
    try:
        if kind == "CORRECTION":
            said["correction"] = of["label"] or value
        elif said["rating"] is None and value is not None:
            number = float(value)
            said["rating"] = (1.0 if number else -1.0) if kind == "BOOLEAN" or isinstance(value, bool) else number
        if of["time"] is not None:
            said["time"] = nanoseconds(of["time"]) / 1e9
        return read_given({**{name: of[name] for name in IDS}, **said})
    except BadFeedback as e:
        raise NoRow(f"a score: {e}") from None
    except (TypeError, ValueError, OverflowError):
        raise NoRow("a score that is neither a number nor a thumb") from None


def _first(row: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((value for name in names if (value := lookup(row, name)) not in (None, "")), None)


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)
