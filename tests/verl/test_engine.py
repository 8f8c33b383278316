"""Tokens through VERL's client as every engine gives them, and samples as VERL's rows have them; without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from verl.workers.rollout.replica import TokenOutput

from astuner.contracts.errors import ContextOverflow, ModelFailed
from astuner.contracts.types import FinishReason, Generation, Sample, SamplingParams
from astuner_verl.engine import VerlEngine
from astuner_verl.rows import as_output

END = 9
SAMPLING = SamplingParams(max_tokens=4, temperature=0.7, top_p=0.9, top_k=5, stop_token_ids=(END,), seed=3)


class Client:
    """VERL's client, with an answer that is written down here."""

    def __init__(self, ids: Sequence[int], *, stop_reason: str = "completed", logprobs: Any = "one each") -> None:
        self.asked: list[dict[str, Any]] = []
        self._output = TokenOutput(
            token_ids=list(ids),
            log_probs=[-0.5] * len(ids) if logprobs == "one each" else logprobs,
            stop_reason=stop_reason,
            extra_fields={"global_steps": 8, "min_global_steps": 7, "max_global_steps": 8},
        )

    async def generate(self, **asked: Any) -> TokenOutput:
        self.asked.append(asked)
        return self._output


def generate(client: Any, prompt: Sequence[int] = (1, 2), sampling: SamplingParams = SAMPLING) -> Generation:
    engine = VerlEngine(client, max_model_len=5)
    return asyncio.run(engine.generate(prompt, sampling, session="episode/agent"))


def test_the_client_is_asked_for_what_was_wanted_and_no_more_than_there_is_room_for() -> None:
    client = Client([3, END])
    generate(client)
    assert client.asked == [
        {
            "request_id": "episode/agent",  # the same for all turns of an agent: they go to one server
            "prompt_ids": [1, 2],
            "sampling_params": {
                "temperature": 0.7,
                "top_p": 0.9,
                "top_k": 5,
                "max_tokens": 3,
                "stop_token_ids": [END],
                "logprobs": True,
                "seed": 3,
            },
        }
    ]


@pytest.mark.parametrize(
    ("ids", "stop_reason", "finish"),
    [
        ([3, END], "completed", FinishReason.STOP),
        ([3, 4, END], "length", FinishReason.STOP),
        ([3, 4, 5], "completed", FinishReason.LENGTH),  # VERL says "completed" of both
        ([3], "aborted", FinishReason.CANCELLED),
        ([], "aborted", FinishReason.CANCELLED),
    ],
)
def test_how_a_generation_ended(ids: list[int], stop_reason: str, finish: FinishReason) -> None:
    made = generate(Client(ids, stop_reason=stop_reason))
    assert (made.finish_reason, list(made.response_ids), list(made.prompt_ids)) == (finish, ids, [1, 2])
    assert made.policy_version == 7, "of the weights that its first token was drawn with"


def test_a_prompt_without_room_never_reaches_the_server() -> None:
    client = Client([3])
    with pytest.raises(ContextOverflow, match="a prompt of 5 tokens leaves no room in a context of 5"):
        generate(client, prompt=range(5))
    assert client.asked == []


@pytest.mark.parametrize("logprobs", [None, [-0.5]])
def test_tokens_without_a_logprob_each_are_refused(logprobs: Any) -> None:
    with pytest.raises(ModelFailed, match=r"2 tokens but [01] log-probabilities"):
        generate(Client([3, END], logprobs=logprobs))


def test_a_server_that_fails_is_a_failure_of_the_model() -> None:
    class Broken:
        async def generate(self, **asked: Any) -> TokenOutput:
            raise RuntimeError("traceback of the worker\nValueError: out of blocks")

    with pytest.raises(ModelFailed, match="RuntimeError: ValueError: out of blocks"):
        generate(Broken())


def test_a_sample_is_cut_at_its_first_trained_token() -> None:
    sample = Sample(
        episode_id="g0-0",
        group_id="g0",
        agent="a",
        input_ids=[1, 2, 3, 4, 5, 6],
        loss_mask=[0, 0, 1, 0, 1, 1],
        logprobs=[0.0, 0.0, -0.1, 0.0, -0.2, -0.3],
        policy_version=3,
        reward=0.5,
    )
    row = as_output(sample).as_dict()
    assert [row[name].tolist() for name in ("prompts", "responses", "response_mask")] == [
        [1, 2],
        [3, 4, 5, 6],
        [1, 0, 1, 1],
    ]
    assert row["rollout_log_probs"].tolist() == pytest.approx([-0.1, 0.0, -0.2, -0.3])
    assert row["rm_scores"].tolist() == [0, 0, 0, 0.5]
    assert (row["num_turns"], row["extra_fields"]["min_global_steps"]) == (2, 3)
