"""What a check found, for people and for machines: which message of a request broke the continuation, and how.

The codec has already said that a request continues nothing, and why (`astuner.chat.history`); here the turn that it
was meant to go on from is found, and the first message, or tool, in which the two differ.
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
"""Characters shown before the first difference, and in all."""
_TELLING = 12
"""Characters from which on it is no accident that a message holds what the model said."""
REPLY_TOOL = "GenerateStructuredOutput"
"""The tool that an `Agent` of AgentScope 2 offers only while it is asked for a structured reply."""
CURES = {
    "history_retold": "use a formatter that keeps the agent's own replies as assistant messages",
    "tools_changed": "offer the same tools, with the same descriptions and order of keys, in every turn",
    "messages_removed": "keep the message in the agent's memory",
    "messages_inserted": "append the message at the end",
    "history_rewritten": "send earlier messages and replies back unchanged",
    "template_not_incremental": "try another chat template (--template)",
}
"""Branch reason -> what to do, where nothing more specific is known."""
_BY_DESIGN = "by design: each summary starts a new training sample; a larger context_size gives fewer summaries"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where a request leaves the turn that it was meant to continue."""

    turn: int
    """That turn."""
    message: int | None
    """Index in the request of the first message that differs; None when the tools do."""
    before: str
    """What stood there, shortened around the difference; ``(nothing)`` behind the end."""
    after: str
    """What stands there now."""


def find_difference(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], earlier: Sequence[Asked]
) -> Difference | None:
    """What keeps a request from continuing one of ``earlier``, its agent's turns in order; None without any.

    :param messages: normalised, as are those of ``earlier``.
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
    """The last of ``earlier`` whose words stand in a message that is not the model's, as in a retold history."""
    others = [message["content"] for message in messages if message["role"] != "assistant"]
    for one in reversed(earlier):
        said = one.reply["content"].strip()
        if len(said) >= _TELLING and any(said in other for other in others):
            return one.turn
    return None


def _steps(messages: Sequence[Mapping[str, Any]]) -> list[tuple[int, Mapping[str, Any]]]:
    """The messages with their indices, those together that mean one reply."""
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
    """How many steps both begin with."""
    for n, ((_, was), (_, now)) in enumerate(zip(expected, given, strict=False)):
        if not _same(was, now, one):
            return n
    return min(len(expected), len(given))


