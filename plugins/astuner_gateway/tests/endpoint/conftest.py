"""An episode whose model is served over HTTP, for as long as one scenario takes."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from astuner import ModelTuner
from astuner.chat.codec import ChatCodec
from astuner.contracts.types import SamplingParams, Split
from astuner.rollout.models import one_model
from astuner.rollout.turns import EpisodeRecorder
from astuner.testing import FakeEngine, fake_config, make_tokenizer, workflow_task
from astuner_gateway.endpoint import Access, Endpoint

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


@dataclass
class Served:
    """One episode that is running."""

    tuner: ModelTuner
    engine: FakeEngine
    recorder: EpisodeRecorder
    endpoint: Endpoint
    access: Access
    session: aiohttp.ClientSession

    async def post(self, route: str, body: Any, **headers: str) -> tuple[int, Any]:
        """The status and the body, read as JSON, of a plain request; ``body`` may be bytes."""
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        sent = {
            "Authorization": f"Bearer {self.access.api_key}",
            **{k.replace("_", "-"): v for k, v in headers.items()},
        }
        async with self.session.post(self.access.anthropic_base_url + route, data=data, headers=sent) as response:
            return response.status, await response.json()

    async def stream(self, route: str, body: Any) -> str:
        """The raw text of a stream."""
        headers = {"Authorization": f"Bearer {self.access.api_key}"}
        url = self.access.anthropic_base_url + route
        async with self.session.post(url, json={**body, "stream": True}, headers=headers) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            return await response.text()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="session")
def codec(tokenizer: Any) -> ChatCodec:
    return ChatCodec(tokenizer)


@pytest.fixture(scope="session")
def thinking(tokenizer: Any) -> ChatCodec:
    """A codec for a model that marks its reasoning."""
    plain = "{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}"
    with_reasoning = (
        "{{- '<|im_start|>' + message.role + '\\n' -}}{%- if message.reasoning_content -%}"
        "{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}{%- endif -%}"
        "{{- message.content or '' -}}"
    )
    assert plain in tokenizer.chat_template
    return ChatCodec(tokenizer, chat_template=tokenizer.chat_template.replace(plain, with_reasoning))


@pytest.fixture
def play(codec: ChatCodec, tokenizer: Any, tmp_path: Any) -> Any:
    """Run ``scenario(served)`` in an episode, in validation unless told otherwise, and return what it returns."""

    spoken = codec

    def play(
        scenario: Callable[[Served], Awaitable[Any]],
        replies: Any = lambda prompt: "four",
        *,
        engine: Any = None,
        codec: ChatCodec = spoken,
        split: Split = Split.VALIDATION,
        settings: str = "",
        max_model_len: int = 100_000,
        **options: Any,
    ) -> Any:
        async def main() -> Any:
            recorder = EpisodeRecorder()
            speaking = engine or FakeEngine(replies, tokenizer, max_model_len=max_model_len)
            tuner = ModelTuner(
                models=one_model(speaking, codec),
                recorder=recorder,
                sampling=SamplingParams(max_tokens=5000),
                config=fake_config(tmp_path, settings),
                workflow_task=workflow_task(split=split),
            )
            endpoint = Endpoint(**{"grace": 0.3, **options})
            endpoint.open(asyncio.get_running_loop())
            try:
                async with aiohttp.ClientSession() as session:
                    access = endpoint.issue(tuner, "default")
                    return await scenario(Served(tuner, speaking, recorder, endpoint, access, session))
            finally:
                tuner.close()
                endpoint.revoke(tuner)
                await endpoint.close()

        return asyncio.run(main())

    return play
