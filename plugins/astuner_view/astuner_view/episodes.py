"""Episodes as JSON for the page: an entry of a list, an episode without its tokens, and its tokens.

`astuner.rollout.turns` makes a sample of each path through the tree of turns that ends in a leaf. A sample does not
record its leaf, but its tokens identify it, because the leaf's prompt and response are the complete sample.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from astuner import upwards
from astuner.contracts.errors import DataError
from astuner.contracts.types import Sample, StopReason, Turn
from astuner_record.episode_log.reader import Credited, Listed, LoggedEpisode
from astuner_record.episode_log.rows import Row
from astuner_record.exam import answer_of, cause_of, expected_of
from astuner_view.texts import SEEN_BEFORE, Texts, tokenizer_of

_TURN = (
    "index", "agent", "role", "policy", "trained", "lost", "continues", "branch_reason", "approximation",
    "finish_reason", "policy_version", "prompt_tokens", "response_tokens", "external", "model",
)  # fmt: skip
_SHOWN = 300
"""Maximum number of characters of an answer in a list."""
_NOTHING_OF_TOKENS = {
    "policy": "", "trained": False, "lost": False, "continues": None, "branch_reason": "", "approximation": "",
    "finish_reason": None, "policy_version": None, "tools": None, "external": True,
}  # fmt: skip
"""Values of a turn of an external model, which has no token data."""
NO_TOKENIZER = (
    "Tokens are shown as IDs only, because episodes/tokenizer/ of this run is missing; current versions of ASTuner "
    "write it when a run begins"
)
NO_CREDIT = "No token of this episode was trained, because the episode was not credited"


def listed_json(listed: Listed, answer: str, expected: str) -> dict[str, Any]:
    """Return an entry of a list; from a GSM8K reference only the final answer."""
    last = expected.rpartition("####")[2].strip()
    said = {"cause": cause_of(listed.error), "answer": answer[:_SHOWN], "expected": last[:_SHOWN]}
    return {name: value for name, value in vars(listed).items() if name != "id"} | said


def episode_json(listed: Listed, logged: LoggedEpisode) -> dict[str, Any]:
    """Return an episode for its page."""
    row = logged.row
    turns = [_said({"external": False, "model": None, **turn}) for turn in row["turns"]]
    turns += [_said({**_NOTHING_OF_TOKENS, **turn}) for turn in row["external"]]
    samples, problems = [], []
    try:
        for credited, sample, of_sample in credited_paths(logged):
            credit = {name: value for name, value in vars(credited).items() if name != "trainer_logprobs"}
            turns_of = [turn.index for turn in of_sample]
            samples.append({**credit, "policy_version": sample.policy_version, "turns": turns_of})
    except ValueError as e:
        problems.append(f"The credit of this episode does not match its turns: {e}")
    return listed_json(listed, "", "") | {
        "query": row["query"],
        "answer": answer_of(row),
        "expected": expected_of(row),
        "reward_source": row["reward_source"],
        **{name: _json(row[name]) for name in ("rewards", "task", "output", "metrics")},
        "turns": sorted(turns, key=lambda turn: turn["index"]),
        "samples": samples,
        "problems": problems,
        "failure": explained(StopReason(row["stop_reason"]), row["error"]),
    }


def _said(turn: Row) -> dict[str, Any]:
    said = {name: _json(turn[name]) for name in ("request", "tools", "reply")}
    return {name: turn[name] for name in _TURN} | said


def _json(text: str | None) -> Any:
    return None if text is None else json.loads(text)


def explained(stop_reason: StopReason, error: str) -> dict[str, str] | None:
    """Return what happened, why, and what to do; None for an episode that completed."""
    words = _words().get(stop_reason.value)
    return None if words is None else {**words, "why": error}


@cache
def _words() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = yaml.safe_load(
        Path(__file__).with_name("failures.yaml").read_text(encoding="utf-8")
    )
    return found


# ---- which turns a credited sample is made of, and so what became of each token that was generated -------------------


CreditedPath: TypeAlias = tuple[Credited, Sample, tuple[Turn, ...]]
"""A sample, its credit, and its turns from the root to the leaf."""


def credited_paths(logged: LoggedEpisode) -> tuple[CreditedPath, ...]:
    """Return the paths of an episode, in the order of its samples.

    :raises ValueError: the credit does not belong to these turns.
    """
    spoken = {t.index: t for t in logged.episode.turns if t.trained and t.generation.response_ids}
    inner = {t.continues for t in spoken.values()}
    leaves = [t for t in spoken.values() if t.index not in inner]
    paths = []
    for credit, sample in zip(logged.credit, logged.samples(), strict=True):
        leaf = next((t for t in leaves if t.agent == sample.agent and _is_whole(t, sample)), None)
        if leaf is None:
            raise ValueError(f"sample {credit.sample} does not end in any turn")
        leaves.remove(leaf)
        paths.append((credit, sample, tuple(upwards(leaf, spoken))[::-1]))
    return tuple(paths)


def trained_turns(paths: tuple[CreditedPath, ...]) -> dict[int, dict[str, Any]]:
    """Return what happened to the tokens of each turn that has a trained one, by the turn's index.

    ``trained`` is 1 or 0 for each response token, ``trainer_logprobs`` a number or None for each, or None if the
    trainer computed none; ``sample`` is the sample in which it is trained, with its ``advantage``.
    """
    found: dict[int, dict[str, Any]] = {}
    for credit, sample, turns in paths:
        logprobs = None if credit.trainer_logprobs is None else iter(credit.trainer_logprobs)
        for turn in turns:
            start = len(turn.generation.prompt_ids)
            own = tuple(sample.loss_mask[start : start + len(turn.generation.response_ids)])
            if any(own):
                spread = None if logprobs is None else tuple(next(logprobs, None) if one else None for one in own)
                of_tokens = {"trained": own, "trainer_logprobs": spread}
                found[turn.index] = {**of_tokens, "advantage": credit.advantage, "sample": credit.sample}
    return found


def _is_whole(turn: Turn, sample: Sample) -> bool:
    said = turn.generation
    if len(said.prompt_ids) + len(said.response_ids) != len(sample.input_ids):
        return False
    return [*said.prompt_ids, *said.response_ids] == list(sample.input_ids)


# ---- tokens ----------------------------------------------------------------------------------------------------------


def tokens_json(logged: LoggedEpisode, run: Path) -> dict[str, Any]:
    """Return all turns of the run's own models with IDs, texts, logprobs and which tokens were trained.

    Of each prompt only the new tokens are included.

    :param run: the run folder.
    """
    notes = [] if logged.credit else [NO_CREDIT]
    trained: Mapping[int, Mapping[str, Any]] = {}
    try:
        trained = trained_turns(credited_paths(logged))
    except ValueError as e:
        notes.append(f"The credit of this episode does not match its turns ({e}), so it is unknown what was trained")
    texts: dict[str, Texts] = {}
    for policy in dict.fromkeys(row["policy"] for row in logged.row["turns"]):
        try:
            if (found := tokenizer_of(run, policy)) is not None:
                texts[policy] = found
            else:
                notes.append(NO_TOKENIZER)
        except DataError as e:
            notes.append(str(e))
    turns = [
        _tokens(row, logged, texts.get(row["policy"]), trained.get(row["index"], {})) for row in logged.row["turns"]
    ]
    return {"has_text": bool(texts), "note": "; ".join(notes), "turns": turns}


def _tokens(row: Row, logged: LoggedEpisode, texts: Texts | None, trained: Mapping[str, Any]) -> dict[str, Any]:
    prompt, response = list(row["prompt_ids"]), list(row["response_ids"])
    pieces = [""] * (len(prompt) + len(response))
    if texts is not None:
        before: list[int] = []
        if old := row["prompt_tokens"] - len(prompt):  # the last tokens before the turn's new ones
            turn = next(t for t in logged.episode.turns if t.index == row["index"])
            before = list(turn.generation.prompt_ids[max(0, old - SEEN_BEFORE) : old])
        pieces = texts.pieces([*prompt, *response], before=before)
    return {
        "index": row["index"],
        "prompt": {"ids": prompt, "texts": pieces[: len(prompt)]},
        "response": {
            "ids": response,
            "texts": pieces[len(prompt) :],
            "logprobs": list(row["logprobs"]),
            "trained": trained.get("trained", [0] * len(response)),
            "trainer_logprobs": trained.get("trainer_logprobs"),
        },
        "advantage": trained.get("advantage"),
        "sample": trained.get("sample"),
    }
