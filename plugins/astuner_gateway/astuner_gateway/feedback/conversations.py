"""Who talks with which episode, and what became of it.

An episode is *offered*; the first request of a conversation *takes* it; the conversation goes on until it is rated,
until nobody has rated it for long, or until its episode or its model is gone.  Then the episode is told, once.
Everything runs on one event loop, and nothing here knows of HTTP.

Invariant: an episode has at most one conversation whose replies somebody has got; each reply that nobody got is
named in the outcome, so that it is not trained with a reward that was given for something else.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from astuner_gateway.endpoint.errors import ApiError
from astuner_gateway.served.conversations import Histories

REMEMBERED = 100_000
"""Completion ids of conversations that are over; a rating that comes later than that is of an unknown one."""

RETRY_AFTER = 5
"""Seconds after which a client that found no free episode may ask again."""

Outcome = dict[str, Any]
"""What an episode is told: `reward` and what belongs to it, or `ended`, which says why there is none."""


@dataclass(frozen=True, kw_only=True)
class EpisodeModel:
    """Where an episode's model is."""

    base_url: str
    api_key: str = field(repr=False)
    name: str


@dataclass(eq=False, kw_only=True)
class Offer:
    """An episode that waits for a conversation, or has one."""

    model: EpisodeModel
    rating_timeout: float
    deadline: float
    """When it waits no longer for a conversation to begin, by the loop's clock."""
    outcome: asyncio.Future[Outcome]
    lost: list[str] = field(default_factory=list)
    """Its model's own ids of the replies that nobody got."""
    _timer: asyncio.TimerHandle | None = None


@dataclass(eq=False)
class Exchange:
    """One request of a conversation, until its reply has reached the client or cannot any more."""

    conversation: Conversation
    choices: int = 1
    reply_id: str = ""
    """What the client knows the reply by; empty while there is none."""
    model_id: str = ""
    """What the model knows it by; where there are several choices, its first."""
    delivered: bool = False
    abandoned: bool = False
    """Its client went away."""
    fatal: str = ""
    """Why the conversation cannot go on after it."""


@dataclass(eq=False)
class Conversation:
    """What one user and one episode say to each other."""

    offer: Offer
    label: str
    """What the application calls the user; only requests with the same one can continue it."""
    id: str = field(default_factory=lambda: f"conv_{secrets.token_hex(12)}")
    replies: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    """Reply id -> the digests of the history up to it, one for each choice."""
    exchanges: set[Exchange] = field(default_factory=set)
    reward: float | None = None
    rated: tuple[str, ...] = ()
    over: str = ""
    """Why; empty while it goes on."""
    _timer: asyncio.TimerHandle | None = None

    @property
    def last_digests(self) -> tuple[bytes, ...]:
        """Of the last reply."""
        return next(reversed(self.replies.values()), ())


