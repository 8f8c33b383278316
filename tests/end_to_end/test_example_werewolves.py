"""The Werewolves example: its rules hold in every game, its words are read strictly, and its agents keep to them."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from astuner.builtin.jsonl import JsonlConfig, JsonlTaskReader
from astuner.chat.codec import ChatCodec
from astuner.config import load_config
from astuner.contracts.types import SamplingParams, Split, StopReason, WorkflowTask
from astuner.rollout.metrics import continued_share
from astuner.rollout.models import PolicyModel
from astuner.rollout.runner import EpisodeRunner
from astuner.rollout.turns import build_samples
from astuner.testing import FakeEngine, check_workflow
from tests.table import table

EXAMPLE = Path(__file__).parents[2] / "examples" / "werewolves"
sys.path.append(str(EXAMPLE))  # as the example itself has it when it is loaded

import werewolf_words as words  # noqa: E402
from werewolf_rules import SEER, VILLAGER, WEREWOLF, Game, RuleBroken, leaders  # noqa: E402

DEAL = ("werewolf", "villager", "seer", "werewolf", "villager", "villager")
FILES = ("werewolves.yaml", "werewolves_two_policies.yaml", "werewolves_external.yaml")
SAMPLING = SamplingParams(max_tokens=200)
AGENTSCOPE = version("agentscope")
LONGER_PROMPTS = pytest.mark.skipif(AGENTSCOPE == "1.0.7", reason="its agent adds a tool and repeats empty replies")

deals = st.lists(st.sampled_from((SEER, VILLAGER)), min_size=2, max_size=7).flatmap(
    lambda others: st.integers(1, len(others) - 1).flatmap(lambda wolves: st.permutations([WEREWOLF] * wolves + others))
)


def script():
    spec = importlib.util.spec_from_file_location("werewolf_make_tasks", EXAMPLE / "make_tasks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --------------------------------------------------------------------------------------------------------------- rules


@given(deal=deals, max_days=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_every_game_ends_and_what_it_says_is_consistent(deal, max_days, seed):
    rng, game = random.Random(seed), Game(deal, max_days)

    def choices(players):
        return {player: rng.choice([None, *game.targets(player)]) for player in players}

    moves = 0
    while not game.is_over:
        before = list(game.living)
        if game.is_night:
            for seer in game.alive(SEER):
                looked_at = rng.choice(game.targets(seer))
                assert game.sees(seer, looked_at) == (deal[looked_at - 1] == WEREWOLF)
            gone = game.night(choices(game.alive(WEREWOLF)))
            assert gone is None or deal[gone - 1] != WEREWOLF
        else:
            gone = game.vote(choices(game.living))
        assert game.living == [player for player in before if player != gone]
        moves += 1
    assert moves <= 2 * max_days
    wolves, living = len(game.alive(WEREWOLF)), len(game.living)
    assert game.winner == (VILLAGER if wolves == 0 else WEREWOLF if wolves >= living - wolves else None)
    rewards = game.rewards()
    assert rewards.keys() == set(deal)
    assert rewards[WEREWOLF] == (game.winner == WEREWOLF)
    assert all(reward == (game.winner == VILLAGER) for role, reward in rewards.items() if role != WEREWOLF)
    with pytest.raises(RuleBroken, match="over"):
        game.vote({})


@given(choices=st.dictionaries(st.integers(1, 6), st.none() | st.integers(1, 6)))
def test_the_leaders_are_those_named_most_often(choices):
    counts = Counter(target for target in choices.values() if target is not None)
    assert leaders(choices) == sorted(p for p in counts if counts[p] == max(counts.values()))


def test_a_game_from_the_first_night_to_the_last():
    game = Game(DEAL)
    assert game.targets(1) == [2, 3, 5, 6]
    assert game.targets(3) == [1, 2, 4, 5, 6]
    assert game.sees(3, 4)
    assert game.night({1: 2, 4: 2}) == 2
    assert game.targets(1) == [3, 4, 5, 6]
    assert game.vote({1: 5, 3: 4, 4: None, 5: 4, 6: 1}) == 4
    assert (game.winner, game.is_over) == (None, False)
    assert game.night({1: 5}) == 5
    assert (game.winner, game.living) == (None, [1, 3, 6])
    assert game.vote({3: 1, 6: 1, 1: 6}) == 1
    assert game.winner == VILLAGER
    assert game.rewards() == {"werewolf": 0.0, "seer": 1.0, "villager": 1.0}


def test_the_werewolves_win_when_they_are_half():
    game = Game(DEAL)
    game.night({1: 2, 4: 2})
    game.vote({1: 5, 4: 5})
    assert (game.living, game.winner) == ([1, 3, 4, 6], WEREWOLF)
    assert game.rewards() == {"werewolf": 1.0, "seer": 0.0, "villager": 0.0}


def test_nobody_wins_when_the_days_are_over():
    game = Game(DEAL, max_days=1)
    assert game.night({1: None, 4: None}) is None
    assert not game.is_over
    assert game.vote({1: 2, 2: 1}) is None
    assert (game.is_over, game.winner) == (True, None)
    assert game.rewards() == {"werewolf": 0.0, "seer": 0.0, "villager": 0.0}


@table(
    ("prey", "victim"),
    [({1: 2, 4: 3}, 3), ({1: 2, 4: None}, 2), ({1: None, 4: None}, None), ({}, None), ({4: 3, 1: 2}, 2)],
)
def test_among_split_werewolves_the_last_word_counts(prey, victim):
    assert Game(DEAL).night(prey) == victim


@table(
    ("move", "why"),
    [
        (lambda g: g.night({2: 3}), "player 2 may not choose now"),
        (lambda g: g.night({1: 4}), "may not choose player 4"),  # its fellow
        (lambda g: g.night({1: 7}), "may not choose player 7"),
        (lambda g: g.night({1: 1}), "may not choose player 1"),
        (lambda g: g.vote({1: 2}), "it is night"),
        (lambda g: g.sees(2, 1), "player 2 may not choose now"),
        (lambda g: g.sees(3, 3), "may not choose player 3"),
        (lambda g: (g.night({1: 2}), g.night({1: 3})), "it is day"),
        (lambda g: (g.night({1: 2}), g.sees(3, 1)), "it is day"),
        (lambda g: (g.night({1: 2}), g.vote({2: 1})), "player 2 may not choose now"),  # the dead do not vote
        (lambda g: (g.night({1: 2}), g.vote({1: 2})), "may not choose player 2"),
        (lambda g: (g.night({1: 2}), g.vote({3: 3})), "may not choose player 3"),
    ],
)
def test_what_the_rules_forbid_is_refused(move, why):
    game = Game(DEAL)
    with pytest.raises(RuleBroken, match=why):
        move(game)


@table(
    ("deal", "days", "why"),
    [
        (("villager",) * 3, 3, "0 of 3 players are werewolves"),
        (("werewolf", "villager"), 3, "1 of 2 players are werewolves"),
        (("werewolf", "villager", "baker"), 3, "unknown role 'baker'"),
        (DEAL, 0, "max_days is 0"),
    ],
)
def test_a_deal_that_is_no_game_is_refused(deal, days, why):
    with pytest.raises(RuleBroken, match=why):
        Game(deal, days)


# --------------------------------------------------------------------------------------------------------------- words


@table(
    ("answer", "number"),
    [
        ("\\boxed{3}", 3),
        ("I trust nobody.\nSo: \\boxed{ 12 }.", 12),
        ("\\boxed{0}", 0),  # a number; that it is no player's is for the rules to say
        ("", None),
        ("3", None),
        ("boxed{3}", None),
        ("\\boxed{}", None),
        ("\\boxed{Player 3}", None),
        ("\\boxed{-3}", None),
        ("\\boxed{3.0}", None),
        ("\\boxed{٣}", None),  # a digit to Python's int, and none that anybody was asked for
        ("\\boxed{1000}", None),
        ("\\boxed{3} or \\boxed{4}", None),
        ("\\boxed{3} \\boxed{3}", None),
        ("\\boxed{3} \\boxed{", None),
        ("\\boxed{\\boxed{3}}", None),
    ],
)
def test_a_choice_is_read_strictly(answer, number):
    assert words.chosen(answer) == number


@given(st.text("\\boxed{}0123456789 \n", max_size=40) | st.text(max_size=40))
def test_reading_a_choice_never_fails(answer):
    assert words.chosen(answer) in {None, *range(1000)}


def test_only_the_pack_is_told_who_the_werewolves_are():
    game = Game(DEAL)
    told = {player: words.rules_for(game, player) for player in game.living}
    assert "You are a werewolf, with 4." in told[1]
    assert "You are a werewolf, with 1." in told[4]
    assert "You are a seer." in told[3]
    assert all("with" not in told[player].partition("You are a ")[2].partition("\n")[0] for player in (2, 3, 5, 6))
    assert all("2 werewolves, 1 seer, 3 villagers" in text for text in told.values())


# ------------------------------------------------------------------------------------------------------------ workflow


def config(name: str = "werewolves.yaml", *overrides: str):
    return load_config(EXAMPLE / name, overrides)


def workflow():
    return config().resolve("workflow", "workflow.py->WerewolvesWorkflow")


def task(**metadata) -> WorkflowTask:
    from astuner.contracts.types import Task

    deal = {"roles": list(DEAL), "first_speaker": 4, "max_days": 3}
    made = Task(task_id="deal", main_query="a game", metadata={**deal, **metadata})
    return WorkflowTask(task=made, episode_id="episode", group_id="group")


def asked(prompt: str) -> str:
    """The last line that a player was told."""
    return prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0].rpartition("\n")[2]


def seat(prompt: str) -> int:
    return int(prompt.partition("You are player ")[2].partition(" ")[0])


def first_allowed(prompt: str) -> str:
    """A player who always chooses the first of the players on offer."""
    question = asked(prompt)
    return f"\\boxed{{{question.rpartition(': ')[2].split()[0]}}}" if "hoose" in question else "I am a villager."


def episode_of(replies, *, configured=None, workflow_task=None, max_model_len=100_000):
    engine = FakeEngine(replies, max_model_len=max_model_len)
    runner = EpisodeRunner(configured or config())
    models = dict.fromkeys(("default", "fixed"), PolicyModel(engine, ChatCodec(engine.tokenizer)))
    return asyncio.run(runner.run(workflow_task or task(), models, SAMPLING)), engine


def test_the_game_is_played_by_the_rules_and_the_workflow_keeps_its_contract():
    output = check_workflow(workflow(), task(), replies=first_allowed, config=config())
    # Night 1: both name 2. Day 1: 3, 4, 5 and 6 name 1. Night 2: 4 names 3. Day 2: 5 and 6 name 4.
    assert output.metadata == {"winner": VILLAGER, "living": [5, 6]}
    assert output.reward == {"werewolf": 0.0, "seer": 1.0, "villager": 1.0}
    assert output.is_success is False
    assert output.metrics == {
        "werewolves_win": 0.0, "village_wins": 1.0, "days": 2.0, "silent_players": 0.0,
        "werewolf_illegal": 0.0, "werewolf_unclear": 0.0, "village_illegal": 0.0, "village_unclear": 0.0,
    }  # fmt: skip


def test_nobody_hears_what_is_not_for_them():
    def replies(prompt):
        return first_allowed(prompt) + (" at night" if "Night" in asked(prompt) else " by day")

    episode, engine = episode_of(replies)
    texts = {seat(text): text for text in (engine.tokenizer.decode(call[0]) for call in engine.calls)}
    assert "Player 1: \\boxed{2} at night" in texts[4]  # the pack hears each other ...
    assert not any(f"Player {n}: \\boxed{{2}}" in texts[s] for n in (1, 4) for s in (3, 5, 6))  # ... and nobody else
    assert "Player 1 is a werewolf." in texts[3]
    assert not any("Player 1 is a werewolf." in texts[s] for s in (1, 4, 5, 6))
    assert all("Player 3: I am a villager. by day" in texts[s] for s in (4, 5, 6))
    assert all("Player 2 died, a villager. Living: 1 3 4 5 6" in texts[s] for s in (1, 3, 4, 5, 6))
    votes = "Votes: 1 for 3, 3 for 1, 4 for 1, 5 for 1, 6 for 1. Player 1 goes, a werewolf."
    assert all(votes in texts[s] for s in (3, 4, 5, 6))
    heard = [line for text in texts.values() for line in text.splitlines() if line.startswith("Player ")]
    assert not any("\\boxed" in line and "by day" in line for line in heard)  # a vote is secret until it is counted
    assert episode.stop_reason is StopReason.COMPLETED


def test_the_first_speaker_moves_on_by_one_every_day():
    def speakers(**metadata):
        episode, _ = episode_of(first_allowed, workflow_task=task(**metadata))
        return [turn.agent[-1] for turn in episode.turns if "speak" in turn.request[-1]["content"]]

    assert speakers(first_speaker=4) == ["4", "5", "6", "1", "3", "5", "6", "4"]  # 2 was dead, then 1 and 3
    assert speakers(first_speaker=1) == ["1", "3", "4", "5", "6", "4", "5", "6"]


def test_the_dead_are_not_asked():
    episode, _ = episode_of(first_allowed)
    last = {}
    for turn in episode.turns:
        last[turn.agent] = turn.index
    assert "player_2" not in last  # the victim of the first night is a villager and had no say in it
    assert last["player_1"] < last["player_3"] < last["player_6"]


@LONGER_PROMPTS
@table("noise", ["", "I vote for player 3!", "\\boxed{99}", "\\boxed{", "<tool_call>{}</tool_call>"])
def test_with_players_who_talk_nonsense_the_game_ends_and_it_is_counted(noise):
    episode, _ = episode_of(lambda prompt: noise)
    assert episode.stop_reason is StopReason.COMPLETED
    assert episode.output.metadata == {"winner": None, "living": [1, 2, 3, 4, 5, 6]}
    assert episode.output.reward == {"werewolf": -2.0, "seer": -2.0, "villager": -2.0}  # every choice was wasted
    kind = "illegal" if "99" in noise else "unclear"
    assert episode.output.metrics[f"werewolf_{kind}"] == episode.output.metrics[f"village_{kind}"] == 1.0
    assert continued_share([episode]) == 1.0


def test_the_players_names_and_roles_reach_the_recorder_and_only_wolves_are_cut_into_samples():
    episode, _ = episode_of(first_allowed)
    seats = {turn.agent: (turn.role, turn.trained) for turn in episode.turns}
    assert seats == {f"player_{n}": (role, role == WEREWOLF) for n, role in enumerate(DEAL, 1) if n != 2}
    made = build_samples(episode)
    assert {sample.agent for sample in made.samples} == {"player_1", "player_4"}
    assert len(made.samples) == 2  # one sequence per werewolf: its conversation only grows
    assert {sample.reward for sample in made.samples} == {0.0}
    trained = sum(sample.trained_tokens for sample in made.samples)
    assert made.generated_tokens == trained + made.untrained_tokens
    assert made.untrained_tokens > 0
    assert made.dropped_tokens == 0


@pytest.fixture
def opponent():
    """A server that plays as `first_allowed` does, in OpenAI's chat completions."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            messages = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"]
            heard.append((self.headers["Authorization"], messages))
            prompt = f"<|im_start|>user\n{messages[-1]['content']}<|im_end|>"
            choice = {"message": {"role": "assistant", "content": first_allowed(prompt)}, "finish_reason": "stop"}
            body = json.dumps({"choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            """Say nothing."""

    heard = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1", heard
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_village_on_another_server_plays_and_is_in_no_sample(opponent, monkeypatch):
    url, heard = opponent
    monkeypatch.setenv("OPPONENT_API_KEY", "sk-of-the-test")
    places = [f"astuner.agents.{role}.base_url={url}" for role in ("villager", "seer")]
    episode, _ = episode_of(first_allowed, configured=config("werewolves_external.yaml", *places))
    assert episode.output.metadata == {"winner": VILLAGER, "living": [5, 6]}  # the game of the scripted model above
    assert {turn.agent for turn in episode.turns} == {"player_1", "player_4"}
    assert {turn.agent: turn.role for turn in episode.external} == {
        "player_3": "seer", "player_5": "villager", "player_6": "villager",
    }  # fmt: skip
    assert {key for key, _ in heard} == {"Bearer sk-of-the-test"}
    assert all(messages[0]["content"].startswith("You are player ") for _, messages in heard)
    made = build_samples(episode)
    assert {sample.agent for sample in made.samples} == {"player_1", "player_4"}
    assert made.untrained_tokens == 0


@pytest.mark.skipif(AGENTSCOPE < "2", reason="with 1.x, the agent has the formatter, not the model")
def test_every_turn_continues_and_with_a_formatter_that_rewrites_the_history_no_turn_does(monkeypatch):
    from agentscope.formatter import OpenAIMultiAgentFormatter
    from werewolf_player import Player

    episode, _ = episode_of(first_allowed)
    assert continued_share([episode]) == 1.0

    made = Player.__init__

    def with_another_formatter(self, name, rules, model):
        model.formatter = OpenAIMultiAgentFormatter()
        made(self, name, rules, model)

    monkeypatch.setattr(Player, "__init__", with_another_formatter)
    rewritten, _ = episode_of(lambda prompt: first_allowed(prompt.replace("\n</history>", "")))
    assert rewritten.output.metadata == episode.output.metadata  # the same game ...
    assert continued_share([rewritten]) == 0.0  # ... and every turn a sequence of its own
    assert len(build_samples(rewritten).samples) == sum(turn.trained for turn in rewritten.turns)


@LONGER_PROMPTS
def test_a_player_whose_context_is_full_says_nothing_more_and_the_game_goes_on():
    episode, _ = episode_of(first_allowed, max_model_len=1000)  # of byte tokens: full on the first day
    assert episode.stop_reason is StopReason.CONTEXT_OVERFLOW
    assert episode.output.metrics["silent_players"] >= 1
    assert episode.reward is not None


@table(("roles", "why"), [(["werewolf"] * 6, "6 players are werewolves"), (["baker"] * 6, "role 'baker'")])
def test_a_task_that_is_no_game_fails_with_the_reason(roles, why):
    episode, _ = episode_of(first_allowed, workflow_task=task(roles=roles))
    assert episode.stop_reason is StopReason.WORKFLOW_FAILED
    assert why in episode.error


# ------------------------------------------------------------------------------------------------------- config, tasks


@table("name", FILES)
def test_the_experiment_files_load_and_speak_for_every_role(name):
    settings = config(name).astuner
    assert settings.agents.keys() == {"werewolf", "villager", "seer"}
    assert settings.rollout.workflow == "workflow.py->WerewolvesWorkflow"
    assert set(yaml.safe_load((EXAMPLE / name).read_text())) == {"astuner"}


def test_the_three_files_differ_in_who_learns():
    from astuner.rollout.models import AgentRegistry

    trained = {name: AgentRegistry.of(config(name).astuner).trained_policies for name in FILES}
    assert list(trained.values()) == [("default",), ("pack", "village"), ("default",)]
    external = config("werewolves_external.yaml").astuner.agents
    assert {role: entry.model for role, entry in external.items()} == {
        "werewolf": "policy", "villager": "external", "seer": "external",
    }  # fmt: skip
    assert external["seer"] == external["villager"]


def test_the_opponents_key_comes_from_the_environment(monkeypatch):
    from astuner.contracts.errors import ConfigError

    monkeypatch.delenv("OPPONENT_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="OPPONENT_API_KEY, which is not set"):
        EpisodeRunner(config("werewolves_external.yaml")).prepare()
    monkeypatch.setenv("OPPONENT_API_KEY", "sk-of-the-test")
    EpisodeRunner(config("werewolves_external.yaml")).prepare()


def test_the_tasks_are_those_that_the_script_writes_and_no_held_out_deal_is_trained_on(tmp_path):
    script().main(["--out", str(tmp_path)])
    for name in ("train.jsonl", "validation.jsonl"):
        assert (tmp_path / name).read_text() == (EXAMPLE / "data" / name).read_text()
    section = yaml.safe_load((EXAMPLE / "werewolves.yaml").read_text())["astuner"]["task_reader"]["jsonl"]
    reader = JsonlTaskReader(JsonlConfig.model_validate(section), base_dir=EXAMPLE)
    tasks = {split: [task.metadata for task in reader.read(split)] for split in Split}
    assert (len(tasks[Split.TRAIN]), len(tasks[Split.VALIDATION])) == (320, 256)
    for metadata in (*tasks[Split.TRAIN], *tasks[Split.VALIDATION]):
        Game(metadata["roles"], metadata["max_days"])
        assert 1 <= metadata["first_speaker"] <= len(metadata["roles"]) == 7
    deals = {split: {tuple(metadata["roles"]) for metadata in of} for split, of in tasks.items()}
    assert not deals[Split.TRAIN] & deals[Split.VALIDATION]


def test_the_script_deals_games_of_other_sizes(tmp_path):
    roles = ["werewolf"] * 3 + ["seer"] + ["villager"] * 8
    script().main(["--out", str(tmp_path), "--max-days", "5", "--train", "7", "--roles", *roles])
    (first, *others) = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert len(others) == 6
    assert sorted(first["roles"]) == sorted(roles)
    assert first["max_days"] == 5
