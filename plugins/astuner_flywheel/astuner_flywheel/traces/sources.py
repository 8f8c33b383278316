"""Where traces come from: a file's first bytes say which of the kinds it is.

- An SQLite file, AgentScope Studio's in all its layouts or our collector's.  Columns are looked up, not taken for
  granted.  The file is copied as it is at one moment and the copy is read, so that reading takes as long as it takes
  while Studio goes on writing.  Invariant: the file itself is opened read-only, and locked for no longer than it takes
  to copy it.
- OTLP spans, and logs that belong to them, as JSON lines: they go through a collector's database of their own, made
  for the occasion, which brings together what is out of order and drops what is there twice, in bounded memory and with
  the same code.  So do spans that a platform exported (see `exports`), as JSON lines, one document or CSV.
- Chats as JSON lines: one conversation a line, ``{"messages": [...]}`` as OpenAI writes messages.  A line may also
  have ``feedback`` (an object, a number or a thumb) or its fields beside the messages; ``conversation_id`` (or ``id``),
  ``response_id``, ``trace_id``, ``model``, ``created`` (seconds since 1970).

Of files of lines, one line is in memory at a time and never more of it than its limit.

Of the spans of one trace, an agent's reply is its outermost ``invoke_agent`` span; agents that it calls on the way are
its own business.  What was asked and answered stands in that span, what came before (system prompt, history) in its
first ``chat`` span; where one of the two is missing, the other has to do, and where the messages are missing,
AgentScope's ``Msg`` as text.  A trace without agents is its chats, each up to the longest that goes on with it.
Invariant: a span that gives no conversation is counted with the reason.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import itertools
import json
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from astuner.contracts.errors import DataError
from astuner_flywheel.receiver.store import APPLICATION, VERSION, Decoded, NotOtlp, Store, from_json
from astuner_flywheel.traces.conventions import understood
from astuner_flywheel.traces.conversation import (
    LATEST,
    TABLES,
    BadFeedback,
    Conversation,
    Feedback,
    Given,
    Tally,
    read_feedback,
    read_given,
)
from astuner_flywheel.traces.exports import LeftOut, NoRow, kept, unfolded
from astuner_flywheel.traces.messages import (
    CHAT,
    INVOKE_AGENT,
    STEP,
    Message,
    Span,
    Unreadable,
    decoded,
    nanoseconds,
    parse_msg,
    read_messages,
    system_message,
    text_of,
)
from astuner_http.strict_json import parse_json

_BOM = b"\xef\xbb\xbf"


def raw_lines(path: Path, limit: int, tally: Tally) -> Iterator[tuple[str, bytes]]:
    """``path:number`` and the line, without empty ones; a line over ``limit`` bytes is counted and passed over.

    :raises DataError: the file cannot be read, or (on_bad: stop) such a line.
    """
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(limit + 2):
                number += 1
                place = f"{path}:{number}"
                if len(line) == limit + 2 and not line.endswith(b"\n"):
                    rest = line
                    while rest and not rest.endswith(b"\n"):
                        rest = file.readline(1 << 16)
                    tally.unreadable(f"a line longer than {limit:,} bytes (max_line_bytes)", place)
                    continue
                line = line.removeprefix(_BOM) if number == 1 else line
                if line.strip():
                    tally.read["lines"] += 1
                    yield place, line.rstrip(b"\r\n")
    except OSError as e:
        raise DataError(f"cannot read {path.absolute()}: {e.strerror or e}; correct the path or its permissions") from e


def objects(path: Path, limit: int, tally: Tally) -> Iterator[tuple[str, dict[str, Any]]]:
    """The same as JSON objects; a line that holds none is counted.

    :raises DataError: as `raw_lines`.
    """
    for place, line in raw_lines(path, limit, tally):
        try:
            found = parse_json(line)
        except ValueError as e:
            reason = str(e)
            if tally.on_bad == "skip":  # without detail: it is counted together with its like
                reason = f"a line that is no JSON object: {reason.partition(' from byte')[0].partition(': line')[0]}"
            tally.unreadable(reason, place)
            continue
        yield place, found


def items(path: Path, limit: int, tally: Tally) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file that is one JSON document, a list of them or a single one.

    :raises DataError: it is none, or has more than 4 times ``limit`` bytes.
    """
    if path.stat().st_size > _ONE_DOCUMENT * limit:
        raise DataError(
            f"{path} is one JSON document of more than {_ONE_DOCUMENT * limit:,} bytes, which are not read at once; "
            f"write an object a line first: jq -c '.[]' {path.name} > {path.stem}.jsonl"
        )
    try:  # on the document's first line, so that lines are named as they are
        found = parse_json(b'{"data":' + path.read_bytes().removeprefix(_BOM) + b"}")["data"]
    except ValueError as e:
        raise DataError(f"{path} cannot be read as JSON: {e}") from None
    for number, item in enumerate(found if isinstance(found, list) else [found], 1):
        tally.read["items"] += 1
        if isinstance(item, dict):
            yield f"{path}, item {number}", item
        else:
            tally.unreadable("an item that is no JSON object", f"{path}, item {number}")


