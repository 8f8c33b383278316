"""The books of all requests to helper models: who may send one now, and what each took.

A request is entered before it is sent, with the most that it may take, and settled with what it took; so what is on
its way counts towards limits and budgets, in every process.  Invariant: the totals of a scope, with the most that its
requests under way may take, never exceed its budget by more than what one request took beyond its estimate.
"""

from __future__ import annotations

import functools
import os
import sqlite3
import time
from dataclasses import dataclass

from astuner.support.processes import Process, is_running, start_time
from astuner_helpers.database import Database
from astuner_helpers.reply import Question, Usage
from astuner_helpers.settings import HelperModel

WINDOW = 60.0
"""Seconds over which `rpm` and `tpm` count."""
CALLS_KEPT = 1_000_000
"""Records of calls that are kept, the newest; totals are kept apart."""
_PRUNE_EVERY = 10_000
_POLL = 0.5
"""Longest wait for a request under way to be settled, in seconds."""
_COUNTS = ("calls", "cached", "failed", "estimated", "prompt_tokens", "completion_tokens", "cost")


@dataclass(frozen=True, kw_only=True)
class Account:
    """Whose requests are counted together."""

    scope: str
    name: str
    server: str
    """With `model`: what `rpm` and `tpm` are counted for, over all scopes."""
    section: HelperModel

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        price = self.section.price
        return (prompt_tokens * price.input + completion_tokens * price.output) / 1e6 if price else 0.0


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What a request took."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    estimated: bool = False
    seconds: float = 0.0
    error: str | None = None
    """Why there is no (valid) answer."""


@dataclass(frozen=True)
class Permit:
    """The request may be sent now; it is entered under this number."""

    id: int


@dataclass(frozen=True)
class Wait:
    """Not yet: ask again after so many seconds."""

    seconds: float


@dataclass(frozen=True)
class Spent:
    """The budget does not allow it."""

    spent: float
    next: float
    budget: float
    key: str
    """Which budget: `budget` or `budget_tokens`."""
    calls: int


