"""Report of a check: which message of a request breaks the continuation, and how.

The codec has already decided that a request continues no turn, and why (`astuner.chat.history`). This module finds the
turn that the request was meant to continue, and the first message or tool that differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from astuner import STRUCTURED_TOOL, ChatTemplate
from astuner.contracts.errors import ConfigError, did_you_mean
from astuner.contracts.messages import (
    call_parts,
    finish_call,
    key_of,
    parse_arguments,
    role_of,
    same_arguments,
    spelling,
)
from astuner.contracts.types import APPROXIMATIONS, BRANCH_REASONS, STARTS, StopReason
from astuner_record.token_check.scripted import Asked

NOTHING = "(nothing)"
_BEFORE, _SHOWN = 30, 120
"""Characters shown before the first difference, and in total."""
_TELLING = 12
"""Length from which a message that contains the model's text is not a coincidence."""
REPLY_TOOL = "GenerateStructuredOutput"
"""Tool that an AgentScope 2 `Agent` offers only while it requests a structured reply."""
CURES = {
    "history_retold": "use a formatter that keeps the agent's own replies as assistant messages",
    "tools_changed": "offer the same tools, with the same descriptions and order of keys, in every turn",
    "messages_removed": "keep the message in the agent's memory",
    "messages_inserted": "append the message at the end",
    "history_rewritten": "send earlier messages and replies back unchanged",
    "template_not_incremental": "try another chat template (--template)",
}
"""Branch reason -> default advice."""
_BY_DESIGN = "by design: each summary starts a new training sample; increase context_size for fewer summaries"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """First difference between a request and the turn it was meant to continue."""

    turn: int
    """Turn that the request was meant to continue."""
    message: int | None
    """Index in the request of the first message that differs; None if the tools differ."""
    before: str
    """Earlier text, shortened around the difference. ``(nothing)`` after the last message."""
    after: str
    """Text in the request."""


def find_difference(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], earlier: Sequence[Asked]
) -> Difference | None:
    """Return why a request continues none of its agent's ``earlier`` turns, or None without earlier turns.

    :param messages: Normalized messages, as in ``earlier``.
    """
    if not earlier:
        return None
    given = _steps(messages)
    found = [(one, _steps([*one.messages, one.reply])) for one in earlier]
    shared = [_shared(expected, given, one) for one, expected in found]
    meant = [n for n, (one, _) in enumerate(found) if any(_same(one.reply, m, one) for _, m in given)]
    best = meant[-1] if meant else max(range(len(found)), key=lambda n: (shared[n], n))
    one, expected = found[best]
    at = shared[best]
    if at == len(expected) and spelling(list(one.tools)) != spelling(list(tools)):
        before, after = _tools(one.tools, tools)
        return Difference(turn=one.turn, message=None, before=before, after=after)
    was = _written(expected[at][1]) if at < len(expected) else NOTHING
    index, now = (given[at][0], _written(given[at][1])) if at < len(given) else (len(messages), NOTHING)
    differs = _alike(was, now) if was != NOTHING else 0
    return Difference(turn=one.turn, message=index, before=_shortened(was, differs), after=_shortened(now, differs))


def quoted_turn(messages: Sequence[Mapping[str, Any]], earlier: Sequence[Asked]) -> int | None:
    """Return the last of ``earlier`` whose text is in a non-assistant message, as in a retold history."""
    others = [message["content"] for message in messages if message["role"] != "assistant"]
    for one in reversed(earlier):
        said = one.reply["content"].strip()
        if len(said) >= _TELLING and any(said in other for other in others):
            return one.turn
    return None