def records(path: Path, limit: int, tally: Tally) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a CSV file with a line of names.

    :raises DataError: it cannot be read.
    """
    csv.field_size_limit(limit)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, restkey="", strict=True)
            for row in reader:
                tally.read["rows"] += 1
                yield f"{path}:{reader.line_num}", {name: value for name, value in row.items() if value}
    except (csv.Error, UnicodeError) as e:
        raise DataError(f"{path}:{reader.line_num + 1} cannot be read as CSV: {e}; export it as JSON lines") from e


_OPINIONS = ("rating", "thumbs", "correction", "comment")


def _chat(place: str, row: Mapping[str, Any], tally: Tally) -> Iterator[Conversation]:
    """The answered conversation of a line of chats; a line that holds none is counted.

    :raises DataError: (on_bad: stop) the line is bad.
    """
    try:
        messages, feedback = read_messages(row["messages"]), _feedback(row)
    except (Unreadable, BadFeedback) as e:
        tally.unreadable(str(e), place)
        return
    end, answer, after = _last_answered(messages)
    if not answer:
        has_user = any(m["role"] == "user" and text_of(m).strip() for m in messages)
        tally.drop(NO_ANSWER if has_user else NO_QUESTION, place)
        return
    yield Conversation(
        messages=tuple(messages[: end + 1]),
        answer=answer,
        source=place,
        trace_id=_named(row, "trace_id"),
        conversation_id=_named(row, "conversation_id") or _named(row, "id"),
        response_ids=tuple(filter(None, [_named(row, "response_id")])),
        model=_named(row, "model"),
        started=_seconds(row.get("created")),
        after=after,
        feedback=feedback,
    )


def _chats_and_exports(
    rows: Iterable[tuple[str, Mapping[str, Any]]], tally: Tally
) -> Iterator[Decoded | Conversation | Given]:
    """What a file's objects hold: chats, spans that a platform exported, scores; each other one is counted."""
    for place, row in rows:
        if "messages" in row:
            yield from _chat(place, row, tally)
            continue
        if "resourceSpans" in row:  # a request on several lines
            yield from _requests([(place, json.dumps(row).encode())], tally)
            continue
        for each in unfolded(row):
            try:
                found = kept(each)
            except LeftOut as e:
                tally.drop(str(e), place)
                continue
            except NoRow as e:
                tally.unreadable(str(e), place)
                continue
            if isinstance(found, Given):
                tally.read["feedback"] += 1
            yield found if isinstance(found, Given) else Decoded([found])


def feedback_file(path: Path, limit: int, tally: Tally) -> Iterator[Given]:
    """Feedback from a JSON Lines file with the fields of ``POST /feedback``.

    :raises DataError: as `chats`.
    """
    for place, row in objects(path, limit, tally):
        try:
            given = read_given(row)
        except BadFeedback as e:
            tally.unreadable(f"feedback: {e}", place)
            continue
        tally.read["feedback"] += 1
        yield given


