"""Read traces from files. The first bytes of a file determine its kind.

- SQLite databases of AgentScope Studio (all layouts) or of the collector. Columns are looked up by name. The database
is
  copied at one moment, and the copy is read, so that Studio can continue to write. Invariant: the file is opened
  read-only and locked only during the copy.
- OTLP spans, and logs that belong to them, as JSON lines. They pass through a temporary collector database, which
brings
  them in order and removes duplicates in bounded memory with the same code. Spans exported from a platform (see
  `exports`) as JSON lines, one document or CSV are treated likewise.
- Chats as JSON lines: one conversation per line, ``{"messages": [...]}`` in OpenAI's format. A line may also have
  ``feedback`` (an object, a number or a thumb) or its fields, and ``conversation_id`` (or ``id``), ``response_id``,
  ``trace_id``, ``model`` and ``created`` (seconds since 1970).

Of files with lines, one line is in memory at a time, up to its limit.

In a trace, an agent's reply is its outermost ``invoke_agent`` span; nested agents are ignored. That span contains
question and answer, and its first ``chat`` span the earlier messages (system prompt, history). If one of the two is
missing, the other is used; without messages, AgentScope's ``Msg`` text is used. A trace without agents consists of its
chats, each up to the longest continuation. Invariant: spans without a conversation are counted with a reason.
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
    """Yield ``path:number`` and the line, without empty lines. Lines over ``limit`` bytes are counted and skipped.

    :raises DataError: The file cannot be read, or such a line exists with on_bad: stop.
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
    """Yield the same as JSON objects. Lines without an object are counted.

    :raises DataError: As `raw_lines`.
    """
    for place, line in raw_lines(path, limit, tally):
        try:
            found = parse_json(line)
        except ValueError as e:
            reason = str(e)
            if tally.on_bad == "skip":  # without details, so that similar lines are counted together
                reason = f"a line that is not a JSON object: {reason.partition(' from byte')[0].partition(': line')[0]}"
            tally.unreadable(reason, place)
            continue
        yield place, found


def items(path: Path, limit: int, tally: Tally) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a file with one JSON document: a list of objects or a single object.

    :raises DataError: The file is neither, or exceeds 4 times ``limit`` bytes.
    """
    if path.stat().st_size > _ONE_DOCUMENT * limit:
        raise DataError(
            f"{path} is one JSON document of more than {_ONE_DOCUMENT * limit:,} bytes, which is too large; convert it "
            f"to one object per line: jq -c '.[]' {path.name} > {path.stem}.jsonl"
        )
    try:  # start at the first line of the document, so that line numbers are right
        found = parse_json(b'{"data":' + path.read_bytes().removeprefix(_BOM) + b"}")["data"]
    except ValueError as e:
        raise DataError(f"{path} cannot be read as JSON: {e}") from None
    for number, item in enumerate(found if isinstance(found, list) else [found], 1):
        tally.read["items"] += 1
        if isinstance(item, dict):
            yield f"{path}, item {number}", item
        else:
            tally.unreadable("an item that is not a JSON object", f"{path}, item {number}")


def records(path: Path, limit: int, tally: Tally) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a CSV file with a header line.

    :raises DataError: The file cannot be read.
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
    """Yield the answered conversation of a line of chats. A line without one is counted.

    :raises DataError: The line is invalid with on_bad: stop.
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
    """Yield the contents of a file's objects: chats, exported spans and scores. Others are counted."""
    for place, row in rows:
        if "messages" in row:
            yield from _chat(place, row, tally)
            continue
        if "resourceSpans" in row:  # a request written on several lines
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
    """Yield feedback from a JSON Lines file with the fields of ``POST /feedback``.

    :raises DataError: As `objects`.
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
    """Return the position of the last answered user message, the answer, and the user's next message."""
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
        raise BadFeedback(f"feedback.{str(unknown[0])[:80]}", f"is not a field; available: {', '.join(_OPINIONS)}")
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
"""Seconds to wait if the file is locked."""
LONGEST_ATTRIBUTES = 16 << 20
"""Maximum characters of one span's attributes."""
READ = "databases of AgentScope Studio (1.0.x: a span_table with name and attributes) and of `astuner data collect`"

