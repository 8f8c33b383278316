"""Ask a helper model a question from any event loop or thread.

Answers come from the cache if possible. Identical concurrent questions share one request; all requests run in worker
threads with retries. Invariants: no event loop is blocked; the API key appears only in the request header; every
request is entered in the ledger before it is sent and settled afterwards, whatever its outcome.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import os
import random
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from pydantic import BaseModel

from astuner.contracts.errors import ConfigError
from astuner_helpers import structured
from astuner_helpers.ledger import Account, Answers, Ledger, Spent, database
from astuner_helpers.reply import (
    EMBEDDINGS,
    BudgetSpent,
    HelperAnswer,
    HelperFailed,
    NoReply,
    Question,
    Reply,
    Usage,
    tokens_of,
)
from astuner_helpers.server import OpenAIServer, key_of
from astuner_helpers.settings import HelperModel
from astuner_helpers.workers import Flights, Waiters, Workers, waited
from astuner_http.client import HttpError

if TYPE_CHECKING:
    from astuner_helpers.agentscope_server import AgentScopeServer

T = TypeVar("T")
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0
LONGEST_PAUSE = 300.0
"""Maximum pause in seconds that a server may request before the question fails."""
_EXCERPT = 200
_jitter = random.Random()  # a private generator: an agent may seed `random`, and waiting must not shift its draws
Vectors = Sequence[Sequence[float]]
_HIDDEN = "***"
_LOOKING = Workers(2, "astuner-helper-cache")
"""Read the cache in separate threads, so that cached answers never wait for requests."""


class Abandoned(Exception):
    """No caller waits for the answer any more."""


class Helper:
    """A helper model, as returned by `HelperModels.get`."""

    def __init__(self, name: str, section: HelperModel, *, scope: str, spelling: Callable[[str, str], str]) -> None:
        """Create a helper model from its section.

        :raises ConfigError: Its API key is not in the environment or cannot be used.
        """
        self.name, self.model = name, section.model
        self._section = section
        self._spell = functools.partial(spelling, name)
        self._key = key_of(section.api_key_env, self._spell("api_key_env"))
        self._server = _server(section, self._key, self._spell)
        self._account = Account(scope=scope, name=name, server=self._server.name, section=section)
        self._database = database()
        self._ledger, self._answers = Ledger(self._database), Answers(self._database)
        self._paused_until = 0.0  # time.monotonic; a pause requested by the server applies to the entire process
        self._workers = Workers(section.concurrency, f"astuner-helper-{name}")
        self._talks: Flights[HelperAnswer] = Flights()
        self._batches: Flights[Vectors] = Flights()

    @property
    def identity(self) -> dict[str, Any]:
        """Return what its answers depend on besides the messages, as plain data without secrets.

        Other caches include it in their keys. It covers the model, the server (or the AgentScope class and its
        options) and the request options.
        """
        section = self._section
        return copy.deepcopy(
            {
                "model": self.model,
                "asked_of": dict(self._server.identity),
                "temperature": section.temperature,
                "max_tokens": section.max_tokens,
                "extra": section.extra,
                "structured": self._form,
            }
        )

    async def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        purpose: str,
        answer: type[BaseModel] | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        sample: int = 0,
    ) -> HelperAnswer:
        """Return the helper model's answer to ``messages`` (in the format of OpenAI chat completions).

        :param purpose: Purpose of the call in one or two words, for the record.
        :param answer: Form of a structured answer. The answer is validated, and requested again if it does not match.
        :param sample: Sample number (0, 1, 2, …). Each number is a separate request with its own cache entry.
        :raises HelperFailed: No valid answer after all tries.
        :raises BudgetSpent: The budget does not allow the next request.
        """
        section = self._section
        most = section.max_tokens if max_tokens is None else max_tokens
        said, form = [dict(message) for message in messages], {}
        if answer is not None:
            said = structured.explained(said, answer, self._form)
            form = structured.request_of(answer, self._form)
        body = {
            "model": self.model,
            "messages": said,
            "temperature": section.temperature if temperature is None else temperature,
            "max_tokens": most,
            **form,
            **section.extra,
        }
        question = Question(
            purpose=purpose, body=body, asked_of=self._server.identity, sample=sample, most_completion=most
        )
        if section.cache:
            kept = await waited(_LOOKING.submit(lambda: self._kept(question, answer)))
            if kept is not None:
                return kept
        given, mine = await self._joined(
            self._talks, (question.key, answer), lambda waiters: self._asked(question, answer, waiters)
        )
        if mine or given.cached:
            return given
        await waited(_LOOKING.submit(lambda: self._ledger.cached(self._account, question)))
        return replace(given, cost=0.0, seconds=0.0, cached=True)

    async def embed(self, texts: Sequence[str], *, purpose: str) -> list[list[float]]:
        """Return one vector per text, in the order of the texts. Raises the same errors as `ask`."""
        wanted = {text: self._embedding([text], purpose) for text in dict.fromkeys(texts)}
        found: dict[str, Sequence[float]] = {}
        if self._section.cache and wanted:
            found = await waited(_LOOKING.submit(lambda: self._kept_vectors(wanted)))
        missing = [text for text in wanted if text not in found]
        size = self._section.embed_batch
        batches = [missing[at : at + size] for at in range(0, len(missing), size)]
        embedded = await asyncio.gather(*(self._embedded(batch, purpose) for batch in batches))
        for batch, vectors in zip(batches, embedded, strict=True):
            found.update(zip(batch, vectors, strict=True))
        return [list(found[text]) for text in texts]

    def usage(self) -> Usage:
        """Return the usage in this scope, over all processes of this machine. Blocks briefly."""
        return self._ledger.usage(self._account.scope, self.name)

    def _embedding(self, texts: Sequence[str], purpose: str) -> Question:
        body = {"model": self.model, "input": list(texts), **self._section.extra}
        return Question(purpose=purpose, body=body, asked_of=self._server.identity, route=EMBEDDINGS)

    def _asked(self, question: Question, answer: type[BaseModel] | None, waiters: Waiters) -> HelperAnswer:
        if self._section.cache and (kept := self._kept(question, answer)) is not None:
            return kept  # another caller received the same answer in the meantime
        reply, found = self._sent(question, waiters, answer)
        if self._section.cache:
            self._answers.put({question.key: reply})
        return found

    def _kept(self, question: Question, answer: type[BaseModel] | None) -> HelperAnswer | None:
        """Return the cached answer if it can be read in the requested form."""
        reply = self._answers.get([question.key]).get(question.key)
        if reply is None:
            return None
        try:
            data = self._read(reply, answer)
        except structured.Invalid as e:
            self._answers.unreadable(question.key, str(e))
            return None
        self._ledger.cached(self._account, question)
        return HelperAnswer(
            text=reply.text,
            data=data,
            finish_reason=reply.finish_reason,
            prompt_tokens=reply.prompt_tokens or 0,
            completion_tokens=reply.completion_tokens or 0,
            cached=True,
        )

    def _kept_vectors(self, wanted: Mapping[str, Question]) -> dict[str, Sequence[float]]:
        kept = self._answers.get([question.key for question in wanted.values()])
        found = {text: kept[q.key].vectors[0] for text, q in wanted.items() if q.key in kept and kept[q.key].vectors}
        if found:
            self._ledger.cached(self._account, next(iter(wanted.values())), len(found))
        return dict(found)

    async def _embedded(self, batch: Sequence[str], purpose: str) -> Vectors:
        question = self._embedding(batch, purpose)

        def work(waiters: Waiters) -> Vectors:
            reply, _ = self._sent(question, waiters)
            if self._section.cache:
                keys = [self._embedding([text], purpose).key for text in batch]
                each = zip(keys, reply.vectors, strict=True)
                self._answers.put({key: Reply(vectors=(vector,)) for key, vector in each})
            return reply.vectors

        vectors, _ = await self._joined(self._batches, question.key, work)
        return vectors

    async def _joined(self, flights: Flights[T], about: Hashable, work: Callable[[Waiters], T]) -> tuple[T, bool]:
        """Return the result of ``work`` in a worker thread, shared between identical calls if the cache is on."""
        key = (os.getpid(), about) if self._section.cache else object()  # a fork must not wait for its parent's jobs

        def begin(waiters: Waiters) -> Future[T]:
            def job() -> T:
                waiters.begins()
                return work(waiters)

            return self._workers.submit(job)

        return await flights.join(key, begin)

    def _read(self, reply: Reply, answer: type[BaseModel] | None) -> Any:
        """Return the data of a reply.

        :raises structured.Invalid: The reply does not have the requested form.
        """
        return None if answer is None else structured.read(reply.text, answer)

    @property
    def _form(self) -> str:
        """Return how structured answers are requested. AgentScope's models use their own method."""
        how = self._section.structured
        return "json_schema" if self._section.agentscope and how != "none" else how

    # ---- in worker threads: limits, budget, retries, and the record of each request

    def _sent(
        self, question: Question, waiters: Waiters, answer: type[BaseModel] | None = None
    ) -> tuple[Reply, HelperAnswer]:
        """Return a valid answer, as the reply of the server and as given to the caller.

        :param waiters: Callers that wait for it. They are notified while the request waits for a limit.
        :raises HelperFailed: No valid answer after all tries.
        :raises BudgetSpent: The budget does not allow the next request.
        :raises Abandoned: No caller waits any more.
        """
        tries = self._section.max_retries + 1
        for attempt in range(tries):
            permit = self._permit(question, waiters)
            began = time.perf_counter()
            backoff = min(_LONGEST_WAIT, _FIRST_WAIT * 2**attempt) * _jitter.uniform(0.5, 1.0)
            reply = None
            try:
                reply = self._server.send(question, answer)
                data = self._checked(reply, question, answer)
            except NoReply as e:
                reason = str(e).replace(self._key, _HIDDEN) if self._key else str(e)
                self._settle(permit, question, reply, began, error=reason, billed=e.billed)
                if e.after > LONGEST_PAUSE:
                    self._fail(f"{reason} (the server requests a pause of {e.after:g} s)", attempt + 1)
                if not e.again or attempt == tries - 1:
                    self._fail(reason, attempt + 1, about_question=e.about_question)
                if e.after:
                    self._paused_until = max(self._paused_until, time.monotonic() + e.after)
                if reply is None:  # an answer in the wrong form is requested again without a pause
                    _sleep(max(backoff, e.after), waiters)
                continue
            except BaseException as e:
                self._settle(permit, question, reply, began, error=type(e).__name__)
                raise
            took = self._settle(permit, question, reply, began)
            return reply, HelperAnswer(text=reply.text, data=data, finish_reason=reply.finish_reason, **took)
        raise AssertionError("the last try returns or raises")

    def _permit(self, question: Question, waiters: Waiters) -> int:
        """Wait until the request may be sent, and enter it in the ledger."""
        while True:
            _sleep(self._paused_until - time.monotonic(), waiters)
            found = self._ledger.enter(self._account, question)
            if isinstance(found, int):
                return found
            if isinstance(found, Spent):
                raise BudgetSpent(self._over(found))
            # Add jitter, because many requests may wait for the same moment.
            with waiters.queueing():
                _sleep(found.seconds + _jitter.uniform(0.01, 0.1), waiters)

    def _over(self, spent: Spent) -> str:
        unit = "" if spent.key == "budget" else " tokens"
        return (
            f"the helper model {self.name!r} has spent {spent.spent:.6g}{unit} of its budget of "
            f"{spent.budget:.6g}{unit} in {spent.calls} requests, and the next one may take {spent.next:.6g}{unit}. "
            f"All results and answers so far are saved; raise {self._spell(spent.key)}"
        )

    def _checked(self, reply: Reply, question: Question, answer: type[BaseModel] | None) -> Any:
        """Return the data of a reply.

        :raises NoReply: The reply is refused, cut off, empty or in the wrong form.
        """
        if reply.refusal or reply.finish_reason == "content_filter":
            said = reply.refusal or reply.text
            told = f"the model refused to answer ({reply.finish_reason}): {said[:_EXCERPT]!r}"
            raise NoReply(told, again=False, about_question=True)
        cut = ""
        if reply.finish_reason == "length":
            cut = f"the answer was cut off after {question.most_completion} tokens; raise {self._spell('max_tokens')}"
        if not reply.text.strip() and not reply.vectors:
            raise NoReply(cut or "the answer is empty", again=not cut, about_question=True)
        try:
            return self._read(reply, answer)
        except structured.Invalid as e:
            told = f"{cut} ({e})" if cut else f"{e}: {reply.text[:_EXCERPT]!r}. {self._form_advice()}"
            raise NoReply(told, again=not cut, about_question=True) from None

    def _form_advice(self) -> str:
        """Return advice on other ways to request structured answers."""
        key = self._spell("structured")
        return {
            "json_schema": f"If the server does not enforce schemas, set {key}: none (the prompt then states the form)",
            "json_object": f"If the server enforces schemas, set {key}: json_schema",
            "none": f"If the server enforces schemas, set {key}: json_schema; otherwise use a larger model",
        }[self._form]

    def _settle(
        self,
        permit: int,
        question: Question,
        reply: Reply | None,
        began: float,
        *,
        error: str | None = None,
        billed: bool = True,
    ) -> dict[str, Any]:
        """Settle a request. Missing counts are estimated; without a reply, the reserved maximum counts."""
        prompt = reply.prompt_tokens if reply else None
        completion = reply.completion_tokens if reply else None
        if not billed:
            prompt = completion = 0
        made = question.most_completion if reply is None else tokens_of(reply.text)
        seconds = time.perf_counter() - began
        took = (question.prompt_estimate if prompt is None else prompt, made if completion is None else completion)
        cost = self._ledger.settle(
            self._account,
            permit,
            prompt_tokens=took[0],
            completion_tokens=took[1],
            estimated=prompt is None or completion is None,
            seconds=seconds,
            error=error,
        )
        return {"prompt_tokens": took[0], "completion_tokens": took[1], "seconds": seconds, "cost": cost}

    def _fail(self, reason: str, tries: int, *, about_question: bool = False) -> NoReturn:
        times = "1 try" if tries == 1 else f"{tries} tries"
        told = f"the helper model {self.name!r} gave no valid answer after {times}: {reason}"
        raise HelperFailed(told, about_question=about_question) from None


def _server(section: HelperModel, key: str, spell: Callable[[str], str]) -> OpenAIServer | AgentScopeServer:
    if section.agentscope is not None:
        from astuner_helpers.agentscope_server import AgentScopeServer

        return AgentScopeServer(section, key, spell("agentscope"))
    try:
        return OpenAIServer(section, key, f"the key in {section.api_key_env}")
    except HttpError as e:
        raise ConfigError(f"{spell('base_url')}: {e}") from None


def _sleep(seconds: float, waiters: Waiters) -> None:
    """Sleep until a pause ends.

    :raises Abandoned: No caller waits any more.
    """
    if waiters.left_within(seconds):
        raise Abandoned