def _steps(messages: Sequence[Mapping[str, Any]]) -> list[tuple[int, Mapping[str, Any]]]:
    """Return messages with their indices, merging consecutive messages that represent one reply."""
    steps: list[tuple[int, Mapping[str, Any]]] = []
    at = 0
    while at < len(messages):
        message, taken = messages[at], 1
        if message.get("tool_calls") and (fake := finish_call(messages, at)):
            said, taken = fake
            message = {"role": "assistant", "content": said}
        else:
            while message["role"] == "assistant" and at + taken < len(messages):
                piece = messages[at + taken]
                if piece["role"] != "assistant":
                    break
                message, taken = _joined(message, piece), taken + 1
        steps.append((at, message))
        at += taken
    return steps


def _joined(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    texts = [m["content"].strip() for m in (one, other) if m["content"].strip()]
    calls = [*one.get("tool_calls", ()), *other.get("tool_calls", ())]
    return {"role": "assistant", "content": "\n".join(texts), **({"tool_calls": calls} if calls else {})}


def _shared(
    expected: Sequence[tuple[int, Mapping[str, Any]]], given: Sequence[tuple[int, Mapping[str, Any]]], one: Asked
) -> int:
    """Return the number of leading steps that are equal."""
    for n, ((_, was), (_, now)) in enumerate(zip(expected, given, strict=False)):
        if not _same(was, now, one):
            return n
    return min(len(expected), len(given))


def _same(was: Mapping[str, Any], now: Mapping[str, Any], one: Asked) -> bool:
    """Return whether the codec treats both messages as equal."""
    if was["role"] == now["role"] == "assistant" and not (was.get("tool_calls") or now.get("tool_calls")):
        spellings = {was["content"].strip()} | ({one.text.strip()} if was is one.reply else set())
        return now["content"].strip() in spellings
    if key_of(was) != key_of(now):
        return False
    calls = zip(was.get("tool_calls", ()), now.get("tool_calls", ()), strict=True)
    pairs = [(call_parts(a), call_parts(b)) for a, b in calls]
    if not all(a == b and same_arguments(x, y) for (a, x), (b, y) in pairs):
        return False
    return not pairs or now["content"].strip() in ("", was["content"].strip())


def _written(message: Mapping[str, Any]) -> str:
    calls = [call_parts(call) for call in message.get("tool_calls") or ()]
    label = message.get("tool_call_id") or message.get("name")
    head = message["role"] + (f" ({label})" if label else "")
    ids = [call.get("id") for call in message.get("tool_calls") or ()]
    said = [f"{name}({arguments}) [{label}]" for (name, arguments), label in zip(calls, ids, strict=True)]
    return f"{head}: {' '.join(filter(None, [message['content'], *said]))}"


def _tools(was: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return the tool names of both lists, or if they are equal, the first tool whose definition differs."""
    names = [_tool_names(tools) for tools in (was, now)]
    if names[0] != names[1]:
        return tuple("tools " + (", ".join(n) or "(none)") for n in names)  # type: ignore[return-value]
    pairs = zip(names[0], map(spelling, was), map(spelling, now), strict=True)
    name, one, other = next(pair for pair in pairs if pair[1] != pair[2])
    differs = _alike(one, other)
    return f"tool {name}: {_shortened(one, differs)}", f"tool {name}: {_shortened(other, differs)}"


def _tool_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    return [str(tool.get("function", tool).get("name")) for tool in tools]


def _alike(one: str, other: str) -> int:
    """Return the number of leading characters that are equal."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _shortened(text: str, at: int) -> str:
    """Return one line of ``text`` around the character at index ``at``."""
    start = max(0, at - _BEFORE) if len(text) > _SHOWN else 0
    shown = text[start : start + _SHOWN]
    return ("…" if start else "") + shown.replace("\n", "⏎") + ("…" if start + _SHOWN < len(text) else "")


_PLAYED = (StopReason.JUDGE_FAILED, StopReason.LEFT_OUT)
ENDED_BADLY = {r.value for r in StopReason if not r.is_scored and r not in _PLAYED} | {"unusable"}
"""Endings after which an episode cannot be checked further. ``unusable``: the template or the recording is invalid."""
ALLOWED = ({*BRANCH_REASONS} - STARTS) | {*APPROXIMATIONS} | ENDED_BADLY
"""Values of ``--allow``."""


@dataclass(frozen=True, kw_only=True)
class TurnFound:
    """Result for one turn."""

    agent: str
    turn: int
    what: str
    """``start`` (no predecessor), ``exact``, or why it is not exact: a branch reason or an approximation."""
    why: str = ""
    """Explanation for this turn. For a start: that the agent retells the model's replies."""
    cure: str = ""
    """Advice; empty for a start or an exact continuation."""
    difference: Difference | None = None

    @property
    def is_broken(self) -> bool:
        return self.what not in ("start", "exact")


@dataclass(frozen=True, kw_only=True)
class EpisodeFound:
    """Result for one scenario with one task, or for one recorded conversation."""

    name: str
    task: str = ""
    turns: tuple[TurnFound, ...] = ()
    ended: str = ""
    error: str = ""
    notes: tuple[str, ...] = ()

    @property
    def problems(self) -> list[str]:
        """Return the reasons, of `ALLOWED`, why the episode is not exact."""
        return [turn.what for turn in self.turns if turn.is_broken] + [self.ended] * (self.ended in ENDED_BADLY)


@dataclass(frozen=True, kw_only=True)
class VariantFound:
    """Results for one chat template, with tools on or off."""

    template: str
    tools: bool
    facts: Mapping[str, Any] = field(default_factory=dict)
    episodes: tuple[EpisodeFound, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Report:
    """Results of a check."""

    target: str
    model: str
    frameworks: tuple[str, ...] = ()
    variants: tuple[VariantFound, ...] = ()

    @property
    def counts(self) -> Counter[str]:
        """Count turns by `TurnFound.what`."""
        return Counter(turn.what for v in self.variants for e in v.episodes for turn in e.turns)

    def problems(self, allowed: Iterable[str] = ()) -> Counter[str]:
        """Return reason -> count of everything that is neither exact nor allowed."""
        found = Counter(problem for v in self.variants for e in v.episodes for problem in e.problems)
        return Counter({what: n for what, n in found.items() if what not in set(allowed)})

    def as_dict(self, allowed: Iterable[str] = ()) -> dict[str, Any]:
        """Return the report as a JSON object for ``--json``."""
        problems = self.problems(allowed)
        return {**asdict(self), "turns": dict(self.counts), "problems": dict(problems), "exact": not problems}

    def text(self, allowed: Iterable[str] = ()) -> str:
        """Return the report as a table, followed by each broken continuation."""
        lines = [f"{self.target}: {', '.join(self.frameworks) or 'no known agent framework'}; tokenizer {self.model}"]
        for variant in self.variants:
            lines += ["", *_variant(variant)]
        c, problems = self.counts, self.problems(allowed)
        broken = sum(n for what, n in c.items() if what not in ("start", "exact"))
        going_on = c["exact"] + broken
        lines += ["", f"Exact continuation: {c['exact']} of {going_on} turns"]
        if problems:
            lines[-1] += f"; not exact: {', '.join(f'{n} {what}' for what, n in problems.most_common())}"
        if not going_on and not problems:
            lines[-1] += "; no turn continues an earlier one, so this check proves little"
        return "\n".join(lines)


def look_at(asked: Sequence[Asked], agents: Mapping[int, str], template: ChatTemplate) -> tuple[TurnFound, ...]:
    """Return the result of every request of an episode, in order.

    :param agents: Turn -> agent.
    """
    found = []
    earlier: dict[str, list[Asked]] = {}
    for one in sorted(asked, key=lambda one: one.turn):
        agent = agents.get(one.turn, "")
        before = earlier.setdefault(agent, [])
        reason = one.encoded.branch_reason or one.encoded.approximation
        turn = TurnFound(agent=agent, turn=one.turn, what="exact" if one.encoded.continues is not None else "start")
        if reason in STARTS and (summary := summary_turn(one.messages, before)) is not None:
            turn = replace(turn, why=f"replaces earlier messages by the summary of turn {summary}")
        elif reason and reason not in STARTS:
            difference = find_difference(one.messages, one.tools, before)
            why, cure = _explain(reason, one, before, difference, template)
            turn = replace(turn, what=reason, why=why, cure=cure, difference=difference)
        found.append(turn)
        before.append(one)
    return tuple(found)


def _explain(
    reason: str, one: Asked, before: Sequence[Asked], difference: Difference | None, template: ChatTemplate
) -> tuple[str, str]:
    """Return why a turn continues no other turn, and specific advice."""
    why, cure = {**BRANCH_REASONS, **APPROXIMATIONS}[reason], CURES.get(reason, "")
    if reason == "template_not_incremental" and _is_probed(template, one, difference):
        return not_incremental_because(template), cure
    if reason == "tools_changed" and difference is not None:
        return _explain_tools(one, next(a for a in before if a.turn == difference.turn), why, cure)
    summary = summary_turn(one.messages, before)
    if summary is not None and reason in ("history_rewritten", "messages_removed", "history_retold"):
        return f"the summary of turn {summary} replaces the messages before it", _BY_DESIGN
    if reason == "history_retold":
        quoted = quoted_turn(one.messages, before)
        if quoted is not None:
            why = f"repeats the model's reply of turn {quoted} as another role's text"
        systems = {_system(request.messages) for request in before}
        if _system(one.messages) not in systems:
            cure = (
                "the system prompt differs too: if these are two agents, name them, for example "
                "model_tuner.as_agentscope_model('critic') or chat(…, agent_name='critic')"
            )
    return why, cure


def _explain_tools(one: Asked, before: Asked, why: str, cure: str) -> tuple[str, str]:
    was, now = _tool_names(before.tools), _tool_names(one.tools)
    if now == [STRUCTURED_TOOL]:
        why = "the request asks for a structured answer, such as a context summary, and offers only a tool for it"
        return why, _BY_DESIGN
    if (REPLY_TOOL in was) != (REPLY_TOOL in now) and {*was} ^ {*now} == {REPLY_TOOL}:
        why = f"AgentScope offers {REPLY_TOOL} only while the agent requests a structured reply"
        return why, "request the structured reply in every turn, in none, or from another agent"
    if was and not now:
        cure = "offer the same tools in every turn; AgentScope 1.x removes them after max_iters, so increase max_iters"
    return why, cure


def summary_turn(messages: Sequence[Mapping[str, Any]], earlier: Sequence[Asked]) -> int | None:
    """Return the last of ``earlier`` that was a structured answer whose texts all occur in one later message."""
    others = [message["content"] for message in messages if message["role"] != "assistant"]
    for one in reversed(earlier):
        for call in one.reply.get("tool_calls") or ():
            name, arguments = call_parts(call)
            values = (parse_arguments(arguments) or {}).values()
            texts = [value for value in values if isinstance(value, str) and value.strip()]
            if name == STRUCTURED_TOOL and texts and any(all(text in other for text in texts) for other in others):
                return one.turn
    return None


def _system(messages: Sequence[Mapping[str, Any]]) -> str:
    return str(messages[0]["content"]) if messages and role_of(messages[0]) == "system" else ""


def _is_probed(template: ChatTemplate, one: Asked, difference: Difference | None) -> bool:
    """Return whether probing the chat template showed that such messages cannot continue a turn."""
    if difference is None or difference.message is None:
        return bool(template.breaks)
    system = role_of(one.messages[0]) == "system"
    return not template.continues(one.messages[difference.message :], system=system, tools=bool(one.tools))


def facts_of(template: ChatTemplate) -> dict[str, Any]:
    """Return facts about a chat template."""
    names = ("renders_tools", "incremental", "reasons", "drops_reasoning")
    found = {name: getattr(template, name) for name in names}
    because = not_incremental_because(template)
    return {
        "family": template.format.name,
        "tool_calls": template.calls.name,
        **found,
        "not_incremental_because": because,
    }


def not_incremental_because(template: ChatTemplate) -> str:
    """Return when a chat template cannot continue a reply, or an empty string if it always can."""
    if not template.breaks:
        return ""
    first, *more = sorted(template.breaks)
    follow = ["tool results"] * first.following.results
    follow += ["messages other than tool results"] * first.following.others + [
        "system messages"
    ] * first.following.systems
    what = f"{' and '.join(follow)} follow" if follow else "nothing follows"
    before = ["a system message"] * first.system + ["tools"] * first.tools
    there = f" in a conversation with {' and '.join(before)}" if before else ""
    others = f" (and in {len(more)} more cases)" if more else ""
    return (
        "the chat template renders history differently depending on earlier messages, "
        f"when {what} a reply{there}{others}; such a turn starts a branch"
    )


def check_allowed(words: Sequence[str]) -> None:
    """Check the values of ``--allow``.

    :raises ConfigError: A value is not in `ALLOWED`.
    """
    for word in words:
        if word not in ALLOWED:
            hint = did_you_mean(word, ALLOWED, f" Available: {', '.join(sorted(ALLOWED))}")
            raise ConfigError(f"--allow {word}: not a known reason.{hint}")


def _variant(variant: VariantFound) -> list[str]:
    f = variant.facts
    lines = [f"template {variant.template}, tools {'on' if variant.tools else 'off'}"]
    if f:
        tools = f["tool_calls"] if f["renders_tools"] else "does not render tools"
        kind = "incremental" if f["incremental"] else "not incremental"
        reasons = "; reasoning is parsed from the text" if f["reasons"] else ""
        lines.append(f"  {f['family']} family, {tools}; {kind}{reasons}")
        if not f["incremental"]:
            lines.append(f"  {f['not_incremental_because']}")
        if f["drops_reasoning"]:
            lines.append("  removes earlier reasoning after a new user message; in training it stays in the prompt")
    width = max((len(_name(e)) for e in variant.episodes), default=0)
    for episode in variant.episodes:
        lines.append(f"  {_name(episode):<{width}}  {_turns(episode)}")
    for episode in variant.episodes:
        lines += _details(episode)
    return lines + _errors(variant.episodes)


def _name(episode: EpisodeFound) -> str:
    return f"{episode.name} ({episode.task})" if episode.task else episode.name


def _turns(episode: EpisodeFound) -> str:
    words = {"start": "·", "exact": "="}
    marks = " ".join(words.get(turn.what, turn.what) for turn in episode.turns)
    parts = [marks or "no turns", *filter(None, [episode.ended])]
    parts += [f"turn {turn.turn} {turn.why}" for turn in episode.turns if turn.what == "start" and turn.why]
    parts += episode.notes
    return "   ".join(parts)


def _details(episode: EpisodeFound) -> list[str]:
    lines = []
    for turn in episode.turns:
        if turn.is_broken:
            lines.append(f"  {_name(episode)}, turn {turn.turn} of agent {turn.agent!r}: {turn.what}: {turn.why}")
            lines += _difference(turn.difference) if turn.difference else []
            lines += [f"    fix: {turn.cure}"] if turn.cure else []
    return lines


def _difference(d: Difference) -> list[str]:
    if d.message is not None and d.before == NOTHING:
        return [f"    does not continue turn {d.turn}: message {d.message} follows it: {d.after}"]
    where = "the tools" if d.message is None else f"message {d.message}"
    return [
        f"    does not continue turn {d.turn}; first difference: {where}",
        f"      was  {d.before}",
        f"      is   {d.after}",
    ]


def _errors(episodes: Sequence[EpisodeFound]) -> list[str]:
    """Return each error once, with the episodes that it ended."""
    of: dict[str, list[str]] = {}
    for episode in episodes:
        if episode.error:
            of.setdefault(f"{episode.ended}: {episode.error}", []).append(_name(episode))
    return [f"  {', '.join(names)}: {error}" for error, names in of.items()]