def _same(was: Mapping[str, Any], now: Mapping[str, Any], one: Asked) -> bool:
    """Whether the codec takes one message for the other."""
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
    """Return the names of both lists, or where the names are the same, the first tool that is spelled differently."""
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
    """How many characters both begin with."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _shortened(text: str, at: int) -> str:
    """One line of ``text`` around its character ``at``."""
    start = max(0, at - _BEFORE) if len(text) > _SHOWN else 0
    shown = text[start : start + _SHOWN]
    return ("…" if start else "") + shown.replace("\n", "⏎") + ("…" if start + _SHOWN < len(text) else "")


_PLAYED = (StopReason.JUDGE_FAILED, StopReason.LEFT_OUT)
ENDED_BADLY = {r.value for r in StopReason if not r.is_scored and r not in _PLAYED} | {"unusable"}
"""Ways to end after which nothing more is known about an episode; ``unusable``: the template or the trace is."""
ALLOWED = ({*BRANCH_REASONS} - STARTS) | {*APPROXIMATIONS} | ENDED_BADLY
"""What ``--allow`` takes."""


@dataclass(frozen=True, kw_only=True)
class TurnFound:
    """One turn."""

    agent: str
    turn: int
    what: str
    """``start`` (nothing to go on from), ``exact``, or the rule that broke it: a branch reason or an approximation."""
    why: str = ""
    """What the rule means here; of a start, that the agent retells what the model said."""
    cure: str = ""
    """What to do about it; empty for a start or an exact continuation."""
    difference: Difference | None = None

    @property
    def is_broken(self) -> bool:
        return self.what not in ("start", "exact")


@dataclass(frozen=True, kw_only=True)
class EpisodeFound:
    """One scenario with one task, or one recorded conversation."""

    name: str
    task: str = ""
    turns: tuple[TurnFound, ...] = ()
    ended: str = ""
    error: str = ""
    notes: tuple[str, ...] = ()

    @property
    def problems(self) -> list[str]:
        """The words for what is not exact, of `ALLOWED`."""
        return [turn.what for turn in self.turns if turn.is_broken] + [self.ended] * (self.ended in ENDED_BADLY)


@dataclass(frozen=True, kw_only=True)
class VariantFound:
    """Everything under one chat template, with tools on or off."""

    template: str
    tools: bool
    facts: Mapping[str, Any] = field(default_factory=dict)
    episodes: tuple[EpisodeFound, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a check found."""

    target: str
    model: str
    frameworks: tuple[str, ...] = ()
    variants: tuple[VariantFound, ...] = ()

    @property
    def counts(self) -> Counter[str]:
        """Turns by `TurnFound.what`."""
        return Counter(turn.what for v in self.variants for e in v.episodes for turn in e.turns)

    def problems(self, allowed: Iterable[str] = ()) -> Counter[str]:
        """What is not exact and not allowed -> how often."""
        found = Counter(problem for v in self.variants for e in v.episodes for problem in e.problems)
        return Counter({what: n for what, n in found.items() if what not in set(allowed)})

    def as_dict(self, allowed: Iterable[str] = ()) -> dict[str, Any]:
        """Plain data, for ``--json``."""
        problems = self.problems(allowed)
        return {**asdict(self), "turns": dict(self.counts), "problems": dict(problems), "exact": not problems}

    def text(self, allowed: Iterable[str] = ()) -> str:
        """A table, and every break."""
        lines = [f"{self.target}: {', '.join(self.frameworks) or 'no known agent framework'}; tokenizer {self.model}"]
        for variant in self.variants:
            lines += ["", *_variant(variant)]
        c, problems = self.counts, self.problems(allowed)
        broken = sum(n for what, n in c.items() if what not in ("start", "exact"))
        going_on = c["exact"] + broken
        lines += ["", f"{c['exact']} of {going_on} turns that go on from an earlier one continue it exactly"]
        if problems:
            lines[-1] += f"; not exact: {', '.join(f'{n} {what}' for what, n in problems.most_common())}"
        if not going_on and not problems:
            lines[-1] += "; no turn went on from another, so this says little"
        return "\n".join(lines)


def look_at(asked: Sequence[Asked], agents: Mapping[int, str], template: ChatTemplate) -> tuple[TurnFound, ...]:
    """What became of every request of an episode, in order.

    :param agents: turn -> its agent.
    """
    found = []
    earlier: dict[str, list[Asked]] = {}
    for one in sorted(asked, key=lambda one: one.turn):
        agent = agents.get(one.turn, "")
        before = earlier.setdefault(agent, [])
        reason = one.encoded.branch_reason or one.encoded.approximation
        turn = TurnFound(agent=agent, turn=one.turn, what="exact" if one.encoded.continues is not None else "start")
        if reason in STARTS and (summary := summary_turn(one.messages, before)) is not None:
            turn = replace(turn, why=f"has the summary of turn {summary} instead of the messages before it")
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
    """Return why a turn continues no other, and what to do, as specifically as it is known."""
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
            why = f"tells what the model said in turn {quoted} as another's words"
        systems = {_system(request.messages) for request in before}
        if _system(one.messages) not in systems:
            cure = (
                "the system prompt is another too: if these are two agents, name them, such as "
                "model_tuner.as_agentscope_model('critic') or chat(…, agent_name='critic')"
            )
    return why, cure


