"""A model of the real AgentScope as a helper model, against a real server on loopback."""

import asyncio
import json
import threading

import pytest
from pydantic import BaseModel

from astuner.contracts.errors import ConfigError
from astuner.testing import ScriptedModel
from astuner_helpers import HelperFailed, HelperModels
from astuner_helpers.settings import HelperModel
from tests.table import table

pytest.importorskip("agentscope")

ASK = [{"role": "system", "content": "You judge."}, {"role": "user", "content": "How good is it?"}]
KEY = "sk-very-secret-0123456789"


class Verdict(BaseModel):
    score: int


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("ASTUNER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HELPER_KEY", KEY)
    monkeypatch.setattr("astuner_helpers.helper._FIRST_WAIT", 0.001)


def helper(url, *, kwargs=None, **fields):
    options = {"client_kwargs": {"base_url": url}, **(kwargs or {})}
    section = HelperModel(
        agentscope="OpenAIChatModel", model="small", api_key_env="HELPER_KEY", agentscope_kwargs=options, **fields
    )
    return HelperModels({"judge": section}, scope="run").get("judge", where="x")


def ask(model, **options):
    return asyncio.run(model.ask(ASK, purpose="test", **options))


@table("stream", [False, True])
def test_it_answers_with_its_tokens_and_from_the_cache_afterwards(stream):
    with ScriptedModel(lambda body: "quite good", api_key=KEY) as server:
        one = helper(server.base_url, kwargs={"stream": stream}, price={"input": 0, "output": 1e6})
        first, second = ask(one, temperature=0.5, max_tokens=20), ask(one, temperature=0.5, max_tokens=20)
        (body,) = server.requests
    assert (first.text, first.completion_tokens, first.cost, first.cached) == ("quite good", 2, 2.0, False)
    assert (second.text, second.cost, second.cached) == ("quite good", 0.0, True)
    assert (body["messages"], body["temperature"], body["max_tokens"]) == (ASK, 0.5, 20)
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
    with pytest.raises(ConfigError, match=r"judge\.agentscope: .*no class 'NoSuchModel'; there are .*OpenAIChatModel"):
        models.get("judge", where="x")
    with pytest.raises(ConfigError, match="cannot be made"):
        helper("http://127.0.0.1:1/v1", kwargs={"client_kwargs": {"no_such_option": 1}})


def test_messages_of_vendors_with_other_formats_are_written_by_agentscope():
    from astuner_helpers.agentscope_server import _formatted

    found = asyncio.run(_formatted("GeminiChatModel", ASK))
    assert all("parts" in message for message in found), json.dumps(found)
