"""What a run folder says, as the pages describe it: episodes, credit, settings, the tokenizer and its template."""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import yaml
import zstandard
from tokenizers import Tokenizer

FORMAT, APPLICATION = 3, 0x41535445
MOST = 1 << 30
"""Bytes that a row may have: a damaged frame may claim any number."""


class Unreadable(Exception):
    """The folder is not as the pages say; the message says what of it, and what to do."""


@dataclass
class Turn:
    index: int
    agent: str
    role: str
    policy: str
    trained: bool
    lost: bool
    continues: int | None
    branch_reason: str
    approximation: str
    finish_reason: str
    version: int
    prompt_tokens: int
    response_tokens: int
    tail: list[int]
    """The last ids of the prompt, those behind the turn that it continues; all of them on a branch."""
    response: list[int]
    logprobs: list[float]
    request: list[dict[str, Any]]
    tools: list[Any] | None
    reply: dict[str, Any]


@dataclass
class Episode:
    name: str
    group: str
    step: int
    split: str
    stop_reason: str
    reward: float | None
    rewards: dict[str, float]
    turns: list[Turn]

    def chain(self, turn: Turn) -> list[Turn]:
        """The turns from the one that starts the branch to ``turn``; empty where ``continues`` names none before it."""
        by_index = {one.index: one for one in self.turns}
        found = [turn]
        while (before := found[0].continues) is not None:
            if before not in by_index or before >= found[0].index:
                return []
            found.insert(0, by_index[before])
        return found


@dataclass
class Credit:
    """One row of ``credit``: a sample, as the trainer was given it."""

    step: int
    episode: str
    group: str
    agent: str
    role: str
    sample: int
    advantage: float | None
    token_weight: float | None
    reward: float | None
    tokens: int
    trained_tokens: int
    version: int
    trainer_logprobs: list[float] | None


@dataclass
class Words:
    """A policy's tokenizer, and how its template writes conversations."""

    tokenizer: Tokenizer
    template: Any
    """transformers' tokenizer, of which only ``apply_chat_template`` is asked; ``None`` where there is none."""
    variables: dict[str, Any] = field(default_factory=dict)
    special: dict[int, str] = field(default_factory=dict)

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def behind(self, before: list[int], ids: list[int]) -> str:
        """The text of ``ids`` where they stand, since some decoders write a word's beginning otherwise."""
        near = before[-1:]
        whole, known = self.text(near + ids), self.text(near)
        return whole[len(known) :] if whole.startswith(known) else self.text(ids)

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None, *, asking: bool) -> str:
        return str(
            self.template.apply_chat_template(
                messages, tools=tools or None, add_generation_prompt=asking, tokenize=False, **self.variables
            )
        )


class Folder:
    """A run folder. ``tokenizer`` is a folder as Hugging Face's, where the run saved no checkpoint to take one from."""

    def __init__(self, path: Path, tokenizer: Path | None = None) -> None:
        self.path, self._given = path, tokenizer
        log = path / "episodes" / "episodes.sqlite"
        if not log.is_file():
            raise Unreadable(f"{log} is not there: name the folder of a run that saved its tokens")
        self._db = sqlite3.connect(f"file:{log}?mode=ro", uri=True)
        found = [self._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
        if found != [APPLICATION, FORMAT]:
            raise Unreadable(f"{log} has application_id and user_version {found}, not {[APPLICATION, FORMAT]}")
        first = self._db.execute("SELECT content FROM dictionary").fetchone()
        content = zstandard.ZstdCompressionDict(first[0], zstandard.DICT_TYPE_RAWCONTENT) if first else None
        self._frames = zstandard.ZstdDecompressor(dict_data=content)
        settings = path / "resolved.yaml"
        read = yaml.safe_load(settings.read_text()) if settings.is_file() else {}
        self.settings: dict[str, Any] = (read or {}).get("astuner") or {}
        self._words: dict[str, Words] = {}

    def close(self) -> None:
        self._db.close()

    def rows(self) -> Iterator[tuple[str, bytes]]:
        """Each row that counts, with its episode's name: the last of that name, in the order of writing."""
        order = "SELECT max(id) FROM data GROUP BY episode_id"
        for name, row in self._db.execute(f"SELECT episode_id, row FROM data WHERE id IN ({order}) ORDER BY id"):
            yield str(name), self._frames.decompress(row, max_output_size=MOST)

    def credit(self) -> Iterator[Credit]:
        columns = "step, episode_id, group_id, agent, role, sample, advantage, token_weight, reward, tokens"
        columns += ", trained_tokens, policy_version, trainer_logprobs"
        for row in self._db.execute(f"SELECT {columns} FROM credit ORDER BY step, episode_id, sample"):
            yield Credit(*row[:-1], None if row[-1] is None else floats(row[-1]))

    def metrics(self) -> dict[int, dict[str, Any]]:
        """The numbers of each step."""
        path = self.path / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        found: dict[int, dict[str, Any]] = {}
        for row in map(json.loads, lines):
            found.setdefault(row["step"], {}).update(row)
        return found

    def words(self, policy: str) -> Words:
        if policy not in self._words:
            folder = self.path / "episodes" / "tokenizer"
            places = [folder / policy / "tokenizer.json", folder / "tokenizer.json"]
            place = next((place for place in places if place.is_file()), None)
            if place is None:
                raise Unreadable(f"{places[-1]} is not there, so no token can be read")
            tokenizer = Tokenizer.from_file(str(place))
            special = {id: token.content for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
            variables = (self.settings.get("model") or {}).get("chat_template_kwargs") or {}
            self._words[policy] = Words(tokenizer, self._template(policy), variables, special)
        return self._words[policy]

    def _template(self, policy: str) -> Any:
        """Of the newest checkpoint, unless a folder was given."""
        saved = sorted((self.path / "checkpoints").glob("step-*"), reverse=True)
        places = [self._given] if self._given else [place for step in saved for place in (step / policy, step)]
        for place in places:
            if place and (place / "tokenizer_config.json").is_file():
                return _loaded(place)
        return None


@cache
def _loaded(place: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(place), local_files_only=True)


def episode(row: bytes) -> Episode:
    """An episode of its row. Raises whatever reading foreign bytes raises."""
    found = msgspec.msgpack.decode(row)
    turns = [
        Turn(
            index=turn["index"],
            agent=turn["agent"],
            role=turn["role"],
            policy=turn["policy"],
            trained=turn["trained"],
            lost=turn["lost"],
            continues=turn["continues"],
            branch_reason=turn["branch_reason"],
            approximation=turn["approximation"],
            finish_reason=turn["finish_reason"],
            version=turn["policy_version"],
            prompt_tokens=turn["prompt_tokens"],
            response_tokens=turn["response_tokens"],
            tail=ints(turn["prompt_ids"]),
            response=ints(turn["response_ids"]),
            logprobs=floats(turn["logprobs"]),
            request=json.loads(turn["request"]),
            tools=json.loads(turn["tools"]) if turn["tools"] else None,
            reply=json.loads(turn["reply"]),
        )
        for turn in found["turns"]
    ]
    return Episode(
        name=found["episode_id"],
        group=found["group_id"],
        step=found["step"],
        split=found["split"],
        stop_reason=found["stop_reason"],
        reward=found["reward"],
        rewards=json.loads(found["rewards"]) if found["rewards"] else {},
        turns=turns,
    )


def ints(data: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(data) // 4}i", data))


def floats(data: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(data) // 4}f", data))
