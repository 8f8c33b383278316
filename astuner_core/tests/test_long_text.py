"""Long texts: what cannot fit is refused by its beginning, the rest is tokenised exactly, and nobody waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner.chat.codec import ChatCodec
from astuner.chat.template import _UNSETTLED, LONG, fastest
from astuner.config.schema import AstunerSection
from astuner.contracts.errors import ContextOverflow, PromptTooLong, UnsupportedRequest
from astuner.contracts.types import SamplingParams
from astuner.rollout.model_tuner import ModelTuner
from astuner.rollout.models import one_model
from astuner.rollout.turns import EpisodeRecorder
from astuner.testing import FakeEngine, make_tokenizer, workflow_task
from tests.table import table

CONTEXT = 40_000
ASK = {"role": "user", "content": "What is 2 + 2?"}
RULE = "-" * 200
"""One token of `Heard`'s tokenizer."""


class Heard:
    """Episodes of one model, and what its tokenizer is asked, by which thread.

    :param meanwhile: called in between.
    :param tokens: more of the tokenizer.
    """

    def __init__(self, meanwhile: Callable[[str], object] = lambda text: None, *tokens: Any, **codec: Any) -> None:
        self.tokenizer = make_tokenizer(special_tokens=("<|im_start|>", "<|im_end|>"))
        self.tokenizer.add_tokens([RULE, *tokens])
        self.codec = ChatCodec(self.tokenizer, **codec)
        self.asked: list[tuple[int, threading.Thread]] = []
        encode = self.codec.template._encode

        def heard(text: str) -> list[int]:
            self.asked.append((len(text), threading.current_thread()))
            meanwhile(text)
            return encode(text)

        self.codec.template._encode = heard

    @property
    def characters(self) -> int:
        return sum(length for length, _ in self.asked)

    def tuner(self) -> ModelTuner:
        config: Any = SimpleNamespace(astuner=AstunerSection.model_validate({"model": {"path": "fake"}}))
        return ModelTuner(
            models=one_model(FakeEngine(lambda prompt: "four", self.tokenizer, max_model_len=CONTEXT), self.codec),
            recorder=EpisodeRecorder(),
            sampling=SamplingParams(max_tokens=10),
            config=config,
            workflow_task=workflow_task(),
        )

    def long_ones(self) -> list[tuple[int, threading.Thread]]:
        return [asked for asked in self.asked if asked[0] > 10_000]


@table(
    "messages",
    [
        [{"role": "user", "content": "A log.\n" * 500_000}],
        [{"role": "user", "content": [{"type": "text", "text": "A log.\n" * 500_000}]}],
        [{"role": "user", "content": "A log.\n" * 1_000}, {"role": "assistant", "content": "?"}] * 300 + [ASK],
        [{"role": "system", "content": "A log.\n" * 500_000}, ASK],
        [{"role": "user", "content": " " * 4_000_000}],
        [ASK, {"role": "assistant", "content": "A log.\n" * 500_000}, ASK],
        [ASK, {"role": "user", "content": "\ud83d" * 3_000_000}],
    ],
    ids=lambda value: f"{len(value)} messages",
)
def test_what_cannot_fit_costs_no_more_than_what_can(messages: list[Any]) -> None:
    heard = Heard()
    with pytest.raises(PromptTooLong, match=r"has more than \d+ tokens, but the context is 40000; raise astuner"):
        asyncio.run(heard.tuner().chat(messages))
    assert 0 < heard.characters <= 8 * CONTEXT
    assert threading.main_thread() not in {thread for _, thread in heard.long_ones()}


def test_long_descriptions_of_tools_are_measured_too() -> None:
    heard, parameters = Heard(), {"type": "object", "properties": {}}
    tool = {
        "type": "function",
        "function": {"name": "f", "description": "A log.\n" * 500_000, "parameters": parameters},
    }
    with pytest.raises(PromptTooLong, match="has more than"):
        asyncio.run(heard.tuner().chat([ASK], [tool]))
    assert 0 < heard.characters <= 8 * CONTEXT


def test_a_later_message_that_cannot_fit_ends_the_episode_as_an_overflow() -> None:
    heard, messages = Heard(), [ASK]

    async def work() -> ModelTuner:
        tuner = heard.tuner()
        messages.append((await tuner.chat(messages)).message)  # type: ignore[arg-type]
        before = heard.characters
        messages.append({"role": "user", "content": "A log.\n" * 500_000})
        with pytest.raises(ContextOverflow, match=r"raise astuner.rollout.max_model_len"):
            await tuner.chat(messages)
        assert heard.characters - before <= 8 * CONTEXT
        return tuner

    assert asyncio.run(work()).context_overflow


@table(
    "text",
    ["A log.\n" * 5_000, RULE * 35_000, "十二\n" * 5_500, f"A log.{' ' * 39_000}", f"{RULE * 9_000}A log.\n"],
    ids=lambda value: value[:300],
)
def test_what_fits_has_the_ids_that_it_always_had(text: str) -> None:
    heard, messages = Heard(), [{"role": "user", "content": text}]
    expected = heard.codec.conversation().encode(messages).prompt_ids
    assert len(expected) < CONTEXT
    heard.asked.clear()
    heard = Heard()  # one that remembers nothing

    async def work() -> Any:
        reply = await heard.tuner().chat(messages)
        return list(reply.turn.generation.prompt_ids)  # type: ignore[union-attr]

    assert asyncio.run(work()) == expected
    assert heard.long_ones()
    assert threading.main_thread() not in {thread for _, thread in heard.long_ones()}


