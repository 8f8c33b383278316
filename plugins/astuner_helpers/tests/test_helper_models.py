"""Helper models: what is asked, what comes back, what is kept, and what goes wrong at the other end."""

import asyncio
import json
import logging
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from pydantic import BaseModel, ConfigDict, Field

from astuner.contracts.errors import AstunerError, ConfigError
from astuner.testing import ScriptedModel
from astuner_helpers import HelperFailed, HelperModels
from astuner_helpers.ledger import Answers, database
from astuner_helpers.reply import Reply
from astuner_helpers.settings import HelperModel
from tests.table import table

ASK = [{"role": "user", "content": "How good is it?"}]
KEY = "sk-very-secret-0123456789"


class Verdict(BaseModel):
    score: int = Field(ge=0, le=10)
    why: str = ""


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("ASTUNER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("astuner_helpers.helper._FIRST_WAIT", 0.001)


def helper(base_url, name="judge", scope="scope", **fields):
    section = HelperModel(base_url=base_url, model="small", **fields)
    return HelperModels({name: section}, scope=scope).get(name, where="task_judge.helper_model")


def ask(model, messages=ASK, **options):
    return asyncio.run(model.ask(messages, purpose="test", **options))


def rows(query="SELECT * FROM calls"):
    with database().reading() as db:
        cursor = db.execute(query)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


@contextmanager
def raw_server(answer):
    """A server that writes whatever bytes ``answer(handler)`` writes."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            try:
                answer(self)
            except ConnectionError:
                self.close_connection = True

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def send(handler, body, status=200):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(raw)))
    handler.end_headers()
    handler.wfile.write(raw)


def completion(content="ok", *, usage=None, finish_reason="stop", **message):
    choice = {"index": 0, "message": {"role": "assistant", "content": content, **message}}
    return {"choices": [{**choice, "finish_reason": finish_reason}], **({"usage": usage} if usage else {})}


# -------------------------------------------------------------------------------------------------------- what is asked


def test_an_answer_with_its_tokens_and_what_it_cost():
    with ScriptedModel(lambda body: "seven or so") as server:
        answer = ask(helper(server.base_url, price={"input": 1e6, "output": 2e6}))
    assert answer.text == "seven or so"
    assert answer.data is None
    assert not answer.cached
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cost) == (7, 3, 13.0)
    (body,) = server.requests
    assert body == {"model": "small", "messages": ASK, "temperature": 0.0, "max_tokens": 1024}
    (row,) = rows()
    assert (row["scope"], row["name"], row["model"], row["purpose"]) == ("scope", "judge", "small", "test")
    assert (row["state"], row["prompt_tokens"], row["completion_tokens"], row["cost"]) == ("answered", 7, 3, 13.0)
    assert row["estimated"] == 0
    assert row["error"] is None
    assert row["seconds"] > 0


def test_extra_fields_temperature_and_length_are_sent():
    with ScriptedModel(lambda body: "x") as server:
        ask(helper(server.base_url, extra={"top_p": 0.5}, temperature=0.3), max_tokens=9, temperature=1.0)
    assert server.requests[0] == {
        "model": "small", "messages": ASK, "temperature": 1.0, "max_tokens": 9, "top_p": 0.5
    }  # fmt: skip


def test_the_same_is_asked_once_and_another_sample_again():
    with ScriptedModel(lambda body: f"answer {len(server.requests)}") as server:
        one = helper(server.base_url, price={"input": 1, "output": 1})
        first, second, third = ask(one), ask(one), ask(one, sample=1)
        other = ask(helper(server.base_url, scope="another run"))
    assert [a.text for a in (first, second, third, other)] == ["answer 1", "answer 1", "answer 2", "answer 1"]
    assert [a.cached for a in (first, second, third, other)] == [False, True, False, True]
    assert second.cost == 0
    assert second.prompt_tokens == first.prompt_tokens
    usage = one.usage()
    assert (usage.calls, usage.cached, usage.failed) == (2, 1, 0)
    assert str(usage).startswith("2 calls, 1 from the cache, 18 tokens, cost 1.8e-05")


@table(
    "changed",
    [
        {"messages": [{"role": "user", "content": "How bad is it?"}]},
        {"temperature": 0.5},
        {"max_tokens": 5},
        {"answer": Verdict},
        {"section": {"extra": {"seed": 1}}},
        {"section": {"structured": "json_object"}, "answer": Verdict},
    ],
)
def test_what_matters_is_part_of_the_key(changed):
    section = changed.pop("section", {})
    with ScriptedModel(lambda body: {"score": 1}) as server:
        ask(helper(server.base_url))
        assert not ask(helper(server.base_url, **section), **changed).cached
        assert ask(helper(server.base_url, **section), **changed).cached
    assert len(server.requests) == 2


def test_without_a_cache_everything_is_asked():
    with ScriptedModel(lambda body: "x") as server:
        one = helper(server.base_url, cache=False)

        async def both():
            return await asyncio.gather(*(one.ask(ASK, purpose="test") for _ in range(3)))

        asyncio.run(both())
    assert len(server.requests) == 3
    assert rows("SELECT * FROM answers") == []


def test_five_hundred_from_two_loops_and_the_server_sees_what_the_limit_allows():
    seen, now, lock, full = [], [0], threading.Lock(), threading.Event()

    def reply(body):
        with lock:
            now[0] += 1
            seen.append(now[0])
            if now[0] == 5:
                full.set()
        assert full.wait(30)  # nobody is answered before the limit was reached once
        time.sleep(0.002)
        with lock:
            now[0] -= 1
        return body["messages"][0]["content"]

    with ScriptedModel(reply) as server:
        one = helper(server.base_url, concurrency=5)
        results = {}

        async def many(which):
            said = [[{"role": "user", "content": f"question {n}"}] for n in range(250)]
            return await asyncio.gather(*(one.ask(m, purpose=which) for m in said))

        threads = [threading.Thread(target=lambda w=w: results.update({w: asyncio.run(many(w))})) for w in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [a.text for a in results["a"]] == [a.text for a in results["b"]] == [f"question {n}" for n in range(250)]
    assert max(seen) == 5
    assert len(server.requests) == 250, "the same question is asked once, by whichever loop comes first"
    assert one.usage().calls == 250
    assert one.usage().cached == 250


def test_an_event_loop_goes_on_meanwhile():
    answered = threading.Event()

    def reply(body):
        assert answered.wait(30)
        return "late"

    async def main():
        asked = asyncio.ensure_future(helper(server.base_url).ask(ASK, purpose="test"))
        await asyncio.sleep(0.05)  # a blocked loop would never get here
        answered.set()
        return await asked

    with ScriptedModel(reply) as server:
        assert asyncio.run(main()).text == "late"


def test_who_gives_up_leaves_the_others_their_answer_and_the_last_one_ends_the_retries():
    begun, go = threading.Event(), threading.Event()

    def reply(body):
        begun.set()
        assert go.wait(30)
        return 500, {}

    async def main():
        one = helper(server.base_url, max_retries=50)
        asked = [asyncio.ensure_future(one.ask(ASK, purpose="test")) for _ in range(2)]
        while not begun.is_set():
            await asyncio.sleep(0.001)
        asked[0].cancel()
        await asyncio.sleep(0.01)
        assert not asked[1].done()
        asked[1].cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        go.set()
        while not one.usage().calls:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        return one.usage().calls

    with ScriptedModel(reply) as server:
        assert asyncio.run(main()) == 1


# --------------------------------------------------------------------------------------------------- structured answers


def test_a_structured_answer_is_asked_for_by_a_closed_schema():
    with ScriptedModel(lambda body: {"score": 7, "why": "because"}) as server:
        answer = ask(helper(server.base_url), answer=Verdict)
        again = ask(helper(server.base_url), answer=Verdict)
    assert answer.data == again.data == Verdict(score=7, why="because")
    assert again.cached
    asked = server.requests[0]["response_format"]
    assert asked["type"] == "json_schema"
    assert asked["json_schema"]["strict"] is True
    schema = asked["json_schema"]["schema"]
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["score", "why"]


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    points: dict[str, float]


def test_an_open_structure_is_not_called_strict():
    with ScriptedModel(lambda body: {"points": {"a": 1}}) as server:
        assert ask(helper(server.base_url), answer=Open).data.points == {"a": 1.0}
    assert server.requests[0]["response_format"]["json_schema"]["strict"] is False


@table("how", ["json_object", "none"])
def test_a_server_without_schemas_is_told_in_the_system_message(how):
    with ScriptedModel(lambda body: {"score": 7}) as server:
        ask(helper(server.base_url, structured=how), [{"role": "system", "content": "Judge."}, *ASK], answer=Verdict)
        ask(helper(server.base_url, structured=how), ASK, answer=Verdict)
    first, second = server.requests
    assert first["messages"][0]["content"].startswith("Judge.\n\nAnswer with one JSON object")
    assert second["messages"][0]["role"] == "system"
    assert second["messages"][1:] == ASK
    assert first.get("response_format") == ({"type": "json_object"} if how == "json_object" else None)


WRONG = [
    "seven",
    '{"score": 7} {"score": 1}',
    '{"score": 7}\n{"score": 1}',
    'Here you are: {"score": 7}',
    '{"score": 7} I hope this helps',
    '{"score": 7, "score": 1}',
    '{"score": 11}',
    '{"score": "seven"}',
    '{"score": NaN}',
    "[7]",
    "null",
    "{" * 200,
    'Sure:\n```json\n{"score": 7}\n```',
]


@pytest.mark.parametrize("text", WRONG)
def test_an_answer_of_another_form_is_asked_again_and_never_kept(text):
    replies = iter([text, '{"score": 3}'])
    with ScriptedModel(lambda body: next(replies)) as server:
        one = helper(server.base_url)
        assert ask(one, answer=Verdict).data.score == 3
        assert ask(one, answer=Verdict).cached
    assert len(server.requests) == 2
    assert [row["state"] for row in rows()] == ["failed", "answered", "cached"]


WRAPPED = [
    '{"score": 7}',
    '\ufeff{"score": 7}',
    '\n\n {"score": 7} \n',
    '\u200b{"score": 7}\u200b',
    '{"score": 7}<|im_end|>',
    '{"score": 7}</s>\n',
    '```json\n{"score": 7}\n```',
    '```\n{"score": 7}\n```',
    '```JSON\n{"score": 7}```',
    '```json {"score": 7} ```',
    '```{"score": 7}```',
    '````json\n{"score": 7}\n````',
    '~~~json\n{"score": 7}\n~~~',
    '```json\n{"score": 7}',
    '`{"score": 7}`',
    '<think>{"score": 1}</think>\n{"score": 7}',
    '<think>\n</think>\n\n```json\n{"score": 7}\n```',
    'It is prime, so 7.\n</think>\n{"score": 7}',
    '<thinking>hm</thinking>{"score": 7}',
    '[THINK]hm[/THINK]{"score": 7}',
    '<answer>{"score": 7}</answer>',
    '<think>hm</think><output>\n```json\n{"score": 7}\n```\n</output>',
    '{"result": {"score": 7}}',
    '{"Verdict": {"score": 7}}',
    '{"verdicts": [{"score": 7}]}',
    '[{"score": 7}]',
    '"{\\"score\\": 7}"',
    '{"Score": 7}',
    '{"SCORE": 7, "Why": "it is"}',
    '{"score": 7, "why": "</think> is a tag, and ``` a fence"}',
    '{"score": 7.0}',
]
"""Answers that can mean nothing but a score of 7."""
AMBIGUOUS = [
    '```json\n{"score": 7}\n```\n```json\n{"score": 1}\n```',
    'Sure:\n```json\n{"score": 7}\n```',
    '```json\n{"score": 7}\n```\nThis is because 7 is prime.',
    'The answer holds ```json\n{"score": 7}\n``` and I give 1.',
    '{"score": 7} {"score": 1}',
    '{"score": 7}</think>{"score": 1}',
    '[{"score": 7}, {"score": 1}]',
    '{"a": {"score": 7}, "b": {"score": 1}}',
    '{"score": 7, "Score": 1}',
    '{"result": {"score": 7, "score": 1}}',
    '"{\\"score\\": 7, \\"score\\": 1}"',
    "{'score': 7}",
    '{"score": 7,}',
    "{score: 7}",
    '{"score": 7 /* of 10 */}',
    '{"score": 7',
    '<think>{"score": 7}</think>',
    '<think>I would say {"score": 7}',
    '<answer>{"score": 7}</answer><answer>{"score": 1}</answer>',
    '{"score": {"score": 7}}',
    '{"result": {"result": {"score": 7}}}',
    '{"score": "7/10"}',
    "7",
]
"""Answers of which a score would be a guess."""


@pytest.mark.parametrize("how", ["json_schema", "json_object", "none"])
@table("text", WRAPPED)
def test_a_wrapping_that_can_mean_nothing_else_is_removed(how, text):
    with ScriptedModel(lambda body: text) as server:
        one = helper(server.base_url, structured=how, max_retries=0)
        assert ask(one, answer=Verdict).data.score == 7


@pytest.mark.parametrize("how", ["json_schema", "json_object", "none"])
@table("text", AMBIGUOUS)
def test_an_answer_that_would_have_to_be_guessed_is_none_and_the_key_is_named(how, text):
    with ScriptedModel(lambda body: text) as server:
        one = helper(server.base_url, structured=how, max_retries=0)
        with pytest.raises(HelperFailed, match=r"astuner\.helper_models\.judge\.structured: (none|json_schema)"):
            ask(one, answer=Verdict)


class Row(BaseModel):
    criterion_number: int
    grades: list[float]


class Nested(BaseModel):
    rows: list[Row]
    best: Row | None = None


@table(
    ("text", "criterion"),
    [
        ('{"rows": [{"criterion_number": 3, "grades": [1]}]}', 3),
        ('{"Rows": [{"criterionNumber": 3, "Grades": [1]}]}', 3),
        ('{"ROWS": [{"Criterion Number": 3, "grades": [1]}], "best": null}', 3),
        ('{"rows": [{"criterion-number": 3, "grades": [1]}]}', 3),
        ('{"output": {"rows": [{"criterionNumber": 3, "grades": [1]}]}}', 3),
        ('{"rows": [{"criterion_number": 3, "criterionNumber": 4, "grades": [1]}]}', None),
    ],
)
def test_keys_in_another_spelling_are_read_on_every_level(text, criterion):
    with ScriptedModel(lambda body: text) as server:
        one = helper(server.base_url, max_retries=0)
        if criterion is None:
            with pytest.raises(HelperFailed, match="twice"):
                ask(one, answer=Nested)
        else:
            assert ask(one, answer=Nested).data.rows[0].criterion_number == criterion


def test_when_all_tries_bring_another_form_the_last_reason_is_said():
    says = r"'judge' .*3 tries: .*score: .*less than or equal"
    with ScriptedModel(lambda body: '{"score": 99}') as server, pytest.raises(HelperFailed, match=says):
        ask(helper(server.base_url, max_retries=2), answer=Verdict)
    assert len(server.requests) == 3
    assert rows("SELECT * FROM answers") == []


def test_an_answer_that_was_cut_off_names_the_key_to_raise():
    body = completion('{"score": ', finish_reason="length", usage={"prompt_tokens": 5, "completion_tokens": 1024})
    with ScriptedModel(lambda _: (200, body)) as server:
        with pytest.raises(HelperFailed, match=r"after 1024 tokens; raise astuner\.helper_models\.judge\.max_tokens"):
            ask(helper(server.base_url), answer=Verdict)
        of_a_command = HelperModels.one(HelperModel(base_url=server.base_url, model="small"), scope="x")
        with pytest.raises(HelperFailed, match=r"raise --max-tokens"):
            ask(of_a_command.get("helper", where="here"), answer=Verdict)
    assert len(server.requests) == 2, "the same length would cut it off again"


def test_a_refusal_is_said_and_not_asked_again():
    refused = completion(None, refusal="I cannot judge that")
    says = r"refused .*I cannot judge that"
    with ScriptedModel(lambda _: (200, refused)) as server, pytest.raises(HelperFailed, match=says):
        ask(helper(server.base_url), answer=Verdict)
    assert len(server.requests) == 1


# ------------------------------------------------------------------------------------------------------ what goes wrong


def test_nobody_listens():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        with pytest.raises(HelperFailed, match=f"after 3 tries: cannot reach {url}"):
            ask(helper(url, max_retries=2))
    assert [(r["state"], r["prompt_tokens"], r["estimated"]) for r in rows()] == [("failed", 0, 0)] * 3


def test_a_server_that_is_busy_is_asked_again_when_it_says(monkeypatch):
    slept = []
    monkeypatch.setattr("astuner_helpers.helper._sleep", lambda seconds, abandoned: slept.append(seconds))
    replies = iter([(429, {"error": "busy"}, {"Retry-After": "7"}), (503, {}), "now"])
    with ScriptedModel(lambda body: next(replies)) as server:
        assert ask(helper(server.base_url)).text == "now"
    assert 6.9 < max(slept) <= 7
    assert helper(server.base_url).usage().failed == 2


def test_a_server_that_asks_to_wait_for_an_hour_is_not_waited_for():
    busy = 429, {}, {"Retry-After": "3600"}
    with ScriptedModel(lambda body: busy) as server, pytest.raises(HelperFailed, match="3600 s"):
        ask(helper(server.base_url))
    assert len(server.requests) == 1


def test_an_address_without_its_version_is_asked_about():
    def nothing_here(handler):
        send(handler, b"<p>Not Found</p>", 404)

    with raw_server(nothing_here) as url:
        root = url.removesuffix("/v1")
        with pytest.raises(HelperFailed, match=f"answered 404 .*; did you mean the address {root}/v1$"):
            ask(helper(f"{root}/"))
        with pytest.raises(HelperFailed) as refused:
            ask(helper(url))
    assert "did you mean" not in str(refused.value)


@table(
    ("reply", "about"),
    [
        ("no JSON", True),
        ((400, {"error": "too long"}), True),
        ((422, {}), True),
        ((401, {}), False),
        ((404, {}), False),
        ((429, {}), False),
        ((503, {}), False),
    ],
)
def test_a_failure_says_whether_it_is_about_the_question(reply, about):
    with ScriptedModel(lambda body: reply) as server, pytest.raises(HelperFailed) as failed:
        ask(helper(server.base_url, max_retries=1), answer=Verdict)
    assert failed.value.about_question is about


@table(("status", "tries"), [(500, 3), (503, 3), (400, 1), (401, 1), (404, 1)])
def test_what_may_pass_is_asked_again_and_what_may_not_is_not(status, tries):
    refused = status, {"error": {"message": "no"}}
    with ScriptedModel(lambda body: refused) as server, pytest.raises(HelperFailed, match=f"answered {status}"):
        ask(helper(server.base_url, max_retries=2))
    assert len(server.requests) == tries


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"<html>gateway</html>", "did not answer with JSON"),
        (b'{"choices": []}', "did not answer with a chat completion"),
        (b'{"choices": [{"message": {"content": 5}}]}', "not text but int"),
        (b"[]", "did not answer with a chat completion"),
        (b'{"choices": [{"message": {"content": ""}}]}', "the answer is empty"),
    ],
)
def test_garbage_is_asked_again_and_counts_as_perhaps_billed(raw, says):
    with raw_server(lambda handler: send(handler, raw)) as url, pytest.raises(HelperFailed, match=says):
        ask(helper(url, max_retries=1, max_tokens=50))
    assert len(rows()) == 2
    assert all(r["prompt_tokens"] > 0 and r["estimated"] for r in rows())


def test_a_server_that_does_not_answer_in_time():
    over = threading.Event()
    with raw_server(lambda handler: over.wait(30)) as url:
        with pytest.raises(HelperFailed, match=r"no answer within 0\.1 s"):
            ask(helper(url, timeout=0.1, max_retries=1))
        over.set()
    assert all(r["completion_tokens"] == 1024 and r["estimated"] for r in rows()), "it may have been billed"


def test_an_answer_that_is_huge_is_refused():
    def answer(handler):
        handler.send_response(200)
        handler.end_headers()
        for _ in range(40):
            handler.wfile.write(b" " * (1 << 20))

    with raw_server(answer) as url, pytest.raises(HelperFailed, match="longer than"):
        ask(helper(url))
    assert len(rows()) == 1


@pytest.mark.parametrize(
    "usage",
    [
        b"",
        b', "usage": null',
        b', "usage": {"prompt_tokens": NaN, "completion_tokens": Infinity}',
        b', "usage": {"prompt_tokens": -4, "completion_tokens": "many"}',
        b', "usage": {"prompt_tokens": true, "completion_tokens": 1.5}',
        b', "usage": [1]',
    ],
)
def test_tokens_that_nobody_tells_are_estimated_and_that_is_said(usage):
    raw = b'{"choices": [{"message": {"content": "a dozen letters"}}]' + usage + b"}"
    with raw_server(lambda handler: send(handler, raw)) as url:
        one = helper(url, price={"input": 1e6, "output": 0})
        answer = ask(one)
    assert answer.text == "a dozen letters"
    assert 5 < answer.prompt_tokens < 40
    assert answer.completion_tokens == 9
    assert answer.cost == answer.prompt_tokens
    assert "estimated for 1 " in str(one.usage())


def test_the_key_is_sent_and_never_said_or_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("HELPER_KEY", KEY)
    with ScriptedModel(lambda body: "fine", api_key=KEY) as server:
        assert ask(helper(server.base_url, api_key_env="HELPER_KEY")).text == "fine"
        with pytest.raises(HelperFailed, match="401"):
            ask(helper(server.base_url), sample=1)
    echo = {"error": {"message": f"wrong key {KEY}"}}
    with raw_server(lambda handler: send(handler, echo, 401)) as url, pytest.raises(HelperFailed) as refused:
        ask(helper(url, api_key_env="HELPER_KEY"))
    assert KEY not in str(refused.value)
    assert "***" in str(refused.value)
    body = completion(f"not an object, {KEY}")
    with raw_server(lambda handler: send(handler, body)) as url, pytest.raises(HelperFailed) as wrong:
        ask(helper(url, api_key_env="HELPER_KEY", max_retries=0), answer=Verdict)
    assert KEY not in str(wrong.value)
    database().close()
    for file in (tmp_path / "home").rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes()


# --------------------------------------------------------------------------------------------------------- what is kept


def test_an_entry_that_cannot_be_read_is_asked_again_and_said(caplog):
    with ScriptedModel(lambda body: {"score": 4}) as server:
        ask(helper(server.base_url), answer=Verdict)
        for damage in (b"", b"t{", b't{"text": 5, "finish_reason": "stop"}', b't{"text": "x"}', b"?"):
            with database().writing() as db:
                db.execute("UPDATE answers SET value = ?", (damage,))
            caplog.clear()
            with caplog.at_level(logging.WARNING, "astuner.helper_models"):
                assert not ask(helper(server.base_url), answer=Verdict).cached
            assert "cannot read" in caplog.text
            assert "sent again" in caplog.text
            assert ask(helper(server.base_url), answer=Verdict).cached


def test_an_entry_that_is_no_valid_answer_any_more_is_asked_again(caplog):
    with ScriptedModel(lambda body: {"score": 4}) as server:
        ask(helper(server.base_url), answer=Verdict)
        with database().writing() as db:
            kept = {"text": '{"score": 44}', "finish_reason": "stop", "prompt_tokens": 1, "completion_tokens": 1}
            db.execute("UPDATE answers SET value = ?", (b"t" + json.dumps(kept).encode(),))
        assert ask(helper(server.base_url), answer=Verdict).data.score == 4
    assert len(server.requests) == 2
    assert "less than or equal to 10" in caplog.text


def test_the_oldest_answers_go_when_there_are_too_many():
    answers = Answers(database(), most_bytes=10_000)
    for n in range(200):
        answers.put({f"key {n}": Reply(text="x" * 100)})
    answers.evict()
    kept = answers.get([f"key {n}" for n in range(200)])
    assert 0 < len(kept) < 100
    assert "key 199" in kept
    assert "key 0" not in kept
    assert rows("SELECT SUM(size) AS size FROM answers")[0]["size"] <= 10_000


# ----------------------------------------------------------------------------------------------------------- embeddings


def test_embeddings_come_in_order_in_batches_and_are_kept_text_by_text():
    with ScriptedModel(lambda body: "", embed=lambda text: [float(len(text)), 0.1]) as server:
        one = helper(server.base_url, embed_batch=2)
        texts = ["a", "bb", "a", "ccc", "dddd", "eeeee"]
        assert asyncio.run(one.embed(texts, purpose="near")) == [[float(len(t)), 0.1] for t in texts]
        assert [body["input"] for body in server.requests] != [texts]
        assert sorted(len(body["input"]) for body in server.requests) == [1, 2, 2]
        assert asyncio.run(one.embed(["ccc", "new"], purpose="near")) == [[3.0, 0.1], [3.0, 0.1]]
    assert server.requests[-1]["input"] == ["new"]
    assert one.usage().cached == 1
    assert asyncio.run(one.embed([], purpose="near")) == []


@table(
    "data",
    [
        [],
        [{"index": 0, "embedding": [1.0]}],
        [{"index": 0, "embedding": [1.0]}, {"index": 0, "embedding": [1.0]}],
        [{"index": 0, "embedding": [1.0]}, {"index": 1, "embedding": [1.0, 2.0]}],
        [{"index": 0, "embedding": []}, {"index": 1, "embedding": []}],
        [{"index": 0, "embedding": [float("nan")]}, {"index": 1, "embedding": [1.0]}],
        [{"index": 0, "embedding": "AAAA"}, {"index": 1, "embedding": "AAAA"}],
    ],
)
def test_embeddings_that_are_none_are_refused(data):
    with raw_server(lambda handler: send(handler, {"data": data})) as url, pytest.raises(HelperFailed):
        asyncio.run(helper(url, max_retries=0).embed(["a", "b"], purpose="near"))


# --------------------------------------------------------------------------------------------------------------- config


def test_an_unknown_name_says_which_there_are():
    models = HelperModels({"judge": HelperModel(base_url="http://127.0.0.1:1/v1", model="m")}, scope="s")
    with pytest.raises(ConfigError, match=r"task_judge\.x: .*'juge'; available: judge; did you mean judge"):
        models.get("juge", where="task_judge.x")
    with pytest.raises(ConfigError, match=r"astuner\.helper_models is empty"):
        HelperModels({}, scope="s").get("juge", where="here")


def test_a_key_that_is_not_there_is_said_when_the_helper_is_wanted(monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"astuner\.helper_models\.judge\.api_key_env names NO_SUCH_KEY"):
        helper("http://127.0.0.1:1/v1", api_key_env="NO_SUCH_KEY")


@table(
    ("fields", "says"),
    [
        ({"model": "m"}, "base_url .* or agentscope"),
        ({"model": "m", "base_url": "http://h/v1", "agentscope": "OpenAIChatModel"}, "base_url .* or agentscope"),
        ({"model": "m", "base_url": "http://me:pw@h/v1"}, "user and password"),
        ({"model": "m", "base_url": "ftp://h/v1"}, "http://127.0.0.1:8000/v1"),
        ({"model": "m", "base_url": "http://h/v1", "api_key_env": "sk-123"}, "not the key itself"),
        ({"model": "m", "base_url": "http://h/v1", "extra": {"api_key": "x"}}, "looks like a secret"),
        ({"model": "m", "base_url": "http://h/v1", "extra": {"max_tokens": 5}}, "cannot be set here"),
        ({"model": "m", "base_url": "http://h/v1", "budget": 5}, "requires a price"),
        ({"model": "m", "base_url": "http://h/v1", "budget": 5, "price": {}}, "requires a price"),
        ({"model": "m", "base_url": "http://h/v1", "agentscope_kwargs": {"a": 1}}, "requires agentscope"),
    ],
)
def test_a_section_that_cannot_work_is_refused(fields, says):
    with pytest.raises(ValueError, match=says) as refused:
        HelperModel(**fields)
    assert "pw@" not in str(refused.value).partition("[type")[0]


def test_all_that_a_helper_raises_is_astuners():
    assert issubclass(HelperFailed, AstunerError)
    assert not issubclass(HelperFailed, ConfigError)


def test_a_helpers_identity_is_all_that_answers_depend_on_and_holds_no_key(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    there = "http://127.0.0.1:1/v1"
    plain = helper(there).identity
    others = [
        helper("http://127.0.0.1:2/v1"),
        helper(there, temperature=0.5),
        helper(there, max_tokens=7),
        helper(there, extra={"top_p": 0.5}),
        helper(there, structured="none"),
    ]
    assert all(other.identity != plain for other in others)
    unseen = {"name": "other", "scope": "elsewhere", "timeout": 3, "concurrency": 2, "cache": False}
    same = helper(there, api_key_env="JUDGE_KEY", **unseen)
    assert same.identity == plain
    assert KEY not in json.dumps(same.identity)
    changed = helper(there, extra={"a": {"b": 1}})
    changed.identity["extra"]["a"]["b"] = 2
    assert changed.identity["extra"] == {"a": {"b": 1}}
