"""The tokens of an episode as the page wants them: ids, texts, logprobs, and which of them were trained."""

from __future__ import annotations

from typing import Any

from astuner.contracts.errors import DataError
from astuner_record.episode_log.columns import Row
from astuner_record.episode_log.reader import LoggedEpisode
from astuner_view.paths import TrainedTurn, credited_paths, trained_turns
from astuner_view.texts import SEEN_BEFORE, Texts, Tokenizers

NO_TOKENIZER = (
    "there is no tokenizer in this run's episodes/tokenizer/, so tokens have numbers and no text; runs of this ASTuner "
    "write it when they begin"
)
NO_CREDIT = "no token of it was trained: nothing of it was credited"


def tokens_json(logged: LoggedEpisode, tokenizers: Tokenizers) -> dict[str, Any]:
    """All turns but those of models outside of the run; of each prompt only what is new in it."""
    notes: list[str] = []
    trained = _trained(logged, notes)
    texts = _texts(logged, tokenizers, notes)
    turns = [_turn(row, logged, texts.get(row["policy"]), trained.get(row["index"])) for row in logged.row["turns"]]
    return {"has_text": bool(texts), "note": "; ".join(notes), "turns": turns}


def _trained(logged: LoggedEpisode, notes: list[str]) -> dict[int, TrainedTurn]:
    if not logged.credit:
        notes.append(NO_CREDIT)
    try:
        return trained_turns(credited_paths(logged))
    except ValueError as e:
        notes.append(f"the credit of this episode does not fit its turns ({e}), so which token was trained is unknown")
        return {}


def _texts(logged: LoggedEpisode, tokenizers: Tokenizers, notes: list[str]) -> dict[str, Texts]:
    """The tokenizers of the episode's policies, as far as there are."""
    found: dict[str, Texts] = {}
    for policy in dict.fromkeys(row["policy"] for row in logged.row["turns"]):
        try:
            texts = tokenizers.of(policy)
        except DataError as e:
            notes.append(str(e))
            continue
        if texts is None:
            notes.append(NO_TOKENIZER)
        else:
            found[policy] = texts
    return found


def _turn(row: Row, logged: LoggedEpisode, texts: Texts | None, trained: TrainedTurn | None) -> dict[str, Any]:
    prompt, response = list(row["prompt_ids"]), list(row["response_ids"])
    pieces = [""] * (len(prompt) + len(response))
    if texts is not None:
        pieces = texts.pieces([*prompt, *response], before=_before(row, logged))
    return {
        "index": row["index"],
        "prompt": {"ids": prompt, "texts": pieces[: len(prompt)]},
        "response": {
            "ids": response,
            "texts": pieces[len(prompt) :],
            "logprobs": list(row["logprobs"]),
            "trained": [0] * len(response) if trained is None else trained.trained,
            "trainer_logprobs": None if trained is None else trained.trainer_logprobs,
        },
        "advantage": None if trained is None else trained.path.credit.advantage,
        "sample": None if trained is None else trained.path.credit.sample,
    }


def _before(row: Row, logged: LoggedEpisode) -> list[int]:
    """The last tokens before a turn's new ones."""
    if not row["prompt_tokens"] - len(row["prompt_ids"]):
        return []
    turn = next(t for t in logged.episode.turns if t.index == row["index"])
    old = row["prompt_tokens"] - len(row["prompt_ids"])
    return list(turn.generation.prompt_ids[max(0, old - SEEN_BEFORE) : old])
