"""Export episodes of a run: ``astuner export RUN --to parquet|jsonl|sft|tokens|dpo|labels|tasks``.

Invariant: the output file is complete or absent.
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
"""Episodes in memory at a time while a parquet file is written."""
_JSON_COLUMNS = ("rewards", "task", "output", "metrics")
_JSON_OF_TURNS = ("request", "tools", "reply")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Selection of episodes and rows."""

    where: Sequence[str] = ()
    """Conditions of `EpisodeLog`. ``sft``, ``tokens`` and ``dpo`` add ``split=train`` unless a condition is on it."""
    min_reward: float | None = None
    """Minimum reward for ``sft`` and ``tokens``. None: successful episodes, unless a condition is on labels."""
    min_gap: float = 0.0
    """Minimum reward difference for ``dpo``; always greater than 0."""


@dataclass(kw_only=True)
class Written:
    """Result of an export."""

    rows: int = 0
    problems: Sequence[str] = ()
    lost: Sequence[Lost] = ()
    """Damaged parts, as in `EpisodeLog`."""
    differing: int = 0
    """Message rows that their chat template does not render to the recorded text."""
    first_difference: str = ""
    other_tokens: int = 0
    """Rows that render to the recorded text, but whose tokenization differs from the recorded IDs."""
    chat_template: str = ""
    """Chat template of the rows if it is not the tokenizer's default."""

    def count(self, difference: str, *, same_tokens: bool) -> None:
        """Count one row of messages."""
        self.differing += bool(difference)
        self.first_difference = self.first_difference or difference
        self.other_tokens += not difference and not same_tokens


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Input of the row generators."""

    log: EpisodeLog
    choice: Choice
    templates: RunTemplates
    written: Written = field(default_factory=Written)


def write_episodes(
    run: Path, to: str, target: Path, choice: Choice, *, force: bool, plugins: PluginManager | None = None
) -> Written:
    """Write episodes of a run as a file of training data, skipping damaged episodes.

    :param to: One of `FORMATS`.
    :param force: Replace an existing ``target``.
    :param plugins: Enabled plugins, for the run's chat template. None: the installed plugins.
    :raises DataError: The log is missing or has no intact part, no episode is selected, or ``target`` exists.
    :raises ConfigError: A condition is malformed or does not apply to the format.
    """
    if choice.min_reward is not None and to not in ("sft", "tokens"):
        instead = f"--where 'reward>={choice.min_reward:g}'"
        raise ConfigError(f"--min-reward applies to --to sft and tokens. For {to}, use {instead}.")
    if choice.min_gap and to != "dpo":
        raise ConfigError("--min-gap applies to --to dpo only.")
    remove_leftovers(target)
    if target.is_dir() or (target.exists() and not force):
        what, instead = ("is a folder", "") if target.is_dir() else ("exists", ", or replace it with --force")
        raise DataError(f"--out {target} {what}. Choose another file{instead}.")
    try:
        with EpisodeLog(run) as log, replacing(target) as temporary:
            templates = RunTemplates.of(run, plugins) if to in _RENDERED else RunTemplates({})
            source = _Source(log=log, choice=choice, templates=templates)
            written = source.written
            written.rows = FORMATS[to](source, temporary)
            written.problems, written.lost, written.chat_template = log.problems, log.lost, templates.named
            if not written.rows:
                there = f"{log.count():,} episodes are in the log, {log.count(choice.where):,} match every --where"
                raise DataError("; ".join([f"{_NOTHING[to]}: {there}", *log.problems]))
    except OSError as e:
        raise DataError(f"Cannot write {target}: {e}. Free disk space or choose another --out.") from e
    return written


def _parquet(source: _Source, path: Path) -> int:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as e:
        raise MissingDependency(f"--to parquet requires pyarrow ({e}): pip install astuner-record") from None
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
    """Return a writer of JSON lines."""

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
    """Yield the recorded tokens with a mask of tokens that a trained agent generated."""
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
    """Yield conversations whose messages the run's chat template renders to the recorded text, or why it does not."""
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
    """Return additional columns needed to render a row; they are equal in all rows of a file."""
    kwargs = {"chat_template_kwargs": dict(templates.kwargs)} if templates.kwargs else {}
    return {**kwargs, **({"chat_template": templates.named} if templates.named else {})}


def _dpo(source: _Source) -> Rows:
    groups: dict[str, list[Any]] = {}
    log, choice = source.log, source.choice
    for listed in log.list([*_to_learn_from(choice), "reward!=none"]):
        groups.setdefault(listed.group_id, []).append(listed)
    for attempts in groups.values():
        best = max(attempts, key=lambda listed: listed.reward)  # the first in case of ties
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
    """Yield labeled episodes in the format of `astuner judge`."""
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
    """Yield each distinct task once, in the format of the task reader ``jsonl``."""
    seen = set()
    for logged in source.log.read_all(source.choice.where):
        row = logged.row
        if (task := (row["task_id"], row["query"], row["task"])) not in seen:
            seen.add(task)
            yield {"task_id": row["task_id"], "main_query": row["query"], **json.loads(row["task"])}


def _to_learn_from(choice: Choice) -> list[str]:
    """Exclude held-out tasks, unless a condition is on the split."""
    return [*choice.where, *([] if _is_about("split", choice) else ["split=train"])]


def _is_about(name: str, choice: Choice) -> bool:
    return any(condition.strip().startswith(name) for condition in choice.where)


def _longest(logged: LoggedEpisode) -> dict[str, Conversation]:
    """Return agent -> its conversation with the most turns, the first in case of ties."""
    found: dict[str, Conversation] = {}
    for chat in conversations(logged.episode):
        if chat.agent not in found or chat.turns > found[chat.agent].turns:
            found[chat.agent] = chat
    return found


def conversations(episode: Episode) -> list[Conversation]:
    """Return one conversation per branch of each trained agent, in the order in which the branches ended."""
    turns = {turn.index: turn for turn in episode.turns if turn.trained}
    inner = {turn.continues for turn in turns.values()}
    return [_up_to(leaf, turns) for leaf in turns.values() if leaf.index not in inner]


def pair(better: Conversation, worse: Conversation) -> dict[str, Any] | None:
    """Split two conversations after their common prefix, or return None if they differ before a reply."""
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
"""Formats whose rows are messages that other software renders."""
_NOTHING = {
    **dict.fromkeys(("parquet", "jsonl", "tasks"), "No episode is selected"),
    "labels": "No selected episode has a label (press g or b on its page in `astuner view`)",
    **dict.fromkeys(("sft", "tokens"), "No selected episode reaches --min-reward (default: successful episodes)"),
    "dpo": "No group of selected episodes has two with different rewards and the same beginning",
}
