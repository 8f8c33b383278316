"""Models of the installed AgentScope, 1.x or 2.x, as helper models, against a real server on loopback."""

import asyncio
import json
import threading
from importlib import metadata

import pytest
from pydantic import BaseModel

from astuner.contracts.errors import ConfigError
from astuner.testing import ScriptedModel
from astuner_helpers import HelperFailed, HelperModels
from astuner_helpers.agentscope_models import make_model
from astuner_helpers.settings import HelperModel
from tests.table import table

pytest.importorskip("agentscope")

CLIENT_OPTIONS = "client_args" if metadata.version("agentscope") == "1.0.7" else "client_kwargs"
VERSION_2 = metadata.version("agentscope").startswith("2.")
ASK = [{"role": "system", "content": "You judge."}, {"role": "user", "content": "How good is it?"}]
KEY = "sk-very-secret-0123456789"


class Verdict(BaseModel):
    score: int


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("ASTUNER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HELPER_KEY", KEY)
    monkeypatch.setattr("astuner_helpers.helper._FIRST_WAIT", 0.001)


def helper(url, *, agentscope="OpenAIChatModel", kwargs=None, **fields):
    options = {CLIENT_OPTIONS: {"base_url": url}, **(kwargs or {})}
    section = HelperModel(
        agentscope=agentscope, model="small", api_key_env="HELPER_KEY", agentscope_kwargs=options, **fields
    )
    return HelperModels({"judge": section}, scope="run").get("judge", where="x")


def ask(model, **options):
    return asyncio.run(model.ask(ASK, purpose="test", **options))


def texts(messages):
    """The texts of messages, whose content is a string or a list of blocks."""
    contents = [message["content"] for message in messages]
    return [c if isinstance(c, str) else "".join(block["text"] for block in c) for c in contents]


@table("stream", [False, True])
def test_it_answers_with_its_tokens_and_from_the_cache_afterwards(stream):
    with ScriptedModel(lambda body: "quite good", api_key=KEY) as server:
        one = helper(server.base_url, kwargs={"stream": stream}, price={"input": 0, "output": 1e6})
        first, second = ask(one, temperature=0.5, max_tokens=20), ask(one, temperature=0.5, max_tokens=20)
        (body,) = server.requests
    assert (first.text, first.completion_tokens, first.cost, first.cached) == ("quite good", 2, 2.0, False)
    assert (second.text, second.cost, second.cached) == ("quite good", 0.0, True)
    length = body["max_completion_tokens" if VERSION_2 else "max_tokens"]
    assert (texts(body["messages"]), body["temperature"], length) == ([m["content"] for m in ASK], 0.5, 20)
    assert body.get("stream", False) is stream


def test_a_structured_answer():
    with ScriptedModel(lambda body: {"score": 4}) as server:
        answer = ask(helper(server.base_url), answer=Verdict)
        again = ask(helper(server.base_url), answer=Verdict)
    assert answer.data == again.data == Verdict(score=4)
    assert again.cached
    assert server.requests[0]["response_format"]["type"] == "json_schema"


def test_what_may_pass_is_asked_again_by_us_and_not_by_its_client():
    replies = iter([(500, {"error": {"message": "no"}}), (429, {"error": {"message": "no"}}), "yes"])
    with ScriptedModel(lambda body: next(replies)) as server:
        one = helper(server.base_url)
        assert ask(one).text == "yes"
    assert len(server.requests) == 3
    assert (one.usage().calls, one.usage().failed) == (3, 2), "every request is on record"


def test_what_may_not_pass_fails_at_once_and_the_key_is_not_said():
    with ScriptedModel(lambda body: (401, {"error": {"message": f"wrong key {KEY}"}})) as server:
        with pytest.raises(HelperFailed) as refused:
            ask(helper(server.base_url))
        assert len(server.requests) == 1
    assert "401" in str(refused.value)
    assert KEY not in str(refused.value)


def test_nobody_listens_and_nothing_is_billed():
    with ScriptedModel(lambda body: "x") as server:
        url = server.base_url
    one = helper(url, max_retries=1)
    with pytest.raises(HelperFailed, match="after 2 tries"):
        ask(one)
    assert one.usage().tokens == 0