def _last_answered(messages: list[Message]) -> tuple[int, str, str]:
    """Where the last user's message with an answer is, the answer, and what the user said next."""
    after = ""
    for i in range(len(messages) - 1, -1, -1):
        if messages[i]["role"] != "user":
            continue
        reply = []
        for message in messages[i + 1 :]:
            if message["role"] == "user":
                break
            reply.append(message)
        last = next((m for m in reversed(reply) if m["role"] == "assistant"), None)
        if last is not None and not last.get("tool_calls") and text_of(last).strip() and text_of(messages[i]).strip():
            return i, text_of(last), after
        after = text_of(messages[i])
    return 0, "", ""


def _feedback(row: Mapping[str, Any]) -> Feedback:
    given = row.get("feedback")
    if given is None:
        beside = {name: row[name] for name in _OPINIONS if row.get(name) is not None}
        return read_feedback(beside) if beside else Feedback()
    if not isinstance(given, Mapping):
        return read_feedback({"rating": given})
    if unknown := [name for name in given if name not in _OPINIONS]:
        raise BadFeedback(f"feedback.{str(unknown[0])[:80]}", f"is not known here; there are {', '.join(_OPINIONS)}")
    return read_feedback(given) if any(value is not None for value in given.values()) else Feedback()


def _named(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    return str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else ""


def _seconds(value: Any) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < LATEST:
        return float(value)
    return None


MAGIC = b"SQLite format 3\0"
LOCK_TIMEOUT = 15.0
"""Seconds to wait for somebody who has locked the file."""
LONGEST_ATTRIBUTES = 16 << 20
"""Characters of one span's attributes."""
READ = "databases of AgentScope Studio (1.0.x: a span_table with name and attributes) and of `astuner data collect`"

_COLUMNS: dict[str, list[str]] = TABLES["columns"]
"""What is read -> the columns that layouts have it in."""
_OF_PROCESS = {"runId", "run_id"}
_OLDEST_SCOPE = "agentscope.tracing"
_OF_INTEREST = "('chat', 'text_completion', 'generate_content', 'invoke_agent')"


@contextmanager
def snapshot(path: Path, timeout: float = LOCK_TIMEOUT) -> Iterator[sqlite3.Connection]:
    """A private copy of the database as it is now; gone after the block.

    :raises DataError: it is none, is damaged, or stays locked.
    """
    with tempfile.TemporaryDirectory(prefix="astuner-traces-") as folder:  # for this user only
        try:
            with closing(sqlite3.connect(Path(folder) / "copy.sqlite")) as copy:
                uri = f"file:{quote(str(path.absolute()))}?mode=ro"
                with closing(sqlite3.connect(uri, uri=True, timeout=timeout, isolation_level=None)) as source:
                    source.execute("BEGIN")
                    # This waits for whoever holds a lock; copying would wait for ever.
                    source.execute("SELECT count(*) FROM sqlite_master").fetchone()
                    source.backup(copy)
                yield copy
        except sqlite3.Error as e:
            raise DataError(_says(path, e, timeout)) from e


def check_layout(database: sqlite3.Connection, path: Path) -> dict[str, str]:
    """What is read -> its column in this layout.

    :raises DataError: it is a layout that is not known; says what was found.
    """
    tables = [row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    if "span_table" not in tables:
        raise DataError(f"{path} has no span_table, but {', '.join(tables[:12]) or 'no table at all'}; read are {READ}")
    application, version = (database.execute(f"PRAGMA {n}").fetchone()[0] for n in ("application_id", "user_version"))
    if application == APPLICATION and version > VERSION:
        raise DataError(
            f"{path} is a collector's file of version {version}, and {VERSION} is read; update astuner-flywheel"
        )
    columns = [row[1] for row in database.execute("PRAGMA table_info(span_table)")]
    found = {what: next((c for c in names if c in columns), "") for what, names in _COLUMNS.items()}
    if missing := [what for what in ("name", "attributes") if not found[what]]:
        raise DataError(
            f"{path} has a span_table without {' and '.join(missing)}; its columns are {', '.join(columns[:40])}. "
            f"Read are {READ}"
        )
    return found


def traces(database: sqlite3.Connection, layout: dict[str, str], path: str, tally: Tally) -> Iterator[list[Span]]:
    """The spans of one trace after the other, each trace whole whatever the order they were written in."""
    attributes = layout["attributes"]
    if layout["operation"]:
        of_interest = f"{layout['operation']} IS NULL OR {layout['operation']} IN {_OF_INTEREST}"
        attributes = f"CASE WHEN {of_interest} THEN {attributes} ELSE '{{}}' END"
    names = [what for what in _COLUMNS if what not in ("attributes", "events")]
    chosen = ", ".join(f"{layout[what] or 'NULL'} AS {what}" for what in names)
    if layout["events"]:
        chosen += f", CASE WHEN {layout['events']} LIKE '%gen_ai%' THEN {layout['events']} END AS events"
    trace = layout["trace"] or "CAST(rowid AS text)"
    query = f"SELECT {trace} AS trace_of, {attributes} AS attributes, {chosen} FROM span_table ORDER BY trace_of, rowid"
    cursor = database.execute(query)
    fields = [column[0] for column in cursor.description]
    rows = (dict(zip(fields, row, strict=True)) for row in cursor)
    has_logs = database.execute("SELECT 1 FROM sqlite_master WHERE name = 'event_table'").fetchone()
    for trace_id, of_trace in itertools.groupby(rows, key=lambda row: str(row["trace_of"])):
        logs = _events_of(database, trace_id) if has_logs else {}
        spans: dict[str, Span] = {}
        for row in of_trace:
            tally.read["spans"] += 1
            told = logs.get(str(row["span"]), [])
            span = _span(trace_id, row, layout, f"{path}, trace {trace_id}", tally, told)
            if span is not None and span.span_id in spans:
                tally.drop("a span that is there twice", f"{path}, trace {trace_id}")
            elif span is not None:
                spans[span.span_id] = span
        if spans:
            tally.read["traces"] += 1
            yield list(spans.values())
    if has_logs:
        _count_lost_events(database, path, tally)


def _count_lost_events(database: sqlite3.Connection, path: str, tally: Tally) -> None:
    of_no_span = "NOT EXISTS (SELECT 1 FROM span_table s WHERE s.traceId = e.traceId AND s.spanId = e.spanId)"
    for trace_id, span_id in database.execute(f"SELECT traceId, spanId FROM event_table e WHERE {of_no_span}"):
        tally.drop("a log of a span that is missing", f"{path}, trace {trace_id}, span {span_id}")


def _events_of(database: sqlite3.Connection, trace_id: str) -> dict[str, list[Any]]:
    """The id of a span -> its events that came as logs, oldest first."""
    found: dict[str, list[Any]] = {}
    query = "SELECT spanId, event FROM event_table WHERE traceId = ? ORDER BY timeUnixNano, rowid"
    for span_id, event in database.execute(query, (trace_id,)):
        found.setdefault(span_id, []).append(json.loads(event))
    return found


def feedback_of(database: sqlite3.Connection, tally: Tally) -> Iterator[Given]:
    """What users said, of a collector's file; nothing in Studio's, which has no place for it."""
    if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'feedback_table'").fetchone():
        return
    query = "SELECT receivedAt, responseId, traceId, conversationId, rating, correction, comment FROM feedback_table"
    for at, response, trace, conversation, rating, correction, comment in database.execute(f"{query} ORDER BY id"):
        tally.read["feedback"] += 1
        yield Given(
            feedback=Feedback(rating=rating, correction=correction or "", comment=comment or ""),
            response_id=response or "",
            trace_id=trace or "",
            conversation_id=conversation or "",
            time=at or 0.0,
        )


def _span(
    trace_id: str, row: dict[str, Any], layout: dict[str, str], place: str, tally: Tally, logs: Sequence[Any]
) -> Span | None:
    text = row["attributes"]
    if isinstance(text, str) and len(text) > LONGEST_ATTRIBUTES:
        tally.unreadable(f"a span's attributes with more than {LONGEST_ATTRIBUTES:,} characters", place)
        return None
    try:
        attributes, events = json.loads(text or "{}"), json.loads(row.get("events") or "[]")
    except (ValueError, TypeError, RecursionError):
        attributes = events = None
    if not isinstance(attributes, dict):
        tally.unreadable("a span's attributes are no JSON object", place)
        return None
    scope, version = _scope(row)
    if not scope and layout["conversation"] in _OF_PROCESS:
        scope = _OLDEST_SCOPE
    span = Span(
        trace_id=trace_id,
        span_id=str(row["span"] or trace_id),
        parent_id=str(row["parent"] or "").strip("0") and str(row["parent"]),
        name=str(row["name"] or "").strip(),
        start=nanoseconds(row["start"]),
        end=nanoseconds(row["end"]),
        attributes=attributes,
        scope=scope,
        scope_version=version,
        conversation_id=str(row["conversation"] or ""),
        model=str(row["model"] or ""),
        events=[*(events if isinstance(events, list) else ()), *logs],
    )
    if not attributes and row["operation"]:  # one that is of no interest, so it was not read
        return replace(span, kind=f"gen_ai {row['operation']} span")
    try:
        return understood(span)
    except RecursionError:
        tally.unreadable("a span's attributes are nested too deeply", place)
        return None


def _scope(row: dict[str, Any]) -> tuple[str, str]:
    name, version = row["scope"], row["version"]
    if not name and isinstance(row["scope_json"], str):
        try:
            whole = json.loads(row["scope_json"])
        except ValueError:
            whole = None
        if isinstance(whole, dict):
            name, version = whole.get("name"), whole.get("version")
    return str(name or ""), str(version or "")


def _says(path: Path, e: sqlite3.Error, timeout: float) -> str:
    text = str(e)
    if "locked" in text or "busy" in text:
        return f"{path} stayed locked for {timeout:g} s; wait until whoever writes to it is done, or copy the file"
    if "not a database" in text:
        return f"{path} is no SQLite database; read are {READ}"
    if "unable to open" in text:
        return f"cannot open {path} ({text}); where there is a -wal file, its folder must be one you may write to"
    return f"{path} cannot be read ({text}); a damaged file may be saved with: sqlite3 {path.name} .recover"


NO_MESSAGES = "without messages; the application has to record contents"
"""Behind the kind of a span; so are the next two."""
ALONE = "in a trace without a model's or an agent's"
NOT_UNDERSTOOD = "with contents that are no messages as its convention writes them"
NO_ANSWER = "no answer in words"
NO_QUESTION = "no user's message"
CUT = "its texts are cut, since they were too long for a span"
ORPHAN = "an agent's span whose parent is missing, beside a complete one"


def conversations(spans: Sequence[Span], source: str, tally: Tally) -> Iterator[Conversation]:
    """The conversations of one trace, in the order in which they began."""
    if not any(span.operation in (CHAT, INVOKE_AGENT) for span in spans):
        spans = _outermost_step(spans)
    by_id = {span.span_id: span for span in spans}
    agents = [span for span in spans if span.operation == INVOKE_AGENT]
    tops = _tops(agents, by_id, f"{source}, trace {spans[0].trace_id}", tally)
    chats: dict[str, list[Span]] = {}
    below: dict[str, list[Span]] = {}
    for chat in sorted((s for s in spans if s.operation == CHAT), key=lambda s: (s.start, s.end)):
        above = [a.span_id for a in _ancestors(chat, by_id) if a.operation == INVOKE_AGENT]
        chats.setdefault(above[0] if above else "", []).append(chat)
        for agent in above:
            below.setdefault(agent, []).append(chat)
    for top in tops:
        says_nothing = top.get("gen_ai.input.messages") is None and _function(top, "input") is None
        own = chats.get(top.span_id) or (below.get(top.span_id) if says_nothing else None)  # some are mere brackets
        yield from _conversation(top, own or [], source, tally)
    for chat in _longest(chats.get("", [])) if not tops else ():
        yield from _conversation(None, [chat], source, tally)
    if not tops and "" not in chats:  # none of both, or each within the other
        for span in spans:
            _not_understood(span, f"{source}, trace {span.trace_id}, span {span.span_id}", tally)


def _not_understood(span: Span, place: str, tally: Tally) -> None:
    """Count a span by its kind: one that holds nothing, or one that holds what was not understood."""
    what = NO_MESSAGES if span.operation in (CHAT, INVOKE_AGENT, STEP) else ALONE
    what = f"{NOT_UNDERSTOOD} ({', '.join(span.unread)})" if span.unread else what
    tally.drop(f"{span.kind} {what}", place)


def _outermost_step(spans: Sequence[Span]) -> Sequence[Span]:
    """Of a trace without agents and models: its outermost step that was asked and answered, as an agent."""
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        if span.operation == STEP and all(span.get(f"gen_ai.{side}.messages") for side in ("input", "output")):
            agent = {**span.attributes, "gen_ai.operation.name": INVOKE_AGENT}
            return [replace(span, attributes=agent, parent_id="")]
    return spans


def _tops(agents: Sequence[Span], by_id: Mapping[str, Span], place: str, tally: Tally) -> list[Span]:
    """Agents' spans within no other's."""
    outermost = sorted((a for a in agents if _agent_of(a, by_id) is None), key=lambda a: (a.start, -a.end))
    missing = {a.span_id: _missing_above(a, by_id) for a in outermost}
    # Where the parents of all are missing, the one that began first is not within another; nor are its siblings.
    above = "" if "" in missing.values() else next(iter(missing.values()), "")
    tops = [a for a in outermost if missing[a.span_id] == above]
    for _ in range(len(outermost) - len(tops)):
        tally.drop(ORPHAN, place)
    return tops


def _ancestors(span: Span, by_id: Mapping[str, Span]) -> Iterator[Span]:
    seen = {span.span_id}
    while (above := by_id.get(span.parent_id)) is not None and above.span_id not in seen:
        seen.add(above.span_id)
        yield above
        span = above


def _agent_of(span: Span, by_id: Mapping[str, Span]) -> Span | None:
    return next((above for above in _ancestors(span, by_id) if above.operation == INVOKE_AGENT), None)


def _missing_above(span: Span, by_id: Mapping[str, Span]) -> str:
    """The id of the missing span that a span is below; empty where its ancestors are all there."""
    top = [span, *_ancestors(span, by_id)][-1]
    return "" if top.parent_id in by_id else top.parent_id


def _longest(chats: Sequence[Span]) -> list[Span]:
    """Without those that another chat goes on with."""
    chains = [_chain(chat) for chat in chats]
    continued = {link for chain in chains for link in chain[:-1]}
    return [chat for chat, chain in zip(chats, chains, strict=True) if not chain or chain[-1] not in continued]


def _chain(chat: Span) -> list[bytes]:
    """What stands for the first, the first two … messages that a chat was asked with."""
    found: list[bytes] = []
    with contextlib.suppress(Unreadable):  # which is counted when it is its turn
        for message in _input(chat):
            text = json.dumps(message, sort_keys=True).encode()
            found.append(hashlib.blake2b(b"".join([*found[-1:], text]), digest_size=16).digest())
    return found


_NO_CONVERSATION = ("", "unknown", "[no_session_id]")
"""Conversation ids that AgentScope 1.x and 2.x send instead of none."""


def _conversation(top: Span | None, chats: Sequence[Span], source: str, tally: Tally) -> Iterator[Conversation]:
    main = top or chats[0]
    place = f"{source}, trace {main.trace_id}, span {main.span_id}"
    try:
        messages, answer = _content(top, chats)
    except Unreadable as e:
        tally.unreadable(str(e), place)
        return
    reason = ""
    if any(span.get("astuner.cut") is not None for span in (main, *chats)):  # as `astuner serve` says it
        reason = CUT
    elif not messages and not answer:
        _not_understood(main, place, tally)
        return
    elif not messages or not text_of(messages[-1]).strip():
        reason = NO_QUESTION
    elif not answer.strip():
        reason = NO_ANSWER
    if reason:
        tally.drop(reason, place)
        return
    ids = (s.text("gen_ai.conversation.id") or s.conversation_id or s.text("project.run_id") for s in (main, *chats))
    named = next((name for name in ids if name not in _NO_CONVERSATION), "")
    of_process = _names_its_process(main)
    spans = [*reversed(chats), main]
    named_by = [*(c.text("gen_ai.response.id") for c in [*chats, main]), *(span.span_id for span in spans)]
    models = (s.model or s.text("gen_ai.response.model") or s.text("gen_ai.request.model") for s in spans)
    yield Conversation(
        messages=tuple(messages),
        answer=answer,
        source=source,
        trace_id=main.trace_id,
        span_id=main.span_id,
        conversation_id="" if of_process else named,
        session=named if of_process else "",
        response_ids=tuple(dict.fromkeys(filter(None, named_by))),
        model=next(filter(None, models), ""),
        started=main.start / 1e9 if main.start else None,
    )


def _content(top: Span | None, chats: Sequence[Span]) -> tuple[list[Message], str]:
    """Messages up to the user's last one, and the answer."""
    if top is None:
        return _up_to_user(_input(chats[0])), _answer(_output(chats[0]))
    asked = _up_to_user(_input(top))
    whole = _input(chats[0]) if chats else []
    if asked and not any(m["role"] == "system" for m in asked):
        asked = _with_history(asked, whole)
    answer = _answer(_output(top)) or (_answer(_output(chats[-1])) if chats else "")
    return asked or _up_to_user(whole), answer


def _with_history(asked: Sequence[Message], whole: Sequence[Message]) -> list[Message]:
    """What the agent was asked, after what its model saw before; frameworks add hints behind the question."""
    query = text_of(asked[-1]).strip()
    for i in range(len(whole) - 1, -1, -1):
        if whole[i]["role"] == "user" and text_of(whole[i]).strip() == query and i + 1 >= len(asked):
            return list(whole[: i + 1])
    return [*(m for m in whole if m["role"] == "system"), *asked]


def _up_to_user(messages: Sequence[Message]) -> list[Message]:
    for i in range(len(messages) - 1, -1, -1):
        if messages[i]["role"] == "user":
            return list(messages[: i + 1])
    return []


def _answer(messages: Sequence[Message]) -> str:
    """The last text of an assistant, unless it went on to call a tool."""
    for message in reversed(messages):
        if message["role"] == "assistant":
            return "" if message.get("tool_calls") else text_of(message)
    return ""


def _input(span: Span) -> list[Message]:
    if (found := span.get("gen_ai.input.messages")) is not None:
        messages = read_messages(found)
        if not any(m["role"] == "system" for m in messages):
            messages = [*system_message(span.get("gen_ai.system_instructions")), *messages]
        return messages
    return _agentscope(_argument(_function(span, "input")))


def _output(span: Span) -> list[Message]:
    if (found := span.get("gen_ai.output.messages")) is not None:
        return read_messages(found)
    value = decoded(_function(span, "output"))
    if isinstance(value, Mapping) and "content" in value and "role" not in value:  # a ChatResponse
        value = {"role": "assistant", "content": value["content"]}
    return _agentscope(value)


def _function(span: Span, which: str) -> Any:
    """What AgentScope writes down of the call that a span stands for, in newer and older versions."""
    found = span.get(f"agentscope.function.{which}")
    return span.get(which) if found is None else found


def _argument(given: Any) -> Any:
    """The messages among the arguments of a call."""
    given = decoded(given)
    if not isinstance(given, Mapping):
        return None
    kwargs, args = decoded(given.get("kwargs")), decoded(given.get("args"))
    if isinstance(kwargs, Mapping):
        for name in ("messages", "msg", "msgs"):
            if kwargs.get(name) is not None:
                return kwargs[name]
    return args[0] if isinstance(args, (list, tuple)) and args else None


def _agentscope(value: Any) -> list[Message]:
    """Messages, or a ``Msg`` as text, or a list of such."""
    value = decoded(value)
    if value is None:
        return []
    if isinstance(value, str):
        return parse_msg(value)
    if isinstance(value, list) and any(isinstance(item, str) for item in value):
        return [message for item in value for message in _agentscope(item)]
    return read_messages(value)


def _names_its_process(span: Span) -> bool:
    """AgentScope 1.x calls the run of its program a conversation."""
    if span.scope == "agentscope":
        return span.scope_version.startswith("1.")
    return span.scope.startswith("agentscope.tracing") or span.get("project.run_id") is not None


DATABASE, SPANS, LINES, DOCUMENT, TABLE = "database", "OTLP JSON", "JSON lines", "JSON document", "CSV"
_HEAD = 64 << 10
_BATCH = 500
_ONE_DOCUMENT = 4
"""Times the limit of a line."""


def kind_of(path: Path) -> str:
    """`DATABASE`, `SPANS`, `LINES`, `DOCUMENT` or `TABLE`.

    :raises DataError: it is none of them, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except OSError as e:
        raise DataError(f"cannot read {path.absolute()}: {e.strerror or e}; correct the path") from e
    if not head.strip():
        raise DataError(f"{path} is empty")
    if head.startswith(MAGIC):
        return DATABASE
    if path.suffix.lower() in (".sqlite", ".sqlite3", ".db"):
        raise DataError(f"{path} is no SQLite database (it begins with {head[:12]!r}); read are {READ}")
    if head[:2] == b"\x1f\x8b":
        raise DataError(f"{path} is compressed; unpack it first: gunzip {path.name}")
    if head[:4] == b"PAR1":
        raise DataError(
            f"{path} is Parquet; write lines first: python -c \"import pandas; pandas.read_parquet('{path.name}')"
            f".to_json('{path.stem}.jsonl', orient='records', lines=True)\""
        )
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if path.suffix.lower() == ".csv":
        return TABLE
    if start.startswith(b"[") or start.partition(b"\n")[0].strip() == b"{":
        return DOCUMENT
    if not start.startswith(b"{"):
        raise DataError(
            f"{path} is no source of traces (it begins with {start[:12]!r}); read are SQLite databases of AgentScope "
            "Studio or of `astuner data collect`, OTLP as JSON, chats, and what Phoenix, Langfuse and logfire export, "
            "as JSON or CSV"
        )
    return SPANS if any(name in head for name in _OTLP) else LINES


_OTLP = (b'"resourceSpans"', b'"resource_spans"', b'"resourceLogs"', b'"resource_logs"')


def read_source(path: Path, limit: int, tally: Tally) -> Iterator[Conversation | Given]:
    """The conversations of a file, and the feedback if it holds some.

    :param limit: bytes of a line, in files of lines.
    :raises DataError: the file cannot be read, or (on_bad: stop) something in it.
    """
    kind = kind_of(path)
    if kind == DATABASE:
        found = _of_database(path, str(path), tally)
    elif kind == SPANS:
        found = _gathered(_requests(raw_lines(path, limit, tally), tally), path, tally)
    else:
        rows = {LINES: objects, DOCUMENT: items, TABLE: records}[kind](path, limit, tally)
        found = _gathered(_chats_and_exports(rows, tally), path, tally)
    for each in found:
        if isinstance(each, Conversation):
            tally.read["conversations"] += 1
        yield each


def _of_database(path: Path, shown: str, tally: Tally) -> Iterator[Conversation | Given]:
    with snapshot(path) as copy:
        layout = check_layout(copy, path)
        for spans in traces(copy, layout, shown, tally):
            yield from conversations(spans, shown, tally)
        yield from feedback_of(copy, tally)


def _requests(lines: Iterable[tuple[str, bytes]], tally: Tally) -> Iterator[Decoded]:
    for place, line in lines:
        try:
            decoded = from_json(line)
        except NotOtlp as e:
            reason = f"a line of OTLP: {e}" if tally.on_bad == "stop" else "a line that is no OTLP request"
            tally.unreadable(reason, place)
            continue
        for reason, n in decoded.rejected.items():
            for _ in range(n):
                tally.unreadable(reason, place)
        yield decoded


def _gathered(
    found: Iterable[Decoded | Conversation | Given], path: Path, tally: Tally
) -> Iterator[Conversation | Given]:
    """What is found, and then what its spans hold, which a collector's file of their own brings together."""
    with ExitStack() as opened:
        store, waiting = None, Decoded()
        for each in itertools.chain(found, [None]):
            if isinstance(each, Decoded):
                waiting.rows += each.rows
                waiting.events += each.events
            elif each is not None:
                yield each
            if len(waiting.rows) + len(waiting.events) >= (1 if each is None else _BATCH):
                if store is None:
                    folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="astuner-spans-"))
                    store = opened.enter_context(closing(Store(Path(folder) / "spans.sqlite")))
                for _ in range(len(waiting.rows) - store.add_spans(waiting.rows, waiting.events)):
                    tally.drop("a span that is there twice", str(path))
                waiting = Decoded()
        if store is not None:
            yield from _of_database(store.path, str(path), tally)