_COLUMNS: dict[str, list[str]] = TABLES["columns"]
"""Map fields to their columns in different layouts."""
_OF_PROCESS = {"runId", "run_id"}
_OLDEST_SCOPE = "agentscope.tracing"
_OF_INTEREST = "('chat', 'text_completion', 'generate_content', 'invoke_agent')"


@contextmanager
def snapshot(path: Path, timeout: float = LOCK_TIMEOUT) -> Iterator[sqlite3.Connection]:
    """Provide a private copy of the current database, and delete it afterwards.

    :raises DataError: The file is not a database, is damaged, or stays locked.
    """
    with tempfile.TemporaryDirectory(prefix="astuner-traces-") as folder:  # accessible by this user only
        try:
            with closing(sqlite3.connect(Path(folder) / "copy.sqlite")) as copy:
                uri = f"file:{quote(str(path.absolute()))}?mode=ro"
                with closing(sqlite3.connect(uri, uri=True, timeout=timeout, isolation_level=None)) as source:
                    source.execute("BEGIN")
                    # This waits for a lock with a timeout. Copying would wait forever.
                    source.execute("SELECT count(*) FROM sqlite_master").fetchone()
                    source.backup(copy)
                yield copy
        except sqlite3.Error as e:
            raise DataError(_says(path, e, timeout)) from e


