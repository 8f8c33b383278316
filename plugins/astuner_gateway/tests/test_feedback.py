"""Which conversation a request continues, and what becomes of the episodes behind them: no HTTP, no model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner import load_config
from astuner.config.capabilities import check_capabilities
from astuner.contracts.backbone import Capabilities
from astuner.contracts.errors import ConfigError
from astuner.contracts.types import Split
from astuner.testing import check_task_reader, fake_config
from astuner_gateway.endpoint.errors import ApiError
from astuner_gateway.endpoint.openai_chat import read_messages
from astuner_gateway.feedback.conversations import Conversation, Conversations, EpisodeModel, Exchange, Offer
from astuner_gateway.feedback.settings import ConversationsConfig
from astuner_gateway.feedback.workflow import ConversationsTaskReader
from astuner_gateway.served.conversations import NOTHING_SAID, after, digests
from tests.table import table

MODEL = EpisodeModel(base_url="http://127.0.0.1:1/v1", api_key="k", name="tiny")
LONG = 1000.0


class Desk:
    """A service without HTTP: what applications and episodes do, in one word each."""

    def __init__(self) -> None:
        self.books = Conversations()

    def offer(self, begin: float = LONG, rating: float = LONG) -> Offer:
        return self.books.offer(MODEL, begin_timeout=begin, rating_timeout=rating)

    async def ask(self, history: list[bytes], label: str = "", patience: float = 0.0) -> Exchange:
        return self.books.begin(await self.books.find(history, label, patience))

    def answer(self, exchange: Exchange, *after_it: bytes, delivered: bool = True) -> str:
        reply_id = self.books.replied(exchange, "chatcmpl-e:0", after_it)
        exchange.delivered, exchange.abandoned = delivered, not delivered
        self.books.settle(exchange)
        return reply_id

    async def say(self, history: list[bytes], *after_it: bytes, label: str = "") -> tuple[Conversation, str]:
        exchange = await self.ask(history, label)
        return exchange.conversation, self.answer(exchange, *after_it)

    def refusal(self, *ids: str) -> tuple[int, str | None]:
        with pytest.raises(ApiError) as caught:
            self.books.rate(list(ids), 1.0)
        return caught.value.status, caught.value.code


def at(scenario: Callable[[Desk], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(scenario(Desk()), 60)

    asyncio.run(main())


def a(digest: str) -> bytes:
    return digest.encode()


# ---------------------------------------------------------------------------------------------------- conversations


def test_a_conversation_is_one_episode_and_its_rating_the_reward() -> None:
    async def scenario(desk: Desk) -> None:
        offer, other = desk.offer(), desk.offer()
        first, one = await desk.say([a("q")], a("q+r"))
        again, two = await desk.say([a("q"), a("q+r"), a("q+r+q")], a("q+r+q+r"))
        assert first is again
        assert first.offer is offer
        assert desk.books.rate([two, one], 0.5) == [{"conversation": first.id, "msg_ids": [two, one], "reward": 0.5}]
        assert offer.outcome.result() == {
            "reward": 0.5,
            "conversation": first.id,
            "rated": [two, one],
            "replies": 2,
            "lost": [],
        }
        assert not other.outcome.done()
        new, _ = await desk.say([a("q"), a("q+r"), a("q+r+q")], a("q+r+q+r"))
        assert new.offer is other  # what was rated is over: its history is a new conversation's prompt
        assert desk.books.metrics() == {
            "waiting_episodes": 0, "waiting_requests": 0, "open_conversations": 1,
            "offered": 2, "replies": 3, "rated": 1, "expired": 0, "withdrawn": 0, "failed": 0,
        }  # fmt: skip

    at(scenario)


def test_two_that_said_the_same_so_far_are_kept_apart() -> None:
    async def scenario(desk: Desk) -> None:
        for _ in range(4):
            desk.offer()
        same = [a("q")], a("q+r")
        (first, _), (second, _) = await desk.say(*same), await desk.say(*same)
        assert first is not second
        longer = [a("q"), a("q+r"), a("q+r+q")]
        one, two = await desk.ask(longer), await desk.ask(longer)
        assert {one.conversation, two.conversation} == {first, second}
        desk.answer(one, a("other"))
        desk.answer(two, a("other"))
        anna, _ = await desk.say([a("q")], a("q+r"), label="anna")
        bert, _ = await desk.say([a("q")], a("q+r"), label="bert")
        assert (await desk.ask(longer, "anna")).conversation is anna
        assert (await desk.ask(longer, "bert")).conversation is bert

    at(scenario)


def test_one_that_nobody_has_gone_on_with_comes_first() -> None:
    async def scenario(desk: Desk) -> None:
        desk.offer()
        desk.offer()
        for _ in range(2):
            await desk.say([a("q")], a("q+r"))
        longer = [a("q"), a("q+r"), a("q+r+q")]
        one, _ = await desk.say(longer, a("x"))
        two, _ = await desk.say(longer, a("y"))
        assert one is not two
        regenerated, _ = await desk.say(longer, a("z"))  # nobody is left, so somebody asks again
        assert regenerated in (one, two)

    at(scenario)


def test_a_request_waits_for_an_episode_and_is_told_to_come_again() -> None:
    async def scenario(desk: Desk) -> None:
        with pytest.raises(ApiError) as caught:
            await desk.ask([a("q")])
        assert (caught.value.status, caught.value.code) == (503, "no_episode")
        assert caught.value.retry_after
        waiting = asyncio.ensure_future(desk.ask([a("q")], patience=LONG))
        await asyncio.sleep(0)
        assert desk.books.metrics()["waiting_requests"] == 1
        offer = desk.offer()
        assert (await waiting).conversation.offer is offer
        assert desk.books.metrics()["waiting_requests"] == 0

    at(scenario)


def test_an_episode_handed_to_a_client_that_has_just_gone_is_for_the_next_one() -> None:
    async def scenario(desk: Desk) -> None:
        gone = asyncio.ensure_future(desk.ask([a("q")], patience=LONG))
        await asyncio.sleep(0)
        offer = desk.offer()
        gone.cancel()
        await asyncio.wait({gone})
        assert gone.cancelled()
        assert (await desk.ask([a("p")])).conversation.offer is offer

    at(scenario)


def test_a_reply_that_nobody_got_is_named_and_the_episode_is_free_again() -> None:
    async def scenario(desk: Desk) -> None:
        offer = desk.offer()
        desk.offer()
        lost = desk.answer(await desk.ask([a("q")]), a("q+r"), delivered=False)
        assert desk.refusal(lost) == (404, "unknown_id")
        conversation, kept = await desk.say([a("q")], a("q+r"))
        assert conversation.offer is offer  # before the others, since its client may ask again
        desk.books.rate([kept], 1.0)
        assert offer.outcome.result()["lost"] == ["chatcmpl-e:0"]

    at(scenario)


def test_a_rating_waits_for_a_generation_that_nobody_waits_for() -> None:
    async def scenario(desk: Desk) -> None:
        offer = desk.offer()
        _, said = await desk.say([a("q")], a("q+r"))
        asked = await desk.ask([a("q"), a("q+r"), a("q+r+q")])
        assert desk.refusal(said) == (409, "busy")
        asked.abandoned = True
        desk.books.rate([said], 1.0)
        assert not offer.outcome.done()
        assert desk.refusal(said) == (409, "already_rated")
        desk.answer(asked, a("x"), delivered=False)
        assert offer.outcome.result() == {**offer.outcome.result(), "reward": 1.0, "lost": ["chatcmpl-e:0"]}

    at(scenario)


def test_who_rates_a_reply_has_it_whatever_became_of_the_connection() -> None:
    async def scenario(desk: Desk) -> None:
        offer = desk.offer()
        asked = await desk.ask([a("q")])
        said = desk.books.replied(asked, "chatcmpl-e:0", [a("q+r")])  # on its way
        desk.books.rate([said], 1.0)
        asked.abandoned = True
        desk.books.settle(asked)
        assert (offer.outcome.result()["lost"], offer.outcome.result()["replies"]) == ([], 1)

    at(scenario)


def test_several_choices_that_nobody_got_end_the_conversation() -> None:
    async def scenario(desk: Desk) -> None:
        offer = desk.offer()
        asked = desk.books.begin(await desk.books.find([a("q")], "", 0.0), choices=2)
        desk.answer(asked, a("x"), a("y"), delivered=False)
        assert "several choices" in offer.outcome.result()["ended"]

    at(scenario)


def test_what_nobody_rates_ends_its_episode_and_cannot_be_rated_any_more() -> None:
    async def scenario(desk: Desk) -> None:
        offer, idle = desk.offer(rating=0.01), desk.offer(begin=0.01)
        _, said = await desk.say([a("q")], a("q+r"))
        assert "neither rated nor continued" in (await offer.outcome)["ended"]
        assert "no conversation started" in (await idle.outcome)["ended"]
        assert desk.refusal(said) == (410, "conversation_over")
        assert desk.books.metrics()["expired"] == 1
        assert desk.books.metrics()["waiting_episodes"] == 0

    at(scenario)


def test_an_episode_that_is_gone_takes_its_conversation_along() -> None:
    async def scenario(desk: Desk) -> None:
        offer = desk.offer()
        _, said = await desk.say([a("q")], a("q+r"))
        asked = await desk.ask([a("q"), a("q+r"), a("q+r+q")])
        desk.books.withdraw(offer)
        late = desk.answer(asked, a("x"))
        assert desk.refusal(said) == desk.refusal(late) == (410, "conversation_over")
        with pytest.raises(ApiError, match="no episode"):
            await desk.ask([a("q"), a("q+r"), a("q+r+q")])

    at(scenario)


def test_ratings_are_given_all_or_none() -> None:
    async def scenario(desk: Desk) -> None:
        offers = [desk.offer(), desk.offer()]
        (_, one), (_, two) = await desk.say([a("p")], a("p+r")), await desk.say([a("q")], a("q+r"))
        assert desk.refusal(one, "chatcmpl-never") == (404, "unknown_id")
        assert not any(offer.outcome.done() for offer in offers)
        assert len(desk.books.rate([one, two], -1.0)) == 2
        assert [offer.outcome.result()["reward"] for offer in offers] == [-1.0, -1.0]
        assert desk.refusal(two) == (409, "already_rated")

    at(scenario)


# ---------------------------------------------------------------------------------------------------------- history

TEXTS = st.text(alphabet="ab\n", max_size=3)
MESSAGES = st.lists(
    st.one_of(
        st.builds(lambda text: {"role": "user", "content": text}, TEXTS),
        st.builds(lambda text: {"role": "assistant", "content": text}, TEXTS),
        st.builds(lambda text, call: {"role": "tool", "content": text, "tool_call_id": call}, TEXTS, TEXTS),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.slow
@given(MESSAGES, MESSAGES)
def test_digests_are_equal_exactly_where_the_messages_are(one: list[Any], other: list[Any]) -> None:
    mine, theirs = digests(read_messages(one)), digests(read_messages(other))
    for n, m in [(n, m) for n in range(len(one)) for m in range(len(other))]:
        assert (mine[n] == theirs[m]) == (one[: n + 1] == other[: m + 1])


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}


@table(
    ("replied", "sent_back", "same"),
    [
        ({"content": "5", "refusal": None}, {"content": "5"}, True),
        ({"content": "5", "reasoning_content": "2 + 3"}, {"content": [{"type": "text", "text": "5"}]}, True),
        ({"content": None, "tool_calls": [CALL]}, {"content": "", "tool_calls": [{**CALL, "index": 0}]}, True),
        ({"content": "5"}, {"content": "6"}, False),
        ({"content": "5", "tool_calls": [CALL]}, {"content": "5"}, False),
        ({"content": "", "tool_calls": [CALL]}, {"content": "", "tool_calls": [{**CALL, "id": "c2"}]}, False),
    ],
)
def test_a_reply_is_known_again_as_client_libraries_send_it_back(replied: Any, sent_back: Any, same: bool) -> None:
    one, other = ({"role": "assistant", **message} for message in (replied, sent_back))
    assert (after(NOTHING_SAID, read_messages([one])[0]) == digests(read_messages([other]))[0]) is same


# ----------------------------------------------------------------------------------------------------------- config

EXPERIMENT = """
  rollout: {workflow: feedback, num_repeat: %s, feedback: {rating_timeout: 5}}
  task_reader: {type: conversations, conversations: {count: 3}}
  services: {feedback: {port: %s}}
  trainer_common: {algorithm: {loss: reinforce_plus_plus}}