def test_it_has_its_time_limit():
    over = threading.Event()

    def reply(body):
        over.wait(30)
        return "late"

    with ScriptedModel(reply) as server:
        with pytest.raises(HelperFailed, match=r"0\.2 s|imed out|imeout"):
            ask(helper(server.base_url, timeout=0.2, max_retries=0))
        over.set()


def test_an_unknown_class_and_wrong_options_are_config_errors():
    models = HelperModels({"judge": HelperModel(agentscope="NoSuchModel", model="m")}, scope="run")
    with pytest.raises(ConfigError, match=r"judge\.agentscope: .*no class 'NoSuchModel'; available: .*OpenAIChatModel"):
        models.get("judge", where="x")
    with pytest.raises(ConfigError, match="cannot create"):
        helper("http://127.0.0.1:1/v1", kwargs={CLIENT_OPTIONS: {"no_such_option": 1}})


def tool_call(arguments):
    """A response of the chat completions API that calls AgentScope's tool for structured output."""
    function = {"name": "generate_structured_output", "arguments": json.dumps(arguments)}
    message = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    return 200, {"id": "1", "object": "chat.completion", "created": 0, "choices": [choice], "usage": usage}


@pytest.mark.skipif(VERSION_2, reason="AgentScope 2.x formats the messages in its models")
def test_messages_of_vendors_with_other_formats_are_written_by_agentscope():
    from astuner_helpers.agentscope_models import format_messages_1

    messages = asyncio.run(format_messages_1("GeminiChatModel", ASK))
    assert all("parts" in message for message in messages), json.dumps(messages)


@pytest.mark.skipif(not VERSION_2, reason="needs AgentScope 2.x")
def test_other_classes_of_2x_are_asked_for_structured_answers_by_a_tool():
    replies = iter([tool_call({"points": 4}), tool_call({"score": 4})])
    with ScriptedModel(lambda body: next(replies)) as server:
        one = helper(server.base_url, agentscope="DeepSeekChatModel")
        answer = ask(one, answer=Verdict)
        invalid, valid = server.requests  # each attempt is one request
    assert answer.data == Verdict(score=4)
    assert (answer.prompt_tokens, answer.completion_tokens) == (5, 3)
    assert [tool["function"]["name"] for tool in valid["tools"]] == ["generate_structured_output"]
    assert invalid["tool_choice"]["function"]["name"] == "generate_structured_output"
    assert (one.usage().calls, one.usage().failed) == (2, 1)


@pytest.mark.skipif(not VERSION_2, reason="needs AgentScope 2.x")
def test_options_of_2x_go_to_the_parameters_the_credential_and_the_request():
    with ScriptedModel(lambda body: "yes") as server:
        section = HelperModel(
            agentscope="OpenAIChatModel",
            model="small",
            api_key_env="HELPER_KEY",
            agentscope_kwargs={"base_url": server.base_url, "top_p": 0.5, "generate_kwargs": {"seed": 7}},
        )
        one = HelperModels({"judge": section}, scope="run").get("judge", where="x")
        assert [ask(one, temperature=t).text for t in (0.25, 0.75)] == ["yes", "yes"]
        assert [(body["top_p"], body["seed"], body["temperature"]) for body in server.requests] == [
            (0.5, 7, 0.25),
            (0.5, 7, 0.75),
        ]


@pytest.mark.skipif(not VERSION_2, reason="needs AgentScope 2.x")
@table("name", [n for n in dir(__import__("agentscope.model").model) if n.endswith("Model")])
def test_every_class_of_2x_can_be_made(name):
    from agentscope import model

    section = HelperModel(agentscope=name, model="small")
    try:
        made = make_model(getattr(model, name), section, KEY)
    except ImportError as e:
        pytest.skip(f"its client is not installed: {e}")
    assert (made.model.stream, made.model.max_retries) == (False, 0)
    assert getattr(getattr(made.model, "client", None), "max_retries", 0) == 0


def test_a_class_without_its_key_names_the_settings(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    section = HelperModel(agentscope="OpenAIChatModel", model="small")
    with pytest.raises(ConfigError, match=r"(?s)cannot create .*agentscope_kwargs and api_key_env"):
        HelperModels({"judge": section}, scope="run").get("judge", where="x")
