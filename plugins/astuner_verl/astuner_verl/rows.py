"""Convert samples to the rows of VERL's TransferQueue.

A row is a sample split at its first trained token: everything before it is VERL's prompt, the rest is the response,
masked where the model did not generate.  Nothing is padded.  Invariant: prompt + response equal the sample's
``input_ids``, and the ones of the mask are its trained tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from astuner.contracts.errors import RunError
from astuner.contracts.types import Sample
from astuner_ray.training.before_update import ROW, row_id


def as_output(sample: Sample) -> AgentLoopOutput:
    """Return a sample in the format of VERL's agent loops.

    :raises ValueError: The sample has no trained tokens.
    """
    start = list(sample.loss_mask).index(1)
    return _output(
        list(sample.input_ids[:start]),
        list(sample.input_ids[start:]),
        mask=list(sample.loss_mask[start:]),
        logprobs=list(sample.logprobs[start:]),
        reward=sample.reward,
        version=sample.policy_version,
    )


def nothing(token: int, version: int) -> AgentLoopOutput:
    """Return a row without trained tokens, for a step with nothing to train: VERL rejects an empty batch."""
    return _output([token], [token], mask=[0], logprobs=[0.0], reward=0.0, version=version)


def _output(
    prompt: list[int], response: list[int], *, mask: list[int], logprobs: list[float], reward: float, version: int
) -> AgentLoopOutput:
    return AgentLoopOutput(
        prompt_ids=prompt,
        response_ids=response,
        response_mask=mask,
        response_logprobs=logprobs,
        reward_score=reward,
        num_turns=sum(1 for before, here in zip((0, *mask), mask, strict=False) if here and not before),
        metrics=AgentLoopMetrics(),
        extra_fields={"min_global_steps": version, "max_global_steps": version, "reward_extra_info": {}},
    )


def publish(
    outputs: Sequence[AgentLoopOutput], *, partition: str, step: int, token_weights: Sequence[float]
) -> KVBatchMeta:
    """Put rows into the queue.

    A row's ``uid`` is its index in ``outputs``: `handlers.advantages` finds its sample by it after VERL has reordered
    the batch for its workers. The index is also in `ROW`, for the workers themselves.

    :param token_weights: Weight of each row; see `Sample.token_weight`.
    """
    keys, fields, tags = [], [], []
    for i, (output, weight) in enumerate(zip(outputs, token_weights, strict=True)):
        row: dict[str, Any] = output.as_dict()
        row.pop("metrics")
        row["loss_mask"] = row["response_mask"]
        row["input_ids"] = torch.cat([row["prompts"], row["responses"]])
        row["position_ids"] = torch.arange(len(row["input_ids"]))
        row["multi_modal_inputs"] = {}
        row["uid"] = str(i)
        row["data_source"] = "astuner"
        row["token_weight"] = torch.tensor(weight, dtype=torch.float32)
        row[ROW] = torch.tensor(row_id(step, i), dtype=torch.int64)
        fields.append(row)
        keys.append(f"s{step}_{i}_0")
        tags.append(
            {
                "status": "success",
                "prompt_len": len(row["prompts"]),
                "response_len": len(row["responses"]),
                "seq_len": len(row["input_ids"]),
                "global_steps": step,
                "min_global_steps": output.extra_fields["min_global_steps"],
                "max_global_steps": output.extra_fields["max_global_steps"],
            }
        )
    tq.kv_batch_put(keys=keys, partition_id=partition, fields=list_of_dict_to_tensordict(fields), tags=tags)
    return KVBatchMeta(partition_id=partition, keys=keys, tags=tags)


def check_free() -> None:
    """Check that no other run uses the queue of this Ray cluster, which has only one.

    :raises RunError: Another run uses it.
    """
    try:
        ray.get_actor("TransferQueueController", namespace="transfer_queue")
    except ValueError:  # raised by Ray if there is no such actor
        return
    raise RunError(
        "another verl run uses this Ray cluster, and their data would mix. Wait until it ends, or unset RAY_ADDRESS "
        "and omit --with-ray to use a private Ray instance"
    )


def forget() -> None:
    """Clear leftover rows when a run resumes, because they were trained on; tickets stay."""
    for partition, found in (tq.kv_list() or {}).items():
        if rows := [key for key, tag in found.items() if not tag.get("is_prompt")]:
            tq.kv_clear(keys=rows, partition_id=partition)
