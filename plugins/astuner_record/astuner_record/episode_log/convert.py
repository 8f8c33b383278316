"""``astuner export RUN --to parquet|jsonl|sft|tokens|dpo|labels|tasks``: episodes of a run as a file for somebody else.

Invariant: the file is complete, or not there.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from astuner import PluginManager, build_samples, upwards
from astuner.contracts.errors import ConfigError, DataError, MissingDependency
from astuner.contracts.types import Episode, Turn
from astuner_record.episode_log.reader import CREDITED, EpisodeLog, LoggedEpisode
from astuner_record.episode_log.rendering import Conversation, Message, RunTemplates
from astuner_record.episode_log.rows import CREDIT, EPISODE, IDS, LOGPROBS, json_text
from astuner_record.episode_log.salvage import Lost
from astuner_record.exam import answer_of, expected_of, question_of
from astuner_record.replacing import remove_leftovers, replacing

Rows = Iterator[dict[str, Any]]
_ROW_GROUP = 256
"""Episodes that are in memory at once while a parquet file is written."""
_JSON_COLUMNS = ("rewards", "task", "output", "metrics")
_JSON_OF_TURNS = ("request", "tools", "reply")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which episodes, and what of them."""

    where: Sequence[str] = ()
    """Conditions as of `EpisodeLog`; ``sft``, ``tokens`` and ``dpo`` add ``split=train`` where none is about it."""
    min_reward: float | None = None
    """For ``sft`` and ``tokens``: the least reward; None: successful episodes, unless a condition is about labels."""
    min_gap: float = 0.0
    """For ``dpo``: by how much the chosen one's reward is greater, at least; more than 0 in any case."""


@dataclass(kw_only=True)
class Written:
    """What was written, and what was not."""

    rows: int = 0
    problems: Sequence[str] = ()
    lost: Sequence[Lost] = ()
    """As of `EpisodeLog`, what is not intact."""
    differing: int = 0
    """Rows of messages that their chat template does not render to the recorded text."""
    first_difference: str = ""
    other_tokens: int = 0
    """Rows that render to the recorded text, of which a tokenizer makes other ids than the engine saw."""
    chat_template: str = ""
    """The template that the rows are written for, where it is not the tokenizer's own."""

    def count(self, difference: str, *, same_tokens: bool) -> None:
        """Count one row of messages."""
        self.differing += bool(difference)
        self.first_difference = self.first_difference or difference
        self.other_tokens += not difference and not same_tokens


@dataclass(frozen=True, kw_only=True)
class _Source:
    """What rows are made of."""

    log: EpisodeLog
    choice: Choice
    templates: RunTemplates
    written: Written = field(default_factory=Written)


def write_episodes(
    run: Path, to: str, target: Path, choice: Choice, *, force: bool, plugins: PluginManager | None = None
) -> Written:
    """Write the episodes of a run as a file of training data; of a damaged log those that are whole.

    :param to: one of `FORMATS`.
    :param force: replace ``target`` if it is there.
    :param plugins: The plugins that are on, for the run's chat template; None: what is installed here.
    :raises DataError: there is no log, nothing of it is whole, nothing in it was asked for, or ``target`` is there.
    :raises ConfigError: a condition cannot be read, or does not go with the format.
    """
    if choice.min_reward is not None and to not in ("sft", "tokens"):
        instead = f"--where 'reward>={choice.min_reward:g}'"
        raise ConfigError(f"--min-reward is for --to sft and tokens; for {to} write {instead}")
    if choice.min_gap and to != "dpo":
        raise ConfigError("--min-gap is for --to dpo")
    remove_leftovers(target)
    if target.is_dir() or (target.exists() and not force):
        what, instead = ("is a folder", "") if target.is_dir() else ("is there already", ", or replace it: --force")
        raise DataError(f"--out {target} {what}; choose another file{instead}")
    try:
        with EpisodeLog(run) as log, replacing(target) as temporary:
            templates = RunTemplates.of(run, plugins) if to in _RENDERED else RunTemplates({})
            source = _Source(log=log, choice=choice, templates=templates)
            written = source.written
            written.rows = FORMATS[to](source, temporary)
            written.problems, written.lost, written.chat_template = log.problems, log.lost, templates.named
            if not written.rows:
                there = f"{log.count():,} episodes in the log, of which {log.count(choice.where):,} meet every --where"
                raise DataError("; ".join([f"{_NOTHING[to]}; there are {there}", *log.problems]))
    except OSError as e:
        raise DataError(f"cannot write {target}: {e}; free space or choose another --out") from e
    return written