class Conversations:
    """All offers and conversations of one service."""

    def __init__(self) -> None:
        self._waiting: deque[Offer] = deque()
        self._wanted: deque[asyncio.Future[Offer]] = deque()
        self._open: dict[Conversation, None] = {}
        self._histories: Histories[Conversation] = Histories()
        self._by_reply: dict[str, Conversation] = {}
        self._past: OrderedDict[str, str] = OrderedDict()  # reply id -> why its conversation is over
        self._counts: Counter[str] = Counter()
        self.model_name = ""
        """Of the model that was offered last; empty before."""

    # --------------------------------------------------------------- episodes

    def offer(self, model: EpisodeModel, *, begin_timeout: float, rating_timeout: float) -> Offer:
        """An episode waits for a conversation; its ``outcome`` says what came of it. `withdraw` must follow.

        :param begin_timeout: seconds in which a conversation must begin.
        :param rating_timeout: seconds after its last reply in which it must be rated.
        """
        loop = asyncio.get_running_loop()
        offer = Offer(
            model=model,
            rating_timeout=rating_timeout,
            deadline=loop.time() + begin_timeout,
            outcome=loop.create_future(),
        )
        self.model_name = model.name

        def give_up() -> None:
            if offer in self._waiting:
                self._waiting.remove(offer)
                self._tell(offer, {"ended": "no conversation began in time"})

        offer._timer = loop.call_at(offer.deadline, give_up)
        self._counts["offered"] += 1
        self._make_free(offer)
        return offer

    def withdraw(self, offer: Offer) -> None:
        """The episode is gone, or has been told; what it still has is over."""
        if offer._timer is not None:
            offer._timer.cancel()
        if offer in self._waiting:
            self._waiting.remove(offer)
        for conversation in [c for c in self._open if c.offer is offer]:
            self.end(conversation, "its episode is over: the run has ended, or needs it no longer", "withdrawn")
        offer.outcome.cancel()

    # ----------------------------------------------------------- conversations

    async def find(self, history: Sequence[bytes], label: str, patience: float) -> Conversation:
        """The conversation that a request continues, or a new one.

        It is of no account whose it was, as long as nobody rates a reply from before.

        :param history: the digests of the request's messages.
        :param patience: seconds to wait for an episode.
        :raises ApiError: 503, none came.
        """
        found = self._histories.continued(
            history, lambda c: c.label == label and c.reward is None, lambda c: (len(c.exchanges), c.last_digests)
        )
        if found is not None:
            return found
        conversation = Conversation(await self._take(patience), label)
        self._open[conversation] = None
        return conversation

    def begin(self, conversation: Conversation, choices: int = 1) -> Exchange:
        """A request goes to the episode's model; `settle` must follow, and `replied` before it if there is a reply."""
        exchange = Exchange(conversation, choices)
        conversation.exchanges.add(exchange)
        if conversation._timer is not None:
            conversation._timer.cancel()
        return exchange

    def replied(self, exchange: Exchange, model_id: str, digests: Iterable[bytes]) -> str:
        """The model has answered; the id that the client knows the reply by, unguessable and never given twice.

        It holds from now on, since a client may use it before we know that it has it.
        """
        conversation = exchange.conversation
        exchange.reply_id, exchange.model_id = f"chatcmpl-{secrets.token_hex(16)}", model_id
        if conversation.over:
            self._past[exchange.reply_id] = conversation.over
        else:
            conversation.replies[exchange.reply_id] = tuple(digests)
            self._by_reply[exchange.reply_id] = conversation
            self._histories.add(conversation, conversation.replies[exchange.reply_id])
        return exchange.reply_id

    def settle(self, exchange: Exchange) -> None:
        """The reply has reached the client (``delivered``), or nobody will get it any more."""
        conversation = exchange.conversation
        conversation.exchanges.discard(exchange)
        if conversation.over:
            return
        if exchange.reply_id and exchange.delivered:
            self._counts["replies"] += 1
        elif exchange.reply_id:
            digests = conversation.replies.pop(exchange.reply_id)
            del self._by_reply[exchange.reply_id]
            still = {digest for others in conversation.replies.values() for digest in others}
            self._histories.forget(conversation, [digest for digest in digests if digest not in still])
            conversation.offer.lost.append(exchange.model_id)
            if exchange.choices > 1:  # the others have no name by which they could be left out
                self.end(conversation, "an answer with several choices did not reach its client", "failed")
                return
        if exchange.fatal and conversation.reward is None:
            self.end(conversation, exchange.fatal, "failed")
        elif not conversation.exchanges:
            self._rest(conversation)

    def rate(self, reply_ids: Sequence[str], reward: float) -> list[Outcome]:
        """Give the conversations of these replies a reward, all of them or none.

        :returns: what was rated, one entry per conversation.
        :raises ApiError: 404 for an id that nobody knows, 409 for what was rated or is being answered, 410 for what
            is over without a rating.
        """
        found: dict[Conversation, list[str]] = {}
        for reply_id in reply_ids:
            found.setdefault(self._unrated(reply_id), []).append(reply_id)
        for conversation, ids in found.items():
            if any(not e.reply_id and (not e.abandoned or e.choices > 1) for e in conversation.exchanges):
                raise ApiError(
                    409, f"a reply in the conversation of {ids[0]} is being made; rate it when it is there",
                    code="busy", retry_after=1,
                )  # fmt: skip
        done = []
        for conversation, ids in found.items():
            conversation.reward, conversation.rated = reward, tuple(dict.fromkeys(ids))
            for exchange in conversation.exchanges:
                exchange.delivered |= exchange.reply_id in ids  # who rates it has it
            done.append({"conversation": conversation.id, "msg_ids": list(conversation.rated), "reward": reward})
            if not conversation.exchanges:
                self._rest(conversation)
        return done

    def end(self, conversation: Conversation, why: str, word: str) -> None:
        """It is over without a rating: the episode is told why, and later ratings are refused.

        :param word: what it is counted as.
        """
        self._close(conversation, why)
        self._counts[word] += 1
        self._tell(conversation.offer, {"ended": why})

    def metrics(self) -> dict[str, int]:
        """Waiting and open ones now; the others since the start."""
        return {
            "waiting_episodes": len(self._waiting),
            "waiting_requests": len(self._wanted),
            "open_conversations": len(self._open),
            **{word: self._counts[word] for word in ("offered", "replies", "rated", "expired", "withdrawn", "failed")},
        }

    # ----------------------------------------------------------------- private

    async def _take(self, patience: float) -> Offer:
        if self._waiting:
            return self._waiting.popleft()
        wanted: asyncio.Future[Offer] = asyncio.get_running_loop().create_future()
        self._wanted.append(wanted)
        try:
            await asyncio.wait({wanted}, timeout=patience)
        except asyncio.CancelledError:
            if wanted.done():  # it was handed over in the moment in which its client went away
                self._make_free(wanted.result(), first=True)
            raise
        finally:
            if wanted in self._wanted:
                self._wanted.remove(wanted)
        if wanted.done():
            return wanted.result()
        raise ApiError(
            503,
            f"no episode of the run had time for a new conversation within {patience:g} s: all have one, or the model "
            "is being trained; try again",
            code="no_episode",
            retry_after=RETRY_AFTER,
        )

    def _make_free(self, offer: Offer, *, first: bool = False) -> None:
        """Hand the offer to who waits, or let it wait.

        :param first: before the others: a client that lost its first reply may ask for it again.
        """
        if offer.outcome.done():
            return
        if self._wanted:
            self._wanted.popleft().set_result(offer)
            return
        if asyncio.get_running_loop().time() >= offer.deadline:
            self._tell(offer, {"ended": "no conversation began in time"})
        elif first:
            self._waiting.appendleft(offer)
        else:
            self._waiting.append(offer)

    def _rest(self, conversation: Conversation) -> None:
        """No request is under way: it is rated, or has not begun after all, or waits for its user."""
        if conversation.reward is not None:
            self._close(conversation, "rated")
            self._counts["rated"] += 1
            self._tell(
                conversation.offer,
                {
                    "reward": conversation.reward,
                    "conversation": conversation.id,
                    "rated": list(conversation.rated),
                    "replies": len(conversation.replies),
                    "lost": conversation.offer.lost,
                },
            )
        elif not conversation.replies:
            self._close(conversation, "never begun")
            self._make_free(conversation.offer, first=True)
        else:
            timeout = conversation.offer.rating_timeout
            why = f"nobody rated the conversation or went on with it within {timeout:g} s"
            loop = asyncio.get_running_loop()
            conversation._timer = loop.call_later(timeout, self.end, conversation, why, "expired")

    def _unrated(self, reply_id: str) -> Conversation:
        conversation = self._by_reply.get(reply_id)
        why = self._past.get(reply_id, "")
        if conversation is not None and conversation.reward is None:
            return conversation
        if conversation is not None or why == "rated":
            raise ApiError(409, f"the conversation of {reply_id} has a rating already", code="already_rated")
        if why:
            raise ApiError(410, f"the conversation of {reply_id} is over: {why}", code="conversation_over")
        raise ApiError(404, f"no reply of this service has the id {reply_id!r}", code="unknown_id")

    def _close(self, conversation: Conversation, why: str) -> None:
        conversation.over = why
        if conversation._timer is not None:
            conversation._timer.cancel()
        self._open.pop(conversation, None)
        for reply_id, digests in conversation.replies.items():
            self._histories.forget(conversation, digests)
            del self._by_reply[reply_id]
            self._past[reply_id] = why
        while len(self._past) > REMEMBERED:
            self._past.popitem(last=False)

    def _tell(self, offer: Offer, outcome: Outcome) -> None:
        if not offer.outcome.done():
            offer.outcome.set_result(outcome)
