"""Several agents in one episode: who speaks, who trains, what each is rewarded with, and what a request may ask."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner.chat.codec import ChatCodec
from astuner.chat.reply import cut_at_stop
from astuner.contracts.errors import ConfigError, TurnLimitReached, UnsupportedRequest
from astuner.contracts.types import Episode, FinishReason, Generation, SamplingParams, Split, StopReason
from astuner.rollout.endings import blame
from astuner.rollout.model_tuner import ModelTuner
from astuner.rollout.models import PolicyModel, one_model
from astuner.rollout.pool import Group
from astuner.rollout.runner import EpisodeRunner
from astuner.rollout.turns import EpisodeRecorder, build_samples
from astuner.testing import FakeEngine, fake_config, make_tokenizer, workflow_task
from astuner_record.conversations import transcript
from tests.table import table

TOKENIZER = make_tokenizer()
CODEC = ChatCodec(TOKENIZER)
ASK = [{"role": "user", "content": "What is 2 + 2?"}]
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
WOLVES = """
  agents:
    wolf: {policy: a}
    sheep: {policy: b, train: false}
"""
MINE = """
from astuner import Workflow, WorkflowOutput
class Mine(Workflow):
    async def execute(self, workflow_task, model_tuner):
        async def ask(name, role=None, text='hi', **options):
            said = [{'role': 'user', 'content': text}]
            return await model_tuner.chat(said, agent_name=name, role=role, **options)