def _explain_tools(one: Asked, before: Asked, why: str, cure: str) -> tuple[str, str]:
    was, now = _tool_names(before.tools), _tool_names(one.tools)
    if now == [STRUCTURED_TOOL]:
        why = "the request is for a structured answer, such as a summary of the context, and offers a tool for it alone"
        return why, _BY_DESIGN
    if (REPLY_TOOL in was) != (REPLY_TOOL in now) and {*was} ^ {*now} == {REPLY_TOOL}:
        why = f"AgentScope offers {REPLY_TOOL} only while the agent is asked for a structured reply"
        return why, "ask for the structured reply in each turn, in none, or by another agent"
    if was and not now:
        cure = "offer the same tools in every turn; AgentScope 1.x withdraws them after max_iters, so raise max_iters"
    return why, cure


def summary_turn(messages: Sequence[Mapping[str, Any]], earlier: Sequence[Asked]) -> int | None:
    """Return the last of ``earlier`` that was a structured answer whose every text is in one message of another."""
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
    """Return whether the probes of the chat template have seen that such messages cannot continue a turn."""
    if difference is None or difference.message is None:
        return bool(template.breaks)
    system = role_of(one.messages[0]) == "system"
    return not template.continues(one.messages[difference.message :], system=system, tools=bool(one.tools))


def facts_of(template: ChatTemplate) -> dict[str, Any]:
    """What kind of chat template it is."""
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
    """When a reply cannot be continued, for people; empty when it always can."""
    if not template.breaks:
        return ""
    first, *more = sorted(template.breaks)
    follow = ["tool results"] * first.following.results
    follow += ["messages that are no tool results"] * first.following.others + [
        "system messages"
    ] * first.following.systems
    what = f"{' and '.join(follow)} follow" if follow else "nothing follows"
    before = ["a system message"] * first.system + ["tools"] * first.tools
    there = f" in a conversation with {' and '.join(before)}" if before else ""
    others = f" (and in {len(more)} more cases)" if more else ""
    return (
        "the chat template writes history differently, depending on what came before, "
        f"when {what} a reply{there}{others}; such a turn starts a branch"
    )


def check_allowed(words: Sequence[str]) -> None:
    """:raises ConfigError: one of them is not in `ALLOWED`."""
    for word in words:
        if word not in ALLOWED:
            hint = did_you_mean(word, ALLOWED, f"; it takes {', '.join(sorted(ALLOWED))}")
            raise ConfigError(f"--allow {word}: there is no such reason{hint}")


def _variant(variant: VariantFound) -> list[str]:
    f = variant.facts
    lines = [f"template {variant.template}, tools {'on' if variant.tools else 'off'}"]
    if f:
        tools = f["tool_calls"] if f["renders_tools"] else "shows no tools"
        kind = "incremental" if f["incremental"] else "not incremental"
        reasons = "; its reasoning is told from its text" if f["reasons"] else ""
        lines.append(f"  {f['family']} family, {tools}; {kind}{reasons}")
        if not f["incremental"]:
            lines.append(f"  {f['not_incremental_because']}")
        if f["drops_reasoning"]:
            lines.append(
                "  it leaves earlier reasoning out once the user speaks again; in training it stays in the prompt"
            )
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
            lines += [f"    to do: {turn.cure}"] if turn.cure else []
    return lines


def _difference(d: Difference) -> list[str]:
    if d.message is not None and d.before == NOTHING:
        return [f"    it does not go on from turn {d.turn}, behind which message {d.message} comes: {d.after}"]
    where = "the tools" if d.message is None else f"message {d.message}"
    return [
        f"    it does not go on from turn {d.turn}; the first difference is {where}",
        f"      was  {d.before}",
        f"      is   {d.after}",
    ]


def _errors(episodes: Sequence[EpisodeFound]) -> list[str]:
    """Every error once, with the episodes that it ended."""
    of: dict[str, list[str]] = {}
    for episode in episodes:
        if episode.error:
            of.setdefault(f"{episode.ended}: {episode.error}", []).append(_name(episode))
    return [f"  {', '.join(names)}: {error}" for error, names in of.items()]