def _parquet(source: _Source, path: Path) -> int:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as e:
        raise MissingDependency(f"--to parquet needs pyarrow ({e}): pip install astuner-record") from None
    kinds: dict[Any, Any] = {str: pa.string(), int: pa.int32(), float: pa.float64(), bool: pa.bool_()}
    kinds |= {IDS: pa.list_(pa.int32()), LOGPROBS: pa.list_(pa.float32())}

    def of(columns: Mapping[str, Any]) -> list[Any]:
        return [
            (name, pa.list_(pa.struct(of(kind))) if isinstance(kind, Mapping) else kinds[kind])
            for name, kind in columns.items()
        ]

    columns = pa.schema(of({**EPISODE, "credit": {name: CREDIT[name] for name in CREDITED}}))
    logs = source.log.read_all(source.choice.where)
    rows = ({**logged.row, "credit": [asdict(c) for c in logged.credit]} for logged in logs)
    count = 0
    with parquet.ParquetWriter(str(path), columns, compression="zstd") as writer:
        while group := list(itertools.islice(rows, _ROW_GROUP)):
            writer.write_table(pa.Table.from_pylist(group, schema=columns))
            count += len(group)
    return count


def _lines(rows: Callable[[_Source], Rows]) -> Callable[[_Source, Path], int]:
    """A writer of JSON lines."""

    def write(source: _Source, path: Path) -> int:
        count = 0
        with path.open("w", encoding="utf-8") as file:
            for row in rows(source):
                file.write(json_text(row) + "\n")
                count += 1
        return count

    return write


def _plain(source: _Source) -> Rows:
    for logged in source.log.read_all(source.choice.where):
        row = logged.row
        turns = [_parsed(turn, _JSON_OF_TURNS) for turn in row["turns"]]
        external = [_parsed(turn, _JSON_OF_TURNS[::2]) for turn in row["external"]]
        credit = [asdict(c) for c in logged.credit]
        yield {**_parsed(row, _JSON_COLUMNS), "turns": turns, "external": external, "credit": credit}


