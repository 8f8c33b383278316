"""Assign conversations to episodes and track their outcome.

An episode is *offered*, and the first request of a conversation *takes* it. The conversation continues until it is
rated, its rating timeout expires, or its episode or model is gone. The episode then receives the outcome, once. All
code runs on one event loop and is independent of HTTP.

Invariant: an episode has at most one conversation with delivered replies. The outcome names every reply that no client
received, so that it is not trained with a reward for something else.
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
"""Number of completion IDs of finished conversations that are remembered; older ones count as unknown."""

RETRY_AFTER = 5
"""Seconds after which a client that found no free episode may retry."""

Outcome = dict[str, Any]
"""Outcome for an episode: `reward` with its details, or `ended` with the reason why there is none."""


@dataclass(frozen=True, kw_only=True)
class EpisodeModel:
    """Address of an episode's model."""

    base_url: str
    api_key: str = field(repr=False)
    name: str


@dataclass(eq=False, kw_only=True)
class Offer:
    """An episode that waits for a conversation or has one."""

    model: EpisodeModel
    rating_timeout: float
    deadline: float
    """Time by the loop's clock until which the episode waits for a conversation to start."""
    outcome: asyncio.Future[Outcome]
    lost: list[str] = field(default_factory=list)
    """The model's own IDs of replies that no client received."""
    _timer: asyncio.TimerHandle | None = None


@dataclass(eq=False)
class Exchange:
    """One request of a conversation, until its reply is delivered or can no longer be."""

    conversation: Conversation
    choices: int = 1
    reply_id: str = ""
    """ID of the reply for the client; empty while there is none."""
    model_id: str = ""
    """ID of the reply for the model; with several choices, of the first one."""
    delivered: bool = False
    abandoned: bool = False
    """Whether its client disconnected."""
    fatal: str = ""
    """Reason why the conversation cannot continue after this request."""


@dataclass(eq=False)
class Conversation:
    """A conversation between one user and one episode."""

    offer: Offer
    label: str
    """Name of the user in the application; only requests with the same one can continue the conversation."""
    id: str = field(default_factory=lambda: f"conv_{secrets.token_hex(12)}")
    replies: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    """Digests of the history up to each reply, by reply ID; one digest for each choice."""
    exchanges: set[Exchange] = field(default_factory=set)
    reward: float | None = None
    rated: tuple[str, ...] = ()
    over: str = ""
    """Reason for the end; empty while the conversation is open."""
    _timer: asyncio.TimerHandle | None = None

    @property
    def last_digests(self) -> tuple[bytes, ...]:
        """Digests of the last reply."""
        return next(reversed(self.replies.values()), ())