class Ledger:
    """Enters and settles requests."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def enter(self, account: Account, question: Question) -> Permit | Wait | Spent:
        """Enter one request before it is sent, if limits and budget allow it now."""
        section = account.section
        prompt, completion = question.prompt_estimate, question.most_completion
        cost = account.cost(prompt, completion)
        with self.database.writing() as db:
            now = time.time()
            if section.budget is not None:
                refused = _over(db, account, "budget", "cost", cost, section.budget)
                if refused is not None:
                    return refused
            if section.budget_tokens is not None:
                tokens = "prompt_tokens + completion_tokens"
                refused = _over(db, account, "budget_tokens", tokens, prompt + completion, section.budget_tokens)
                if refused is not None:
                    return refused
            if (wait := _too_fast(db, account, prompt + completion, now)) > 0:
                return Wait(wait)
            cursor = db.execute(
                "INSERT INTO calls (time, scope, name, server, model, purpose, key, state, process, prompt_tokens,"
                " completion_tokens, estimated, cost) VALUES (?, ?, ?, ?, ?, ?, ?, 'sent', ?, ?, ?, 1, ?)",
                (now, *_whose(account), question.purpose, question.key, _me(), prompt, completion, cost),
            )
            number = int(cursor.lastrowid or 0)
            _prune(db, number, 1)
            return Permit(number)

    def settle(self, account: Account, permit: Permit, taken: Taken) -> float:
        """Enter what a request took.

        :returns: its cost.
        """
        cost = account.cost(taken.prompt_tokens, taken.completion_tokens)
        state = "answered" if taken.error is None else "failed"
        with self.database.writing() as db:
            changed = db.execute(
                "UPDATE calls SET state = ?, prompt_tokens = ?, completion_tokens = ?, estimated = ?, cost = ?,"
                " seconds = ?, error = ? WHERE id = ? AND state = 'sent'",
                (
                    state,
                    taken.prompt_tokens,
                    taken.completion_tokens,
                    taken.estimated,
                    cost,
                    taken.seconds,
                    taken.error,
                    permit.id,
                ),
            )
            if changed.rowcount:
                _add(
                    db,
                    (account.scope, account.name),
                    Usage(
                        calls=1,
                        failed=int(taken.error is not None),
                        estimated=int(taken.estimated),
                        prompt_tokens=taken.prompt_tokens,
                        completion_tokens=taken.completion_tokens,
                        cost=cost,
                    ),
                )
        return cost

    def cached(self, account: Account, question: Question, count: int = 1) -> None:
        """Enter answers that were taken from the cache."""
        with self.database.writing() as db:
            db.executemany(
                "INSERT INTO calls (time, scope, name, server, model, purpose, key, state, process, prompt_tokens,"
                " completion_tokens, estimated, cost) VALUES (?, ?, ?, ?, ?, ?, ?, 'cached', ?, 0, 0, 0, 0)",
                [(time.time(), *_whose(account), question.purpose, question.key, _me())] * count,
            )
            _prune(db, int(db.execute("SELECT MAX(id) FROM calls").fetchone()[0]), count)
            _add(db, (account.scope, account.name), Usage(cached=count))

    def usage(self, scope: str, name: str) -> Usage:
        """What a scope used of a helper model so far, without what is under way."""
        with self.database.reading() as db:
            return _totals(db, scope, name)

    def begin(self, scope: str) -> None:
        """Count a scope from 0: a run that starts over. The records of what it did before are kept."""
        with self.database.writing() as db:
            db.execute("UPDATE calls SET state = 'lost' WHERE scope = ? AND state = 'sent'", (scope,))
            db.execute("DELETE FROM totals WHERE scope = ?", (scope,))


def _prune(db: sqlite3.Connection, newest: int, entered: int) -> None:
    """Forget the oldest records, each time that so many more were entered."""
    if newest // _PRUNE_EVERY != (newest - entered) // _PRUNE_EVERY:
        db.execute("DELETE FROM calls WHERE id <= ? AND state <> 'sent'", (newest - CALLS_KEPT,))


def _over(
    db: sqlite3.Connection, account: Account, key: str, column: str, wanted: float, budget: float
) -> Wait | Spent | None:
    """Whether one more request would exceed a budget: for good, or as long as others are under way."""
    for attempt in range(2):
        held = float(
            db.execute(
                f"SELECT COALESCE(SUM({column}), 0) FROM calls WHERE scope = ? AND name = ? AND state = 'sent'",
                (account.scope, account.name),
            ).fetchone()[0]
        )
        total = _totals(db, account.scope, account.name)
        spent = total.cost if key == "budget" else float(total.tokens)
        if spent + wanted > budget:
            return Spent(spent=spent, next=wanted, budget=budget, key=key, calls=total.calls)
        if spent + held + wanted <= budget:
            return None
        if attempt == 0:
            _settle_lost(db, account)
    return Wait(_POLL)


def _too_fast(db: sqlite3.Connection, account: Account, tokens: int, now: float) -> float:
    """Seconds until one more request fits `rpm` and `tpm`; 0: now."""
    section = account.section
    if section.rpm is None and section.tpm is None:
        return 0.0
    sent = db.execute(
        "SELECT time, prompt_tokens + completion_tokens FROM calls"
        " WHERE server = ? AND model = ? AND time > ? AND state <> 'cached' ORDER BY time",
        (account.server, account.section.model, now - WINDOW),
    ).fetchall()
    wait = 0.0
    if section.rpm is not None and len(sent) >= section.rpm:
        wait = sent[len(sent) - section.rpm][0] + WINDOW - now
    if section.tpm is not None:
        left = sum(row[1] for row in sent)
        for sent_at, took in sent:  # one that is larger than the limit goes when nothing else does
            if left + tokens <= section.tpm:
                break
            left -= took
            wait = max(wait, sent_at + WINDOW - now)
    return max(wait, 0.0)


def _settle_lost(db: sqlite3.Connection, account: Account) -> None:
    """Requests of processes that have ended were perhaps answered: they count with the most they may have taken."""
    whose = (account.scope, account.name)
    rows = db.execute(
        "SELECT id, process, prompt_tokens, completion_tokens, cost FROM calls"
        " WHERE scope = ? AND name = ? AND state = 'sent'",
        whose,
    ).fetchall()
    running = {process: _runs(process) for process in {row[1] for row in rows}}
    for number, process, prompt, completion, cost in rows:
        if not running[process]:
            db.execute("UPDATE calls SET state = 'lost', error = 'its process ended' WHERE id = ?", (number,))
            used = Usage(
                calls=1, failed=1, estimated=1, prompt_tokens=prompt, completion_tokens=completion, cost=cost
            )
            _add(db, whose, used)


def _add(db: sqlite3.Connection, whose: tuple[str, str], used: Usage) -> None:
    db.execute("INSERT OR IGNORE INTO totals (scope, name) VALUES (?, ?)", whose)
    sums = ", ".join(f"{column} = {column} + ?" for column in _COUNTS)
    values = [getattr(used, column) for column in _COUNTS]
    db.execute(f"UPDATE totals SET {sums} WHERE scope = ? AND name = ?", (*values, *whose))


def _totals(db: sqlite3.Connection, scope: str, name: str) -> Usage:
    query = f"SELECT {', '.join(_COUNTS)} FROM totals WHERE scope = ? AND name = ?"
    row = db.execute(query, (scope, name)).fetchone()
    return Usage(**dict(zip(_COUNTS, row, strict=True))) if row else Usage()


def _whose(account: Account) -> tuple[str, str, str, str]:
    return account.scope, account.name, account.server, account.section.model


def _me() -> str:
    return _process(os.getpid())


@functools.lru_cache(maxsize=4)
def _process(pid: int) -> str:
    return f"{pid} {start_time(pid)}"


def _runs(process: str) -> bool:
    pid, _, started = process.partition(" ")
    return is_running(Process(pid=int(pid), started=started, what="", run_dir=""))