def _parsed(row: Mapping[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    return {**row, **{name: None if row[name] is None else json.loads(row[name]) for name in columns}}


_OF_EPISODE = ("episode_id", "group_id", "task_id", "step", "split")


def _good(log: EpisodeLog, choice: Choice) -> Iterator[LoggedEpisode]:
    if choice.min_reward is not None:
        return log.read_all([*_to_learn_from(choice), f"reward>={choice.min_reward!r}"])
    good = () if _is_about("label", choice) else ("success=true",)
    return log.read_all([*_to_learn_from(choice), *good])


def _tokens(source: _Source) -> Rows:
    """The very tokens that the engine saw, and which of them a trained agent said."""
    for logged in _good(source.log, source.choice):
        for sample in build_samples(logged.episode).samples:
            yield {
                "input_ids": list(sample.input_ids),
                "loss_mask": list(sample.loss_mask),
                **{name: logged.row[name] for name in _OF_EPISODE},
                "agent": sample.agent,
                "reward": sample.reward,
            }


def _sft(source: _Source) -> Rows:
    """Conversations whose messages the run's chat template renders to the recorded text, or why it does not."""
    for logged in _good(source.log, source.choice):
        for chat in map(source.templates.fitted, conversations(logged.episode)):
            source.written.count(chat.difference, same_tokens=chat.same_tokens)
            yield {
                "messages": list(chat.messages),
                **({"tools": list(chat.tools)} if chat.tools else {}),
                **_for_template(source.templates),
                **{name: logged.row[name] for name in _OF_EPISODE},
                "agent": chat.agent,
                "reward": logged.row["reward"],
                "difference": chat.difference,
                "same_tokens": chat.same_tokens,
            }


def _for_template(templates: RunTemplates) -> dict[str, Any]:
    """What a row needs to be rendered beside its messages and tools; the same in every row of a file."""
    kwargs = {"chat_template_kwargs": dict(templates.kwargs)} if templates.kwargs else {}
    return {**kwargs, **({"chat_template": templates.named} if templates.named else {})}


def _dpo(source: _Source) -> Rows:
    groups: dict[str, list[Any]] = {}
    log, choice = source.log, source.choice
    for listed in log.list([*_to_learn_from(choice), "reward!=none"]):
        groups.setdefault(listed.group_id, []).append(listed)
    for attempts in groups.values():
        best = max(attempts, key=lambda listed: listed.reward)  # the first of several
        worst = min(attempts, key=lambda listed: listed.reward)
        if best.reward - worst.reward <= 0 or best.reward - worst.reward < choice.min_gap:
            continue
        chosen, rejected = log.read(best), log.read(worst)
        others = _longest(rejected)
        for agent, chat in _longest(chosen).items():
            if agent not in others:
                continue
            better, worse = map(source.templates.fitted, (chat, others[agent]))
            if (row := pair(better, worse)) is not None:
                differences = {"chosen": better.difference, "rejected": worse.difference}
                difference = "; ".join(f"{name}: {why}" for name, why in differences.items() if why)
                same_tokens = better.same_tokens and worse.same_tokens
                source.written.count(difference, same_tokens=same_tokens)
                yield {
                    **row,
                    **_for_template(source.templates),
                    "group_id": best.group_id,
                    "task_id": best.task_id,
                    "step": best.step,
                    "agent": agent,
                    "chosen_episode_id": best.episode_id,
                    "rejected_episode_id": worst.episode_id,
                    "chosen_reward": best.reward,
                    "rejected_reward": worst.reward,
                    "difference": difference,
                    "same_tokens": same_tokens,
                }


def _labels(source: _Source) -> Rows:
    """What people said of episodes, as `astuner judge` reads it."""
    for listed in source.log.list([*source.choice.where, "label!=none"]):
        row = source.log.read(listed).row
        yield {
            "question": question_of(row),
            "answer": answer_of(row),
            "score": int(listed.label == "good"),
            **({"reference": reference} if (reference := expected_of(row)) else {}),
            **({"why": listed.why} if listed.why else {}),
            **{name: row[name] for name in _OF_EPISODE},
        }


def _tasks(source: _Source) -> Rows:
    """The tasks of episodes, each once, as the task reader ``jsonl`` reads them."""
    seen = set()
    for logged in source.log.read_all(source.choice.where):
        row = logged.row
        if (task := (row["task_id"], row["query"], row["task"])) not in seen:
            seen.add(task)
            yield {"task_id": row["task_id"], "main_query": row["query"], **json.loads(row["task"])}


def _to_learn_from(choice: Choice) -> list[str]:
    """Held-out tasks stay held out, unless a condition is about that."""
    return [*choice.where, *([] if _is_about("split", choice) else ["split=train"])]


def _is_about(name: str, choice: Choice) -> bool:
    return any(condition.strip().startswith(name) for condition in choice.where)


def _longest(logged: LoggedEpisode) -> dict[str, Conversation]:
    """Agent -> its conversation with the most turns, the first of several."""
    found: dict[str, Conversation] = {}
    for chat in conversations(logged.episode):
        if chat.agent not in found or chat.turns > found[chat.agent].turns:
            found[chat.agent] = chat
    return found


def conversations(episode: Episode) -> list[Conversation]:
    """One per branch of each agent that may train, in the order in which the branches ended."""
    turns = {turn.index: turn for turn in episode.turns if turn.trained}
    inner = {turn.continues for turn in turns.values()}
    return [_up_to(leaf, turns) for leaf in turns.values() if leaf.index not in inner]


def pair(better: Conversation, worse: Conversation) -> dict[str, Any] | None:
    """A chosen and a rejected way to go on from what both have in common; None where they differ before a reply."""
    common = 0
    for a, b in zip(better.messages, worse.messages, strict=False):
        if a != b:
            break
        common += 1
    chosen, rejected = better.messages[common:], worse.messages[common:]
    if not (common and chosen and rejected and chosen[0]["role"] == rejected[0]["role"] == "assistant"):
        return None
    return {
        "prompt": list(better.messages[:common]),
        "chosen": list(chosen),
        "rejected": list(rejected),
        **({"tools": list(better.tools)} if better.tools else {}),
    }


def _up_to(leaf: Turn, turns: Mapping[int, Turn]) -> Conversation:
    path = list(upwards(leaf, turns))[::-1]
    messages: list[Message] = []
    replies: list[int] = []
    tools: Sequence[Mapping[str, Any]] = ()
    for turn in path:
        messages += [dict(m) for m in turn.request]
        replies.append(len(messages))
        messages.append({"role": "assistant", **turn.message})
        tools = turn.tools or tools
    return Conversation(
        agent=leaf.agent,
        messages=tuple(messages),
        tools=tuple(dict(t) for t in tools),
        turns=len(path),
        policy=leaf.policy,
        path=tuple(path),
        replies=tuple(replies),
    )


FORMATS: dict[str, Callable[[_Source, Path], int]] = {
    "parquet": _parquet,
    "jsonl": _lines(_plain),
    "sft": _lines(_sft),
    "tokens": _lines(_tokens),
    "dpo": _lines(_dpo),
    "labels": _lines(_labels),
    "tasks": _lines(_tasks),
}
_RENDERED = ("sft", "dpo")
"""Forms whose rows are messages, which other software renders."""
_NOTHING = {
    **dict.fromkeys(("parquet", "jsonl", "tasks"), "no episode was chosen"),
    "labels": "no chosen episode has a label (g or b on its page in `astuner view`)",
    **dict.fromkeys(("sft", "tokens"), "no chosen episode is good enough (--min-reward; successful ones without it)"),
    "dpo": "no group of chosen episodes has two with different rewards and the same beginning",
}