class Conversations:
    """All offers and conversations of one service."""

    def __init__(self) -> None:
        self._waiting: deque[Offer] = deque()
        self._wanted: deque[asyncio.Future[Offer]] = deque()
        self._open: dict[Conversation, None] = {}
        self._histories: Histories[Conversation] = Histories()
        self._by_reply: dict[str, Conversation] = {}
        self._past: OrderedDict[str, str] = OrderedDict()  # reply ID -> reason why its conversation ended
        self._counts: Counter[str] = Counter()
        self.model_name = ""
        """Name of the last offered model; empty before the first offer."""

    # --------------------------------------------------------------- episodes

    def offer(self, model: EpisodeModel, *, begin_timeout: float, rating_timeout: float) -> Offer:
        """Offer an episode for a conversation and return the offer with a future ``outcome``. `withdraw` must follow.

        :param begin_timeout: Seconds in which a conversation must start.
        :param rating_timeout: Seconds after its last reply in which it must be rated.
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
                self._tell(offer, {"ended": "no conversation started in time"})

        offer._timer = loop.call_at(offer.deadline, give_up)
        self._counts["offered"] += 1
        self._make_free(offer)
        return offer

    def withdraw(self, offer: Offer) -> None:
        """Withdraw an episode that is gone or has its outcome, and end its conversation."""
        if offer._timer is not None:
            offer._timer.cancel()
        if offer in self._waiting:
            self._waiting.remove(offer)
        for conversation in [c for c in self._open if c.offer is offer]:
            self.end(conversation, "its episode ended: the run finished or no longer needs it", "withdrawn")
        offer.outcome.cancel()

    # ----------------------------------------------------------- conversations

    async def find(self, history: Sequence[bytes], label: str, patience: float) -> Conversation:
        """Return the conversation that a request continues, or a new one.

        Its user does not matter until a reply is rated.

        :param history: Digests of the request's messages.
        :param patience: Seconds to wait for an episode.
        :raises ApiError: 503, no episode became free.
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
        """Register a request to the episode's model. `settle` must follow, after `replied` if there is a reply."""
        exchange = Exchange(conversation, choices)
        conversation.exchanges.add(exchange)
        if conversation._timer is not None:
            conversation._timer.cancel()
        return exchange

    def replied(self, exchange: Exchange, model_id: str, digests: Iterable[bytes]) -> str:
        """Register a reply and return its ID for the client, which is unguessable and unique.

        The ID is valid immediately, because a client may use it before its delivery is confirmed.
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
        """Finish a request: its reply was delivered (``delivered``), or no client will receive it."""
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
            if exchange.choices > 1:  # the other choices have no ID by which they could be excluded
                self.end(conversation, "an answer with several choices was not delivered", "failed")
                return
        if exchange.fatal and conversation.reward is None:
            self.end(conversation, exchange.fatal, "failed")
        elif not conversation.exchanges:
            self._rest(conversation)

    def rate(self, reply_ids: Sequence[str], reward: float) -> list[Outcome]:
        """Rate the conversations of these replies, all of them or none.

        :returns: The rated conversations, one entry each.
        :raises ApiError: 404 for an unknown ID, 409 for a conversation that is rated or being answered, 410 for one
            that ended without a rating.
        """
        found: dict[Conversation, list[str]] = {}
        for reply_id in reply_ids:
            found.setdefault(self._unrated(reply_id), []).append(reply_id)
        for conversation, ids in found.items():
            if any(not e.reply_id and (not e.abandoned or e.choices > 1) for e in conversation.exchanges):
                raise ApiError(
                    409, f"the conversation of {ids[0]} is waiting for a reply. Rate it when the reply has arrived",
                    code="busy", retry_after=1,
                )  # fmt: skip
        done = []
        for conversation, ids in found.items():
            conversation.reward, conversation.rated = reward, tuple(dict.fromkeys(ids))
            for exchange in conversation.exchanges:
                exchange.delivered |= exchange.reply_id in ids  # a client that rates a reply has received it
            done.append({"conversation": conversation.id, "msg_ids": list(conversation.rated), "reward": reward})
            if not conversation.exchanges:
                self._rest(conversation)
        return done

    def end(self, conversation: Conversation, why: str, word: str) -> None:
        """End a conversation without a rating: report the reason to the episode and reject later ratings.

        :param word: Counter to increase.
        """
        self._close(conversation, why)
        self._counts[word] += 1
        self._tell(conversation.offer, {"ended": why})

    def metrics(self) -> dict[str, int]:
        """Return the waiting and open counts at this moment and the other counts since the start."""
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
            if wanted.done():  # it was assigned at the moment in which its client disconnected
                self._make_free(wanted.result(), first=True)
            raise
        finally:
            if wanted in self._wanted:
                self._wanted.remove(wanted)
        if wanted.done():
            return wanted.result()
        raise ApiError(
            503,
            f"no episode became free for a new conversation within {patience:g} s: all are in use, or the model is "
            "being trained. Retry later",
            code="no_episode",
            retry_after=RETRY_AFTER,
        )

    def _make_free(self, offer: Offer, *, first: bool = False) -> None:
        """Assign the offer to a waiting request, or let it wait.

        :param first: Put it first, because a client that lost its first reply may retry.
        """
        if offer.outcome.done():
            return
        if self._wanted:
            self._wanted.popleft().set_result(offer)
            return
        if asyncio.get_running_loop().time() >= offer.deadline:
            self._tell(offer, {"ended": "no conversation started in time"})
        elif first:
            self._waiting.appendleft(offer)
        else:
            self._waiting.append(offer)

    def _rest(self, conversation: Conversation) -> None:
        """Close a conversation without running requests if it is rated or unused; otherwise wait for its user."""
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
            why = f"the conversation was neither rated nor continued within {timeout:g} s"
            loop = asyncio.get_running_loop()
            conversation._timer = loop.call_later(timeout, self.end, conversation, why, "expired")

    def _unrated(self, reply_id: str) -> Conversation:
        conversation = self._by_reply.get(reply_id)
        why = self._past.get(reply_id, "")
        if conversation is not None and conversation.reward is None:
            return conversation
        if conversation is not None or why == "rated":
            raise ApiError(409, f"the conversation of {reply_id} is already rated", code="already_rated")
        if why:
            raise ApiError(410, f"the conversation of {reply_id} has ended: {why}", code="conversation_over")
        raise ApiError(404, f"{reply_id!r} is not the ID of a reply of this service", code="unknown_id")

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