"""


def test_groups_are_refused_where_every_episode_is_another_conversation(tmp_path: Any) -> None:
    everything = Capabilities(trains=True, honours=frozenset({"trainer_common"}))
    assert check_capabilities(fake_config(tmp_path, EXPERIMENT % (1, 0)), everything) == ()
    with pytest.raises(ConfigError, match=r"num_repeat is 4, but with the workflow feedback .*num_repeat: 1 and"):
        check_capabilities(fake_config(tmp_path, EXPERIMENT % (4, 0)), everything)


def test_a_service_has_a_section_of_its_own(tmp_path: Any) -> None:
    config = fake_config(tmp_path, EXPERIMENT % (1, 8123))
    assert config.section("service", "feedback").port == 8123
    (tmp_path / "again.yaml").write_text(config.dump_yaml())
    assert load_config(tmp_path / "again.yaml").section("service", "feedback").port == 8123
    with pytest.raises(ConfigError, match=r"astuner\.services\.feedback\.prot.*port"):
        fake_config(tmp_path, "  services: {feedback: {prot: 1}}")
    with pytest.raises(ConfigError, match=r"astuner\.services\.feedbak.*feedback"):
        fake_config(tmp_path, "  services: {feedbak: {port: 1}}")


def test_conversations_are_numbered_tasks_for_training_only() -> None:
    reader = ConversationsTaskReader(ConversationsConfig(count=3))
    check_task_reader(reader, splits=[Split.TRAIN])
    assert [task.task_id for task in reader.read(Split.TRAIN)] == [f"conversation-{n}" for n in range(3)]
    assert list(reader.read(Split.VALIDATION)) == []
