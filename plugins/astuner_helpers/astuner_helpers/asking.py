"""Asking until there is an answer: limits, budget, retries, and the record of each request.

Blocks; runs in worker threads.  Invariant: every request that is sent was entered in the ledger before and is settled
after, whatever becomes of it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel

from astuner.rollout.queueing import Waiters
from astuner_helpers.ledger import Account, Ledger, Permit, Spent, Taken
from astuner_helpers.reply import BudgetSpent, HelperAnswer, HelperFailed, Question, Reply, tokens_of
from astuner_helpers.server import NoReply, Server
from astuner_helpers.structured import Invalid

T = TypeVar("T")
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0
LONGEST_PAUSE = 300.0
"""Seconds; a server that asks to wait longer is not waited for."""
_EXCERPT = 200
_jitter = random.Random()  # of our own: an agent may seed `random`, and its draws are not shifted by how long we wait


class Abandoned(Exception):
    """Nobody waits for the answer any more."""


class Asking:
    """Asks one helper model's server.

    :param spell: how a person writes a key of the helper's section.
    :param hide: takes what is secret out of a text.
    """

    def __init__(
        self,
        account: Account,
        ledger: Ledger,
        server: Server,
        *,
        spell: Callable[[str], str],
        hide: Callable[[str], str],
    ) -> None:
        self._account, self._ledger, self._server = account, ledger, server
        self._spell, self._hide = spell, hide
        self._paused_until = 0.0  # by time.monotonic; a server that asks to wait means all of this process's requests

    def ask(
        self,
        question: Question,
        waiters: Waiters,
        *,
        answer: type[BaseModel] | None = None,
        read: Callable[[Reply], Any] = lambda reply: None,
    ) -> tuple[Reply, HelperAnswer]:
        """An answer that ``read`` takes, as the server sent it and as it is given.

        :param waiters: who waits for it; told while it waits for a limit of ours.
        :param read: what the caller makes of a reply; raises `Invalid` where that is not what was asked for.
        :raises HelperFailed: there is none after all tries.
        :raises BudgetSpent: the budget does not allow the next request.
        :raises Abandoned: nobody waits any more.
        """
        tries = self._account.section.max_retries + 1
        for attempt in range(tries):
            permit = self._permit(question, waiters)
            began = time.perf_counter()
            backoff = min(_LONGEST_WAIT, _FIRST_WAIT * 2**attempt) * _jitter.uniform(0.5, 1.0)
            try:
                reply = self._server.send(question, answer)
            except NoReply as e:
                reason = self._hide(str(e))
                self._settle(permit, question, None, began, error=reason, billed=e.billed)
                if e.after > LONGEST_PAUSE:
                    self._fail(f"{reason} (the server asks to wait {e.after:g} s)", attempt + 1)
                if not e.again or attempt == tries - 1:
                    self._fail(reason, attempt + 1, about_question=e.about_question)
                if e.after:
                    self._paused_until = max(self._paused_until, time.monotonic() + e.after)
                _sleep(max(backoff, e.after), waiters)
                continue
            except BaseException as e:
                self._settle(permit, question, None, began, error=type(e).__name__, billed=True)
                raise
            try:
                data = self._read(reply, question, read)
            except Invalid as e:
                reason = self._hide(str(e))
                self._settle(permit, question, reply, began, error=reason)
                if isinstance(e, _Final) or attempt == tries - 1:
                    self._fail(reason, attempt + 1, about_question=True)
                continue
            taken, cost = self._settle(permit, question, reply, began)
            return reply, HelperAnswer(
                text=reply.text,
                data=data,
                finish_reason=reply.finish_reason,
                prompt_tokens=taken.prompt_tokens,
                completion_tokens=taken.completion_tokens,
                cost=cost,
                seconds=taken.seconds,
            )
        raise AssertionError("the last try returns or raises")

    def _permit(self, question: Question, waiters: Waiters) -> Permit:
        """Wait until the request may be sent, and enter it."""
        while True:
            _sleep(self._paused_until - time.monotonic(), waiters)
            found = self._ledger.enter(self._account, question)
            if isinstance(found, Permit):
                return found
            if isinstance(found, Spent):
                raise BudgetSpent(self._over(found))
            # A little more than needed, and not all at once: many may wait for the same moment.
            with waiters.queueing():
                _sleep(found.seconds + _jitter.uniform(0.01, 0.1), waiters)

    def _over(self, spent: Spent) -> str:
        unit = "" if spent.key == "budget" else " tokens"
        return (
            f"the helper model {self._account.name!r} has spent {spent.spent:.6g}{unit} of its budget of "
            f"{spent.budget:.6g}{unit} in {spent.calls} requests, and the next one may take {spent.next:.6g}{unit}. "
            "Everything done so far is saved, and the answers are kept. "
            f"Raise {self._spell(spent.key)} and go on; a run goes on by: astuner run FILE --resume"
        )

    def _read(self, reply: Reply, question: Question, read: Callable[[Reply], T]) -> T:
        """:raises Invalid: it is not what was asked for."""
        if reply.refusal or reply.finish_reason == "content_filter":
            said = reply.refusal or reply.text
            raise _Final(f"it refused to answer ({reply.finish_reason}): {said[:_EXCERPT]!r}")
        cut = ""
        if reply.finish_reason == "length":
            cut = f"its answer was cut off after {question.most_completion} tokens; raise {self._spell('max_tokens')}"
        if not reply.text.strip() and not reply.vectors:
            raise _Final(cut) if cut else Invalid("its answer is empty")
        try:
            return read(reply)
        except Invalid as e:
            if cut:
                raise _Final(f"{cut} ({e})") from None
            raise Invalid(f"{e}; it said {reply.text[:_EXCERPT]!r}") from None

    def _settle(
        self,
        permit: Permit,
        question: Question,
        reply: Reply | None,
        began: float,
        *,
        error: str | None = None,
        billed: bool = True,
    ) -> tuple[Taken, float]:
        """Enter what a request took: an estimate where the server does not say, without a reply the most it may be."""
        prompt = reply.prompt_tokens if reply else None
        completion = reply.completion_tokens if reply else None
        if not billed:
            prompt = completion = 0
        made = question.most_completion if reply is None else tokens_of(reply.text)
        taken = Taken(
            prompt_tokens=question.prompt_estimate if prompt is None else prompt,
            completion_tokens=made if completion is None else completion,
            estimated=prompt is None or completion is None,
            seconds=time.perf_counter() - began,
            error=error,
        )
        return taken, self._ledger.settle(self._account, permit, taken)

    def _fail(self, reason: str, tries: int, *, about_question: bool = False) -> NoReturn:
        times = "1 try" if tries == 1 else f"{tries} tries"
        told = f"the helper model {self._account.name!r} gave no answer after {times}: {reason}"
        raise HelperFailed(told, about_question=about_question) from None


class _Final(Invalid):
    """Asking again would bring the same."""


def _sleep(seconds: float, waiters: Waiters) -> None:
    """:raises Abandoned: nobody waits any more."""
    if waiters.left_within(seconds):
        raise Abandoned
