"""From the spans of one trace to the conversations in it.

An agent's reply is its outermost ``invoke_agent`` span; agents that it calls on the way are its own business.  What was
asked and answered stands in that span, what came before (system prompt, history) in its first ``chat`` span; where one
of the two is missing, the other has to do, and where the messages are missing, AgentScope's ``Msg`` as text.  A trace
without agents is its chats, each up to the longest that goes on with it.  Invariant: a span that gives no conversation
is counted with the reason.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from astuner_flywheel.traces.conversation import Conversation, Tally
from astuner_flywheel.traces.messages import (
    CHAT,
    INVOKE_AGENT,
    Message,
    Span,
    Unreadable,
    decoded,
    parse_msg,
    read_messages,
    system_message,
    text_of,
)

NO_MESSAGES = "no messages in its spans; the application has to record contents"
NO_ANSWER = "no answer in words"
NO_QUESTION = "no user's message"
CUT = "its texts are cut, since they were too long for a span"
ORPHAN = "an agent's span whose parent is missing, beside a complete one"


def conversations(spans: Sequence[Span], source: str, tally: Tally) -> Iterator[Conversation]:
    """The conversations of one trace, in the order in which they began."""
    by_id = {span.span_id: span for span in spans}
    agents = [span for span in spans if span.operation == INVOKE_AGENT]
    tops = _tops(agents, by_id, f"{source}, trace {spans[0].trace_id}", tally)
    chats: dict[str, list[Span]] = {}
    for chat in sorted((s for s in spans if s.operation == CHAT), key=lambda s: (s.start, s.end)):
        agent = _agent_of(chat, by_id)
        chats.setdefault("" if agent is None else agent.span_id, []).append(chat)
    for top in tops:
        yield from _conversation(top, chats.get(top.span_id, []), source, tally)
    for chat in _longest(chats.get("", [])) if not tops else ():
        yield from _conversation(None, [chat], source, tally)


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
        reason = NO_MESSAGES
    elif not messages or not text_of(messages[-1]).strip():
        reason = NO_QUESTION
    elif not answer.strip():
        reason = NO_ANSWER
    if reason:
        tally.drop(reason, place)
        return
    named = _conversation_id([main, *chats])
    of_process = _names_its_process(main)
    yield Conversation(
        messages=tuple(messages),
        answer=answer,
        source=source,
        trace_id=main.trace_id,
        span_id=main.span_id,
        conversation_id="" if of_process else named,
        session=named if of_process else "",
        response_ids=tuple(dict.fromkeys(filter(None, (c.text("gen_ai.response.id") for c in [*chats, main])))),
        model=next(filter(None, map(_model, [*reversed(chats), main])), ""),
        started=main.start / 1e9 if main.start else None,
    )


def _content(top: Span | None, chats: Sequence[Span]) -> tuple[list[Message], str]:
    """Messages up to the user's last one, and the answer."""
    if top is None:
        return _up_to_user(_input(chats[0])), _answer(_output(chats[0]))
    asked = _up_to_user(_input(top))
    before = _up_to_user(_input(chats[0])) if chats else []
    whole = _input(chats[0]) if chats else []
    if asked and not any(m["role"] == "system" for m in asked):
        asked = _with_history(asked, whole)
    answer = _answer(_output(top)) or (_answer(_output(chats[-1])) if chats else "")
    return asked or before, answer


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


def _conversation_id(spans: Sequence[Span]) -> str:
    named = (s.text("gen_ai.conversation.id") or s.conversation_id or s.text("project.run_id") for s in spans)
    return next((name for name in named if name and name != "unknown"), "")


def _names_its_process(span: Span) -> bool:
    """AgentScope 1.x calls the run of its program a conversation."""
    if span.scope == "agentscope":
        return span.scope_version.startswith("1.")
    return span.scope.startswith("agentscope.tracing") or span.get("project.run_id") is not None


def _model(span: Span) -> str:
    return span.model or span.text("gen_ai.response.model") or span.text("gen_ai.request.model")