"""


def make(
    folder: Path, replies: Any = lambda prompt: "four", settings: str = "", split: Split = Split.VALIDATION
) -> tuple[ModelTuner, EpisodeRecorder]:
    recorder = EpisodeRecorder()
    tuner = ModelTuner(
        models=one_model(FakeEngine(replies, TOKENIZER), CODEC),
        recorder=recorder,
        sampling=SamplingParams(max_tokens=500),
        config=fake_config(folder, settings),
        workflow_task=workflow_task(split=split),
    )
    return tuner, recorder


def play(folder: Path, body: str, settings: str = WOLVES, replies: Any = lambda prompt: "woof") -> Episode:
    (folder / "mine.py").write_text(MINE + "".join(f"        {line}\n" for line in body.splitlines()))
    yaml = f"  rollout:\n    workflow: mine.py->Mine\n    max_retries: 0\n{settings}"
    models = {name: PolicyModel(FakeEngine(replies, TOKENIZER), CODEC) for name in ("a", "b", "default")}
    runner = EpisodeRunner(fake_config(folder, yaml))
    return asyncio.run(runner.run(workflow_task(), models, SamplingParams(max_tokens=1000)))


# --------------------------------------------------------------------------------------------- who is who


def test_a_role_or_a_name_says_which_entry_applies(tmp_path: Path) -> None:
    episode = play(
        tmp_path,
        "await ask('ann', 'wolf')\nawait ask('bob', 'wolf')\nawait ask('sheep')\nawait ask('ann')\n"
        "return WorkflowOutput(reward={'wolf': 1.0, 'bob': 0.5})\n",
    )
    assert (episode.stop_reason, episode.error) == (StopReason.COMPLETED, "")
    said = [(t.agent, t.role, t.policy, t.trained) for t in episode.turns]
    assert said == [
        ("ann", "wolf", "a", True),
        ("bob", "wolf", "a", True),
        ("sheep", "sheep", "b", False),
        ("ann", "wolf", "a", True),
    ]
    built = build_samples(episode)
    assert {(s.agent, s.role, s.policy, s.reward) for s in built.samples} == {
        ("ann", "wolf", "a", 1.0),
        ("bob", "wolf", "a", 0.5),
    }
    assert built.untrained_tokens == len("woof") + 1
    assert built.generated_tokens == built.untrained_tokens + sum(s.trained_tokens for s in built.samples)
    assert episode.reward == 0.75  # the mean of what was returned


@table(
    ("body", "complaint"),
    [
        ("await ask('fox')", "astuner.agents has no entry for the agent 'fox' (only wolf, sheep)"),
        ("await ask('fox', 'hunter')", "astuner.agents has no entry for the role 'hunter'"),
        ("await ask('x', 'wolf')\nawait ask('x', 'sheep')", "has the role 'wolf' in this episode"),
        ("await ask('wolf')\nreturn WorkflowOutput(reward={'sheep': 1.0})", "agent 'wolf'"),
        ("await ask('wolf')\nreturn WorkflowOutput(reward={})", "an empty mapping of rewards"),
        ("await ask('wolf')\nreturn WorkflowOutput(reward={'wolf': float('nan')})", "'wolf': nan"),
        ("await ask('wolf', 'wolff')", "no entry for the role 'wolff'"),
        ("model_tuner.base_url_and_key('fox')", "no entry for the agent 'fox'"),
    ],
)
def test_what_is_not_clear_is_not_guessed(tmp_path: Path, body: str, complaint: str) -> None:
    episode = play(tmp_path, body)
    assert (episode.stop_reason, episode.reward) == (StopReason.WORKFLOW_FAILED, None)
    assert complaint in episode.error


def test_a_judge_may_reward_each_agent_and_leave_none_out(tmp_path: Path) -> None:
    judge = (
        "from astuner import Judge, JudgeOutput\n"
        "class Each(Judge):\n"
        "    def judge(self, workflow_task, output):\n"
        "        return JudgeOutput.per_agent({'wolf': 1.0})\n"
        "class Wrong(Judge):\n"
        "    def judge(self, workflow_task, output):\n"
        "        return JudgeOutput.per_agent({'sheep': 1.0})\n"
    )
    (tmp_path / "judges.py").write_text(judge)
    body = "await ask('wolf')\nreturn WorkflowOutput()\n"
    good = play(tmp_path, body, WOLVES + "  task_judge: {judge: judges.py->Each}\n")
    assert (good.reward_source, good.reward_of("wolf", "wolf")) == ("judge", 1.0)
    bad = play(tmp_path, body, WOLVES + "  task_judge: {judge: judges.py->Wrong}\n")
    assert bad.stop_reason is StopReason.JUDGE_FAILED
    assert "the judge returned rewards for sheep" in bad.error
    assert "agent 'wolf'" in bad.error


def test_a_check_that_fires_punishes_the_one_who_spoke(tmp_path: Path) -> None:
    settings = "  agents:\n    wolf: {}\n    sheep: {}\n    goat: {train: false}\n"
    body = "await ask('goat')\nawait ask('sheep')\nawait ask('wolf', text='mad')\nreturn WorkflowOutput(reward=1.0)\n"
    mad = "the moon is full and " * 40
    episode = play(
        tmp_path, body, settings, lambda prompt: mad if "mad" in prompt or "goat" in prompt else "A quiet day."
    )
    assert (episode.stop_reason, episode.reward_source) == (StopReason.CHECK_ABORTED, "check")
    assert [s.agent for s in build_samples(episode).samples] == ["wolf"]
    assert episode.reward_of("sheep", "sheep") is None


def test_where_the_episode_goes_on_the_others_keep_their_rewards(tmp_path: Path) -> None:
    settings = (
        "    agent_madness_termination: false\n    agent_madness_reward: -1.0\n"
        "  agents:\n    wolf: {}\n    fox: {}\n    sheep: {}\n"
    )
    body = (
        "await ask('wolf', text='mad')\nawait ask('sheep')\nawait ask('fox', text='mad')\n"
        "return WorkflowOutput(reward={'wolf': 1.0, 'fox': 1.0, 'sheep': 0.5})\n"
    )
    episode = play(tmp_path, body, settings, lambda prompt: "moon " * 50 if "mad" in prompt else "A quiet day.")
    assert episode.stop_reason is StopReason.CHECK_ABORTED
    assert {s.agent: s.reward for s in build_samples(episode).samples} == {"wolf": -1.0, "fox": -1.0, "sheep": 0.5}


def test_a_game_that_always_has_a_winner_still_has_something_to_learn_from(tmp_path: Path) -> None:
    settings = "  agents:\n    wolf: {}\n    sheep: {}\n"
    games = []
    for won in (0.0, 1.0):
        folder = tmp_path / f"{won}"
        folder.mkdir()
        rewards = {"wolf": won, "sheep": 1 - won}
        games.append(
            play(folder, f"await ask('wolf')\nawait ask('sheep')\nreturn WorkflowOutput(reward={rewards})\n", settings)
        )
    assert [game.reward for game in games] == [0.5, 0.5]
    task = games[0].workflow_task.task
    assert Group(group_id="g", task=task, episodes=tuple(games)).has_spread
    assert not Group(group_id="g", task=task, episodes=(games[0], games[0])).has_spread


# ------------------------------------------------------------------------------------------ external models


@pytest.fixture
def server() -> Iterator[tuple[str, list[Any]]]:
    """A chat-completions server outside of the run, whose first answer is always 503."""
    heard: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            heard.append((self.path, self.headers.get("Authorization"), body))
            message = {"role": "assistant", "content": None if len(heard) == 3 else "I am far away."}
            answer = {"choices": [{"message": message, "finish_reason": "stop"}], "usage": {"prompt_tokens": 7}}
            data = json.dumps({} if len(heard) == 4 else answer).encode()
            self.send_response(503 if len(heard) == 1 else 200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Silent."""

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}/v1", heard
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_an_external_model_speaks_and_never_enters_a_sample(
    tmp_path: Path, server: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAR_KEY", "s3cret-key")
    url, heard = server
    settings = (
        "  agents:\n    wolf: {}\n"
        f"    host: {{model: external, name: far, base_url: '{url}', api_key_env: FAR_KEY, temperature: 0.3}}\n"
    )
    body = (
        "first = await ask('host', text='who?')\nawait ask('wolf', text=first.text)\nempty = await ask('host')\n"
        "assert (first.prompt_tokens, first.turn, first.token_logprobs(), empty.text) == (7, None, [], '')\n"
        "try:\n    await ask('host')\n"
        "except Exception as e:\n    assert 'no chat completion' in str(e)\n"
        "return WorkflowOutput(reward=1.0)\n"
    )
    episode = play(tmp_path, body, settings)
    assert episode.stop_reason is StopReason.MODEL_FAILED, episode.error  # the last answer; an infrastructure failure
    assert [path for path, _, _ in heard] == ["/v1/chat/completions"] * 4
    assert heard[1][1] == "Bearer s3cret-key"
    assert (heard[1][2]["model"], heard[1][2]["temperature"]) == ("far", 0.3)
    assert [(t.index, t.agent, t.model, t.message["content"]) for t in episode.external] == [
        (0, "host", "far", "I am far away."),
        (2, "host", "far", ""),
    ]
    assert [(t.index, t.agent) for t in episode.turns] == [(1, "wolf")]
    assert "s3cret" not in json.dumps(transcript(episode))


@table(
    ("entry", "complaint"),
    [
        ("{model: external, name: far}", "astuner.agents.host.base_url is required"),
        ("{model: external, base_url: 'http://127.0.0.1:1/v1'}", "astuner.agents.host.name is required"),
        (
            "{model: external, name: far, base_url: 'http://127.0.0.1:1/v1', api_key_env: NOT_SET_ANYWHERE}",
            "NOT_SET_ANYWHERE, which is not set in the environment",
        ),
    ],
)
def test_an_external_model_that_cannot_be_asked_shows_before_anything_runs(
    tmp_path: Path, entry: str, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        play(tmp_path, "return WorkflowOutput(reward=1.0)", f"  agents:\n    host: {entry}\n")


# --------------------------------------------------------------------------------------- what a request asks


def test_a_stop_string_cuts_the_tokens_and_the_conversation_goes_on_from_there(tmp_path: Path) -> None:
    tuner, recorder = make(tmp_path, ["I say STOP and more", "fine"])

    async def work() -> None:
        first = await tuner.chat(ASK, stop=["HALT", "STOP"])
        assert (first.text, first.finish_reason, first.stop_sequence) == ("I say ", "stop", "STOP")
        assert first.completion_tokens == len("I say STOP")
        assert "".join(token.text for token in first.token_logprobs()) == "I say STOP"
        second = await tuner.chat([*ASK, first.message, *ASK])
        assert second.turn is not None
        assert second.turn.continues == 0

    asyncio.run(work())
    first, second = recorder.turns
    text = TOKENIZER.decode(second.generation.prompt_ids)
    assert "I say STOP<|im_end|>" in text  # the end token is the prompt's, not the reply's
    assert first.generation.finish_reason is FinishReason.STOP


@given(
    st.text("abS", min_size=1, max_size=30), st.lists(st.text("abS", min_size=1, max_size=3), min_size=1, max_size=3)
)
def test_the_cut_is_behind_the_first_token_that_completes_a_stop(text: str, stops: Sequence[str]) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    whole = Generation(
        prompt_ids=[1],
        response_ids=ids,
        logprobs=[-1.0] * len(ids),
        finish_reason=FinishReason.LENGTH,
        policy_version=0,
    )
    cut, stop = cut_at_stop(whole, stops, TOKENIZER.decode)
    kept = TOKENIZER.decode(cut.response_ids)
    if stop is None:
        assert cut is whole
        assert not any(s in text for s in stops)
    else:
        assert any(kept.endswith(s) for s in stops)
        assert not any(s in kept[:-1] for s in stops)
        assert text.startswith(kept)
        assert len(cut.logprobs) == len(cut.response_ids)
        assert cut.finish_reason is FinishReason.STOP


def test_a_structured_answer_is_a_tools_arguments_and_goes_on_exactly(tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "generate_structured_output", "arguments": {"x": 4}}\n</tool_call>'
    tuner, recorder = make(tmp_path, [call, call, "in words"])

    async def work() -> None:
        first = await tuner.chat(ASK, response_schema=SCHEMA)
        assert (first.text, first.structured) == ('{"x": 4}', {"x": 4})
        assert (first.tool_calls, first.finish_reason) == ((), "stop")
        history = [*ASK, {"role": "assistant", "content": first.text}, *ASK]
        second = await tuner.chat(history, response_schema=SCHEMA)
        third = await tuner.chat([*history, second.message, *ASK], response_schema=SCHEMA)
        assert (third.structured, third.text) == (None, "in words")

    asyncio.run(work())
    assert [t.continues for t in recorder.turns] == [None, 0, 1]


def test_no_tool_is_called_beside_a_structure_when_the_choice_is_none(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}]
    call = '<tool_call>\n{"name": "%s", "arguments": {"x": 4}}\n</tool_call>'
    tuner, _ = make(tmp_path, [call % "calc", call % "generate_structured_output", call % "calc"])

    async def work() -> None:
        first = await tuner.chat(ASK, tools, tool_choice="none", response_schema=SCHEMA)
        assert (first.text, first.tool_calls, first.structured, first.finish_reason) == (
            call % "calc",
            (),
            None,
            "stop",
        )
        second = await tuner.chat(ASK, tools, tool_choice="none", response_schema=SCHEMA)
        assert second.structured == {"x": 4}
        third = await tuner.chat(ASK, tools, response_schema=SCHEMA)
        assert third.finish_reason == "tool_calls"
        for choice in ("required", "calcc"):
            with pytest.raises(UnsupportedRequest, match="tool_choice"):
                await tuner.chat(ASK, tool_choice=choice, response_schema=SCHEMA)

    asyncio.run(work())


@table(
    ("options", "complaint"),
    [
        ({"top_p": 0.5}, "top_p is 0.5, .* rollout.top_p = 1"),
        ({"seed": 3}, "seed is 3"),
    ],
)
def test_what_would_spoil_the_training_is_refused_there_only(
    tmp_path: Path, options: dict[str, Any], complaint: str
) -> None:
    training, _ = make(tmp_path, split=Split.TRAIN)
    with pytest.raises(UnsupportedRequest, match=complaint):
        asyncio.run(training.chat(ASK, **options))
    assert asyncio.run(make(tmp_path)[0].chat(ASK, **options)).text == "four"
    frozen, _ = make(tmp_path, settings="  agents:\n    x: {train: false}\n", split=Split.TRAIN)
    assert asyncio.run(frozen.chat(ASK, agent_name="x", **options)).text == "four"


def test_calls_that_bring_no_reply_do_not_count(tmp_path: Path) -> None:
    settings = "  rollout: {multi_turn: {max_steps: 1}}"
    tuner, _ = make(tmp_path, settings=settings)
    with pytest.raises(UnsupportedRequest):
        asyncio.run(tuner.chat([{"role": "nobody", "content": "x"}]))
    assert asyncio.run(tuner.chat(ASK)).text == "four"
    with pytest.raises(TurnLimitReached):
        asyncio.run(tuner.chat(ASK))


def test_what_an_agent_coped_with_is_not_what_ended_it(tmp_path: Path) -> None:
    limit = "    multi_turn: {max_steps: 1}\n"
    spoken = "await ask('x')\ntry:\n    await ask('x')\nexcept Exception as e:\n    limit = str(e)\n"
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
    coped = play(tmp_path / "a", spoken + "{}['key']", limit)
    assert coped.stop_reason is StopReason.WORKFLOW_FAILED
    assert "KeyError: 'key'" in coped.error
    assert "earlier error: agent 'x' has used its 1 model calls" in coped.error
    over_http = RuntimeError("""Error code: 403 - {'error': {'message': "agent 'x' has used its 1 model calls"}}""")
    assert blame(over_http, TurnLimitReached("agent 'x' has used its 1 model calls"))[0] is StopReason.TRUNCATED
    refused = "await ask('x')\ntry:\n    await ask('x', stop='')\nexcept Exception:\n    pass\n"
    went_on = play(tmp_path / "c", refused + "return WorkflowOutput(reward=1.0)", "")
    assert (went_on.stop_reason, went_on.reward) == (StopReason.COMPLETED, 1.0)


def test_a_mistake_in_the_config_ends_the_run_even_if_it_is_swallowed(tmp_path: Path) -> None:
    body = "try:\n    await ask('wolf')\nexcept Exception:\n    pass\nreturn WorkflowOutput(reward=1.0)\n"
    with pytest.raises(ConfigError, match="no model is loaded for the policy 'elsewhere'"):
        play(tmp_path, body, "  agents:\n    wolf: {policy: elsewhere}\n")


def test_an_endpoint_that_cannot_listen_shows_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    settings = "  rollout: {workflow: mine.py->Mine}\n  endpoint: {host: 0.0.0.0}\n"
    runner = EpisodeRunner(fake_config(tmp_path, settings))
    with pytest.raises(ConfigError, match="other machines can reach"):
        runner.prepare()


def test_a_reward_for_nobody_moves_no_mean(tmp_path: Path) -> None:
    body = "await ask('wolf')\nreturn WorkflowOutput(reward={'wolf': 1.0, 'shep': 9.0})\n"
    assert play(tmp_path, body).reward == 1.0


@table(
    ("written", "complaint"),
    [
        ("critic: {polcy: b}", "unknown key astuner.agents.critic.polcy; did you mean policy?"),
        ("critic: {train: maybe}", "astuner.agents.critic.train should be true or false, got 'maybe'"),
        ("critic: {policy: true}", "astuner.agents.critic.policy should be string"),
        ("critic: b", "astuner.agents.critic should be a section (keys below it), got 'b'"),
    ],
)
def test_a_typo_in_an_agent_is_named(tmp_path: Path, written: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as e:
        fake_config(tmp_path, f"  agents:\n    {written}\n")
    assert complaint in str(e.value), str(e.value)


@table(
    "options",
    [
        {"stop": ""},
        {"stop": [3]},
        {"seed": 1.5},
        {"top_p": "high"},
        {"max_tokens": True},
        {"top_p": -1},
        {"top_p": 7.0},
        {"temperature": float("inf")},
        {"temperature": float("nan")},
        {"temperature": 10**400},
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_its_name(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedRequest, match=next(iter(options))):
        asyncio.run(make(tmp_path)[0].chat(ASK, **options))