def test_white_space_that_the_template_strips_does_not_count() -> None:
    plain, template = "(message.content or '')", make_tokenizer().chat_template
    assert plain in template
    heard = Heard(chat_template=template.replace(plain, "(message.content | trim)"))
    text = " " * 500_000 + "A log." + "\n" * 500_000
    reply = asyncio.run(heard.tuner().chat([{"role": "user", "content": text}]))
    assert reply.prompt_tokens < 100


def test_white_space_that_a_token_swallows_does_not_count() -> None:
    from tokenizers import AddedToken

    heard = Heard(lambda text: None, AddedToken("<end>", lstrip=True))
    messages = [{"role": "system", "content": " " * 500_000 + "<end>"}, {"role": "user", "content": "A log."}]
    assert asyncio.run(heard.tuner().chat(messages)).prompt_tokens < 100


def test_a_tokenizer_that_panics_ends_the_episode_and_nothing_else() -> None:
    class PanicException(BaseException):
        """As Rust's."""

    class Panics:
        truncation = padding = None

        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            if "boom" in texts[0]:
                raise PanicException("retry-limit-in-match over")
            return backend.encode_batch_fast(texts, **options)

        decode = staticmethod(lambda *ids, **options: backend.decode(*ids, **options))

    class Panicking:
        def __getattr__(self, name: str) -> Any:
            return Panics() if name == "backend_tokenizer" else getattr(tokenizer, name)

    tokenizer = make_tokenizer()
    backend = tokenizer.backend_tokenizer
    encode, _ = fastest(Panicking())
    assert encode("all is well") == tokenizer.encode("all is well")
    with pytest.raises(UnsupportedRequest, match="a text of 4 characters: retry-limit"):
        encode("boom")


def test_other_episodes_go_on_while_a_long_text_is_tokenised() -> None:
    goes_on, begun = threading.Event(), threading.Event()

    def wait(text: str) -> None:
        if len(text) > LONG:
            begun.set()
            assert goes_on.wait(60)

    heard = Heard(wait)

    async def work() -> None:
        long = asyncio.ensure_future(heard.tuner().chat([{"role": "user", "content": "A log.\n" * 5_000}]))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        other, messages = heard.tuner(), [ASK]
        for _ in range(3):
            reply = await other.chat(messages)
            messages += [reply.message, ASK]  # type: ignore[list-item]
        assert not long.done()
        goes_on.set()
        assert (await long).text == "four"

    asyncio.run(work())


def test_a_group_that_begins_with_the_same_long_text_has_it_tokenised_once() -> None:
    heard = Heard()

    async def work() -> None:
        messages = [{"role": "user", "content": "A log.\n" * 5_000}]
        await asyncio.gather(*(heard.tuner().chat(messages) for _ in range(8)))

    asyncio.run(work())
    assert len(heard.long_ones()) == 1


@cache
def _trained() -> dict[str, Any]:
    """Tokenizers of several kinds, with longer pieces than one byte."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    texts = [f"def number_{n}(these, others):\n    return these + others * {n}  # the sum\n\n\n" for n in range(200)]
    bytes_, no_words = pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.ByteLevel(use_regex=False)
    kinds = {
        "words of bytes": (models.BPE(), bytes_, trainers.BpeTrainer(vocab_size=600, show_progress=False)),
        "bytes": (models.BPE(), no_words, trainers.BpeTrainer(vocab_size=600, show_progress=False)),
        "long words unknown": (
            models.WordPiece(unk_token="?"),  # type: ignore[call-arg]
            pre_tokenizers.Whitespace(),
            trainers.WordPieceTrainer(vocab_size=300, show_progress=False, special_tokens=["?"]),
        ),
    }
    made = {}
    for name, (model, pieces, trainer) in kinds.items():
        made[name] = tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pieces  # type: ignore[assignment]
        tokenizer.train_from_iterator(texts, trainer)
    return made


PIECES = st.sampled_from(
    ["return these", " ", "\n\n", "    ", "aaaa", "the", "sum", "=" * 9, "é", "十", "12"]
) | st.text(max_size=5)
TEXTS = st.builds(lambda piece, n, rest: piece * n + "".join(rest), PIECES, st.integers(0, 300), st.lists(PIECES))


@given(TEXTS.map(lambda text: text.encode("utf-8", "ignore").decode()), TEXTS)
def test_what_follows_a_text_changes_no_more_than_its_last_tokens(text: str, rest: str) -> None:
    rest = rest.encode("utf-8", "ignore").decode()
    for name, tokenizer in _trained().items():
        beginning, whole = (len(tokenizer.encode(each).ids) for each in (text, text + rest))
        assert beginning - whole <= _UNSETTLED // 2, name
