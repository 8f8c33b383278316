"""Create the model of this example: ``python examples/werewolves/make_model.py``.

The model is pretrained on games with random messages and choices. It learns the words and boxes of the game; choosing
well is left to the training. The games come from the example's own table with scripted players, so the prompts equal
those of the training.

The result follows from the seed and uses one thread. On another CPU, the weights may differ in their last bits.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from werewolf_player import MODERATOR, Player
from werewolf_rules import SEVEN, Game
from werewolf_table import Table
from werewolf_words import rules_for

from astuner_local.tiny import tokenizer as bpe
from astuner_local.tiny.warmup import IGNORED, build_model, learn_to_read_and_say

GAMES, GAMES_FOR_TOKENIZER = 300, 50
STEPS, BATCH = 300, 16
ANY_NUMBER, UNCLEAR = 0.1, 0.05
"""Shares of choices with a random number and without a box."""

Transcript = list[dict[str, str]]


class ScriptedPlayer(Player):
    """Player that returns random suitable sentences and keeps its conversation."""

    def __init__(self, name: str, rules: str, rng: random.Random) -> None:
        super().__init__(name, rules, model=None)
        self.rng = rng
        self.transcript: Transcript = []

    async def answer(self, question: str) -> str:
        """Draw an answer, and record it with everything heard since the last one."""
        self.hear(MODERATOR, question)
        offered = [int(number) for number in question.rpartition(": ")[2].split()] if "hoose" in question else []
        number = self.rng.choice(offered if offered and self.rng.random() >= ANY_NUMBER else range(1, len(SEVEN) + 1))
        text = self.rng.choice((f"I suspect player {number}.", f"Player {number} is a werewolf.", "I am a villager."))
        if offered and self.rng.random() >= UNCLEAR:
            text += f" \\boxed{{{number}}}"
        self.transcript += [
            {"role": "user", "content": "\n".join(self.heard)},
            {"role": "assistant", "content": text},
        ]
        self.heard = []
        return text


async def play(rng: random.Random) -> list[Transcript]:
    """Return the conversation of every player of one game."""
    game = Game(rng.sample(SEVEN, len(SEVEN)))
    players = {n: ScriptedPlayer(f"Player {n}", rules_for(game, n), rng) for n in game.living}
    await Table(game, players, rng.choice(game.living)).play()
    return [
        [{"role": "system", "content": player.rules}, *player.transcript]
        for player in players.values()
        if player.transcript  # empty for a player who dies in the first night
    ]


def games(rng: random.Random, count: int) -> list[Transcript]:
    """Return the conversations of several games."""

    async def several() -> list[Transcript]:
        return [transcript for _ in range(count) for transcript in await play(rng)]

    return asyncio.run(several())


def make_tokenizer(folder: Path, shown: Sequence[Transcript]) -> Any:
    """Train the tokenizer, write it to ``folder``, and return it as transformers loads it."""
    bare = PreTrainedTokenizerFast(tokenizer_object=bpe.train([]), chat_template=bpe.chat_template())
    texts = [bare.apply_chat_template(transcript, tokenize=False) for transcript in shown]
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(bpe.train(texts), folder)
    return AutoTokenizer.from_pretrained(folder)


def encode(tokenizer: Any, transcript: Transcript) -> tuple[list[int], list[int]]:
    """Return token IDs and labels (`IGNORED` outside of the player's messages), encoded turn by turn as in a game."""
    ids: list[int] = []
    labels: list[int] = []
    done = ""
    for turn, message in enumerate(transcript):
        if message["role"] == "assistant":
            prompt = tokenizer.apply_chat_template(transcript[:turn], tokenize=False, add_generation_prompt=True)
            read = tokenizer.encode(prompt[len(done) :], add_special_tokens=False)
            said = tokenizer.encode(message["content"] + bpe.END, add_special_tokens=False)
            ids += read + said
            labels += [IGNORED] * len(read) + said
            done = prompt + message["content"] + bpe.END
    return ids, labels


def make_model(folder: Path, seed: int = 0, steps: int = STEPS, count: int = GAMES) -> float:
    """Make tokenizer and model in ``folder``.

    :param count: Number of games for the pretraining.
    :returns: Loss of the last step on the players' messages.
    """
    torch.set_num_threads(1)
    rng = random.Random(seed)
    tokenizer = make_tokenizer(folder, games(rng, GAMES_FOR_TOKENIZER))
    shown = [encode(tokenizer, transcript) for transcript in games(rng, count)]
    model = build_model(tokenizer, seed)
    own = learn_to_read_and_say(model, shown, tokenizer.pad_token_id, rng, steps=steps, batch=BATCH)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return own


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "tiny_werewolf")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    make_model(options.out, options.seed, options.steps)