def check_layout(database: sqlite3.Connection, path: Path) -> dict[str, str]:
    """Return the column of each field in this layout.

    :raises DataError: The layout is unknown. The message lists its tables or columns.
    """
    tables = [row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    if "span_table" not in tables:
        raise DataError(f"{path} has no span_table (tables: {', '.join(tables[:12]) or 'none'}); supported are {READ}")
    application, version = (database.execute(f"PRAGMA {n}").fetchone()[0] for n in ("application_id", "user_version"))
    if application == APPLICATION and version > VERSION:
        raise DataError(
            f"{path} is a collector's file of version {version}, but {VERSION} is supported; update astuner-flywheel"
        )
    columns = [row[1] for row in database.execute("PRAGMA table_info(span_table)")]
    found = {what: next((c for c in names if c in columns), "") for what, names in _COLUMNS.items()}
    if missing := [what for what in ("name", "attributes") if not found[what]]:
        raise DataError(
            f"{path} has a span_table without {' and '.join(missing)} (columns: {', '.join(columns[:40])}); "
            f"supported are {READ}"
        )
    return found


def traces(database: sqlite3.Connection, layout: dict[str, str], path: str, tally: Tally) -> Iterator[list[Span]]:
    """Yield the spans of each trace. A trace is complete whatever the order of its spans in the file."""
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
                tally.drop("a duplicate span", f"{path}, trace {trace_id}")
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
        tally.drop("a log without its span", f"{path}, trace {trace_id}, span {span_id}")


def _events_of(database: sqlite3.Connection, trace_id: str) -> dict[str, list[Any]]:
    """Return events that were sent as logs by span ID, oldest first."""
    found: dict[str, list[Any]] = {}
    query = "SELECT spanId, event FROM event_table WHERE traceId = ? ORDER BY timeUnixNano, rowid"
    for span_id, event in database.execute(query, (trace_id,)):
        found.setdefault(span_id, []).append(json.loads(event))
    return found


def feedback_of(database: sqlite3.Connection, tally: Tally) -> Iterator[Given]:
    """Yield the feedback in a collector's file. Studio's databases have none."""
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
        tally.unreadable(f"span attributes with more than {LONGEST_ATTRIBUTES:,} characters", place)
        return None
    try:
        attributes, events = json.loads(text or "{}"), json.loads(row.get("events") or "[]")
    except (ValueError, TypeError, RecursionError):
        attributes = events = None
    if not isinstance(attributes, dict):
        tally.unreadable("span attributes that are not a JSON object", place)
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
    if not attributes and row["operation"]:  # not read, because it is not relevant
        return replace(span, kind=f"gen_ai {row['operation']} span")
    try:
        return understood(span)
    except RecursionError:
        tally.unreadable("span attributes that are nested too deeply", place)
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
        return f"{path} stayed locked for {timeout:g} s; wait until its writer is done, or copy the file"
    if "not a database" in text:
        return f"{path} is not a SQLite database; supported are {READ}"
    if "unable to open" in text:
        return f"cannot open {path} ({text}); if there is a -wal file, its folder must be writable"
    return f"{path} cannot be read ({text}); try to recover a damaged file with: sqlite3 {path.name} .recover"


NO_MESSAGES = "without messages; the application must record contents"
"""Suffix after the kind of a span, like the next two."""
ALONE = "in a trace without a model or agent"
NOT_UNDERSTOOD = "with contents that are not messages of its convention"
NO_ANSWER = "no text answer"
NO_QUESTION = "no user message"
CUT = "truncated texts, because they were too long for a span"
ORPHAN = "an agent's span with a missing parent, in addition to a complete one"


def conversations(spans: Sequence[Span], source: str, tally: Tally) -> Iterator[Conversation]:
    """Yield the conversations of one trace in the order of their start."""
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
        own = chats.get(top.span_id) or (below.get(top.span_id) if says_nothing else None)  # some only group others
        yield from _conversation(top, own or [], source, tally)
    for chat in _longest(chats.get("", [])) if not tops else ():
        yield from _conversation(None, [chat], source, tally)
    if not tops and "" not in chats:  # neither agents nor chats, or circular parents
        for span in spans:
            _not_understood(span, f"{source}, trace {span.trace_id}, span {span.span_id}", tally)


def _not_understood(span: Span, place: str, tally: Tally) -> None:
    """Count a span by its kind: without messages, or with contents that cannot be converted."""
    what = NO_MESSAGES if span.operation in (CHAT, INVOKE_AGENT, STEP) else ALONE
    what = f"{NOT_UNDERSTOOD} ({', '.join(span.unread)})" if span.unread else what
    tally.drop(f"{span.kind} {what}", place)


def _outermost_step(spans: Sequence[Span]) -> Sequence[Span]:
    """Return the outermost step with input and output as an agent, for a trace without agents and models."""
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        if span.operation == STEP and all(span.get(f"gen_ai.{side}.messages") for side in ("input", "output")):
            agent = {**span.attributes, "gen_ai.operation.name": INVOKE_AGENT}
            return [replace(span, attributes=agent, parent_id="")]
    return spans


def _tops(agents: Sequence[Span], by_id: Mapping[str, Span], place: str, tally: Tally) -> list[Span]:
    """Return the spans of agents that are not nested in another agent's span."""
    outermost = sorted((a for a in agents if _agent_of(a, by_id) is None), key=lambda a: (a.start, -a.end))
    missing = {a.span_id: _missing_above(a, by_id) for a in outermost}
    # If the parents of all agents are missing, the first one is not nested, and neither are its siblings.
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
    """Return the ID of the missing span above a span, or an empty text."""
    top = [span, *_ancestors(span, by_id)][-1]
    return "" if top.parent_id in by_id else top.parent_id


def _longest(chats: Sequence[Span]) -> list[Span]:
    """Return chats that no other chat continues."""
    chains = [_chain(chat) for chat in chats]
    continued = {link for chain in chains for link in chain[:-1]}
    return [chat for chat, chain in zip(chats, chains, strict=True) if not chain or chain[-1] not in continued]


def _chain(chat: Span) -> list[bytes]:
    """Return hashes of the first, the first two, … input messages of a chat."""
    found: list[bytes] = []
    with contextlib.suppress(Unreadable):  # counted later
        for message in _input(chat):
            text = json.dumps(message, sort_keys=True).encode()
            found.append(hashlib.blake2b(b"".join([*found[-1:], text]), digest_size=16).digest())
    return found


_NO_CONVERSATION = ("", "unknown", "[no_session_id]")
"""Conversation IDs that AgentScope 1.x and 2.x send if there is none."""


def _conversation(top: Span | None, chats: Sequence[Span], source: str, tally: Tally) -> Iterator[Conversation]:
    main = top or chats[0]
    place = f"{source}, trace {main.trace_id}, span {main.span_id}"
    try:
        messages, answer = _content(top, chats)
    except Unreadable as e:
        tally.unreadable(str(e), place)
        return
    reason = ""
    if any(span.get("astuner.cut") is not None for span in (main, *chats)):  # set by `astuner serve`
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
    """Return the messages up to the user's last one, and the answer."""
    if top is None:
        return _up_to_user(_input(chats[0])), _answer(_output(chats[0]))
    asked = _up_to_user(_input(top))
    whole = _input(chats[0]) if chats else []
    if asked and not any(m["role"] == "system" for m in asked):
        asked = _with_history(asked, whole)
    answer = _answer(_output(top)) or (_answer(_output(chats[-1])) if chats else "")
    return asked or _up_to_user(whole), answer


def _with_history(asked: Sequence[Message], whole: Sequence[Message]) -> list[Message]:
    """Return the agent's input after the history of its model. Frameworks append hints to the question."""
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
    """Return the last text of an assistant, unless it continued with a tool call."""
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
    """Return AgentScope's record of the call that a span represents, in newer and older versions."""
    found = span.get(f"agentscope.function.{which}")
    return span.get(which) if found is None else found


def _argument(given: Any) -> Any:
    """Return the messages among the arguments of a call."""
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
    """Return messages, also from a ``Msg`` as text or a list of them."""
    value = decoded(value)
    if value is None:
        return []
    if isinstance(value, str):
        return parse_msg(value)
    if isinstance(value, list) and any(isinstance(item, str) for item in value):
        return [message for item in value for message in _agentscope(item)]
    return read_messages(value)


def _names_its_process(span: Span) -> bool:
    """Return whether the conversation ID names a process, as in AgentScope 1.x."""
    if span.scope == "agentscope":
        return span.scope_version.startswith("1.")
    return span.scope.startswith("agentscope.tracing") or span.get("project.run_id") is not None


DATABASE, SPANS, LINES, DOCUMENT, TABLE = "database", "OTLP JSON", "JSON lines", "JSON document", "CSV"
_HEAD = 64 << 10
_BATCH = 500
_ONE_DOCUMENT = 4
"""Size limit of a document as a multiple of the limit of a line."""


def kind_of(path: Path) -> str:
    """Return `DATABASE`, `SPANS`, `LINES`, `DOCUMENT` or `TABLE`.

    :raises DataError: The file is none of them, or cannot be read.
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
        raise DataError(f"{path} is not a SQLite database (it begins with {head[:12]!r}); supported are {READ}")
    if head[:2] == b"\x1f\x8b":
        raise DataError(f"{path} is compressed; unpack it first: gunzip {path.name}")
    if head[:4] == b"PAR1":
        raise DataError(
            f"{path} is Parquet; convert it first: python -c \"import pandas; pandas.read_parquet('{path.name}')"
            f".to_json('{path.stem}.jsonl', orient='records', lines=True)\""
        )
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if path.suffix.lower() == ".csv":
        return TABLE
    if start.startswith(b"[") or start.partition(b"\n")[0].strip() == b"{":
        return DOCUMENT
    if not start.startswith(b"{"):
        raise DataError(
            f"{path} is not a source of traces (it begins with {start[:12]!r}); supported are SQLite databases of "
            "AgentScope Studio or of `astuner data collect`, OTLP as JSON, chats, and exports of Phoenix, Langfuse and "
            "logfire as JSON or CSV"
        )
    return SPANS if any(name in head for name in _OTLP) else LINES


_OTLP = (b'"resourceSpans"', b'"resource_spans"', b'"resourceLogs"', b'"resource_logs"')


def read_source(path: Path, limit: int, tally: Tally) -> Iterator[Conversation | Given]:
    """Yield the conversations of a file, and its feedback.

    :param limit: Maximum bytes of a line.
    :raises DataError: The file cannot be read, or contains unreadable data with on_bad: stop.
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
            reason = f"a line of OTLP: {e}" if tally.on_bad == "stop" else "a line that is not an OTLP request"
            tally.unreadable(reason, place)
            continue
        for reason, n in decoded.rejected.items():
            for _ in range(n):
                tally.unreadable(reason, place)
        yield decoded


def _gathered(
    found: Iterable[Decoded | Conversation | Given], path: Path, tally: Tally
) -> Iterator[Conversation | Given]:
    """Yield conversations and feedback, then the contents of spans, which a temporary collector database collects."""
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
                    tally.drop("a duplicate span", str(path))
                waiting = Decoded()
        if store is not None:
            yield from _of_database(store.path, str(path), tally)
