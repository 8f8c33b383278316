"""Rate limits and budgets of helper models, over threads and processes, and the database that they are counted in."""

import asyncio
import json
import os
import re
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from astuner.contracts.errors import ConfigError
from astuner.testing import ScriptedModel
from astuner_helpers import BudgetSpent, HelperModels, ledger
from astuner_helpers.ledger import Account, Database, Ledger, Spent, Wait, database
from astuner_helpers.reply import Question
from astuner_helpers.settings import HelperModel


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("ASTUNER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("astuner_helpers.helper._FIRST_WAIT", 0.001)


def account(scope="run", **fields):
    section = HelperModel(**{"base_url": "http://127.0.0.1:1/v1", "model": "m", **fields})
    return Account(scope=scope, name="judge", server=section.base_url, section=section)


def question(most=100, text="x" * 288, n=0):
    """One of 100 tokens at most in the prompt, as it is estimated."""
    body = {"messages": [{"role": "user", "content": text}], "n": n}
    return Question(purpose="test", body=body, asked_of={}, most_completion=most)


def several(url, count, scope="run", **fields):
    one = HelperModels({"judge": HelperModel(base_url=url, model="m", **fields)}, scope=scope).get("judge", where="x")

    async def main():
        said = [[{"role": "user", "content": f"question {n}"}] for n in range(count)]
        return await asyncio.gather(*(one.ask(m, purpose="test") for m in said), return_exceptions=True)

    return asyncio.run(main()), one


# ----------------------------------------------------------------------------------------------------------- the ledger


def test_what_is_under_way_counts_and_is_settled_with_what_it_took():
    books, mine = Ledger(database()), account(budget_tokens=500)
    ask = question(n=0)
    assert ask.prompt_estimate < 120
    first, second = books.enter(mine, ask), books.enter(mine, ask)
    assert isinstance(first, int)
    assert isinstance(second, int)
    assert isinstance(books.enter(mine, ask), Wait), "the two may take 400 to 440 together"
    books.settle(mine, first, prompt_tokens=10, completion_tokens=5)
    assert isinstance(books.enter(mine, ask), int), "the first took 15"
    books.settle(mine, second, prompt_tokens=300, completion_tokens=5)
    spent = books.enter(mine, ask)
    assert isinstance(spent, Spent)
    assert (spent.spent, spent.budget, spent.key, spent.calls) == (320, 500, "budget_tokens", 2)


def test_settling_twice_counts_once():
    books, mine = Ledger(database()), account()
    permit = books.enter(mine, question())
    for _ in range(2):
        books.settle(mine, permit, prompt_tokens=10)
    assert books.usage("run", "judge").prompt_tokens == 10


def test_a_budget_is_its_scopes_and_starts_over_with_it():
    books, mine = Ledger(database()), account(budget_tokens=300)
    books.settle(mine, books.enter(mine, question()), prompt_tokens=299)
    books.enter(account("other", budget_tokens=300), question())
    assert isinstance(books.enter(mine, question()), Spent)
    books.begin("run")
    assert isinstance(books.enter(mine, question()), int)
    assert books.usage("run", "judge").calls == 0


def test_requests_of_a_process_that_was_killed_count_with_the_most_they_may_have_taken():
    books, mine = Ledger(database()), account(budget_tokens=500)
    for _ in range(2):
        books.enter(mine, question())
    assert isinstance(books.enter(mine, question()), Wait)
    with database().writing() as db:
        db.execute("UPDATE calls SET process = '999999999 never'")
    assert isinstance(books.enter(mine, question()), Spent)
    used = books.usage("run", "judge")
    assert (used.calls, used.failed, used.estimated) == (2, 2, 2)
    assert used.tokens >= 400


def test_rpm_and_tpm_say_how_long_to_wait(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(ledger.time, "time", lambda: now[0])
    books, mine = Ledger(database()), account(rpm=2)
    assert isinstance(books.enter(mine, question()), int)
    now[0] += 20
    assert isinstance(books.enter(account("another scope", rpm=2), question()), int)
    wait = books.enter(mine, question())
    assert isinstance(wait, Wait)
    assert wait.seconds == pytest.approx(40)
    now[0] += 41
    assert isinstance(books.enter(mine, question()), int)
    assert isinstance(books.enter(account(rpm=2, model="another"), question()), int)
    assert isinstance(books.enter(account(rpm=2, base_url="http://127.0.0.1:2/v1"), question()), int)

    now[0] += 1000
    slow = account("tokens", tpm=500)
    first = books.enter(slow, question())
    books.enter(slow, question())
    wait = books.enter(slow, question())
    assert isinstance(wait, Wait)
    books.settle(slow, first, prompt_tokens=1)
    assert isinstance(books.enter(slow, question()), int)


def test_a_request_larger_than_tpm_goes_when_no_other_does(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(ledger.time, "time", lambda: now[0])
    books, mine = Ledger(database()), account(tpm=50)
    assert isinstance(books.enter(mine, question()), int)
    assert isinstance(books.enter(mine, question()), Wait)
    now[0] += 61
    assert isinstance(books.enter(mine, question()), int)


def test_old_records_go_and_totals_stay(monkeypatch):
    monkeypatch.setattr(ledger, "CALLS_KEPT", 10)
    monkeypatch.setattr(ledger, "_PRUNE_EVERY", 5)
    books, mine = Ledger(database()), account()
    for _ in range(40):
        books.settle(mine, books.enter(mine, question()), prompt_tokens=1)
    with database().reading() as db:
        assert db.execute("SELECT COUNT(*) FROM calls").fetchone()[0] <= 15
    assert books.usage("run", "judge").calls == 40
    for _ in range(13):
        books.cached(mine, question(), 3)
    with database().reading() as db:
        assert db.execute("SELECT COUNT(*) FROM calls").fetchone()[0] <= 15
    assert books.usage("run", "judge").cached == 39


# -------------------------------------------------------------------------------------------------------------- budgets


def test_many_at_once_do_not_overshoot_a_budget():
    gate = threading.Event()

    def reply(body):
        gate.wait(0.02)
        return "word " * 50

    with ScriptedModel(reply) as server:
        price = {"input": 0, "output": 1e6}  # a unit of money for each token
        answers, one = several(server.base_url, 60, concurrency=16, max_tokens=50, price=price, budget=510)
        sent = len(server.requests)
    usage = one.usage()
    stopped = [a for a in answers if isinstance(a, BudgetSpent)]
    assert sent == usage.calls == 10
    assert usage.cost == 500
    assert len(stopped) == 50, [a for a in answers if not isinstance(a, BudgetSpent)][:1]
    text = str(stopped[0])
    assert "'judge' has spent 500 of its budget of 510 in 10 requests, and the next one may take 50" in text
    assert "raise astuner.helper_models.judge.budget" in text
    assert "saved" in text
    assert isinstance(stopped[0], ConfigError)
    page = Path(__file__).resolve().parents[3] / "docs" / "helper_models.md"
    said = re.sub(r"\d[\d.]*", "N", text.replace("judge", "strong")).replace("N. ", "N ")
    assert said in re.sub(r"\d[\d.]*", "N", page.read_text(encoding="utf-8")).replace("N. ", "N "), "the page says so"


def test_what_is_kept_is_answered_though_the_budget_is_spent():
    with ScriptedModel(lambda body: "word " * 50) as server:
        several(server.base_url, 1)
        answers, _ = several(server.base_url, 2, scope="next", budget_tokens=10)
    assert answers[0].cached
    assert "budget_tokens" in str(answers[1])


def test_the_next_scope_has_its_own_budget():
    with ScriptedModel(lambda body: "word") as server:
        for scope in ("one", "two"):
            answers, _ = several(server.base_url, 3, scope, budget_tokens=1200, cache=False, concurrency=1)
            assert [type(a).__name__ for a in answers] == ["HelperAnswer"] * 3


# ------------------------------------------------------------------------------------------------------------ processes

OTHER = """
import asyncio, json, sys
from astuner_helpers.settings import HelperModel
from astuner_helpers import ledger
from astuner_helpers import HelperModels
url, who, count, fields, window = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]), sys.argv[5]
ledger.WINDOW = float(window)
one = HelperModels({"judge": HelperModel(base_url=url, model="m", **fields)}, scope="run").get("judge", where="x")
async def main():
    said = [[{"role": "user", "content": f"{who} asks {n}"}] for n in range(count)]
    return await asyncio.gather(*(one.ask(m, purpose=who) for m in said), return_exceptions=True)
print(json.dumps([type(a).__name__ for a in asyncio.run(main())]))
"""


def two_processes(url, count, window=60.0, **fields):
    command = [sys.executable, "-c", OTHER, url]
    rest = [str(count), json.dumps(fields), str(window)]
    both = [subprocess.Popen([*command, who, *rest], stdout=subprocess.PIPE, text=True) for who in ("anna", "ben")]
    said = [process.communicate(timeout=80)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    return [name for text in said for name in json.loads(text)]


@pytest.mark.slow
def test_two_processes_share_a_budget():
    with ScriptedModel(lambda body: "word " * 50) as server:
        price = {"input": 0, "output": 1e6}
        got = two_processes(server.base_url, 30, max_tokens=50, price=price, budget=1020)
        assert len(server.requests) == 20
    assert sorted(set(got)) == ["BudgetSpent", "HelperAnswer"]
    assert got.count("HelperAnswer") == 20
    used = Ledger(database()).usage("run", "judge")
    assert (used.calls, used.cost) == (20, 1000)


@pytest.mark.slow
def test_two_processes_share_a_rate_limit():
    times, lock = [], threading.Lock()

    def reply(body):
        with lock:
            times.append(time.monotonic())
        return "word"

    with ScriptedModel(reply) as server:
        got = two_processes(server.base_url, 6, window=1.0, rpm=4)
    assert got == ["HelperAnswer"] * 12
    with database().reading() as db:
        sent = [row[0] for row in db.execute("SELECT time FROM calls ORDER BY time")]
    assert len(sent) == 12
    assert all(later - earlier > 1.0 for earlier, later in zip(sent, sent[4:], strict=False))


def test_a_fork_asks_with_threads_and_a_connection_of_its_own():
    with ScriptedModel(lambda body: "word") as server:
        section = HelperModel(base_url=server.base_url, model="m")
        one = HelperModels({"judge": section}, scope="run").get("judge", where="x")
        ask = [{"role": "user", "content": "before"}]
        asyncio.run(one.ask(ask, purpose="test"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: the threads are the point
            child = os.fork()
        if child == 0:
            ok = False
            try:
                ok = asyncio.run(one.ask(ask, purpose="test")).cached
                ok = ok and asyncio.run(one.ask([{"role": "user", "content": "after"}], purpose="test")).text == "word"
            finally:
                os._exit(0 if ok else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert one.usage().calls == 2


# --------------------------------------------------------------------------------------------------------- the database


def test_nobody_else_can_read_the_folder():
    Ledger(database()).usage("run", "judge")
    assert database().path.parent.stat().st_mode & 0o777 == 0o700


def test_a_damaged_database_is_named_with_what_to_type(tmp_path):
    file = tmp_path / "calls.sqlite"
    file.write_bytes(b"this is no database, whatever it is called" * 100)
    with pytest.raises(ConfigError, match=r"calls\.sqlite is damaged: .*mv \$f \$f\.damaged"):
        Ledger(Database(file)).usage("run", "judge")
    assert file.read_bytes().startswith(b"this is no database"), "it is left as it is"


def test_a_locked_database_is_named_with_what_to_type(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "BUSY_SECONDS", 0.05)
    file = tmp_path / "calls.sqlite"
    books = Ledger(Database(file))
    books.usage("run", "judge")
    holder = sqlite3.connect(file, isolation_level=None)
    try:
        holder.execute("BEGIN EXCLUSIVE")
        with pytest.raises(ConfigError, match=r"calls\.sqlite was locked .* fuser .*calls\.sqlite"):
            books.enter(account(), question())
    finally:
        holder.close()
        books.database.close()


def test_a_database_of_another_version_is_left_alone(tmp_path):
    file = tmp_path / "calls.sqlite"
    connection = sqlite3.connect(file)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(ConfigError, match=r"format 99, .*format 1; .*mv .*calls\.sqlite"):
        Ledger(Database(file)).usage("run", "judge")


def test_a_folder_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ASTUNER_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cannot use .*; set ASTUNER_HOME"):
        Ledger(database()).usage("run", "judge")
