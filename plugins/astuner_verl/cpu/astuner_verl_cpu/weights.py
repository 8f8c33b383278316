"""Send new weights over gloo to rollout servers that share no process with the trainer.

In VERL's mode ``separate_async``, each worker of the trainer and each rollout server has a `CheckpointEngine`.  For
every update VERL calls in all of them: ``prepare``, ``init_process_group``, then ``send_weights`` in the trainer and
``receive_weights`` at the servers, and ``finalize``.  Here the trainer's first worker opens a meeting point, senders
and receivers form a gloo group, and tensors are broadcast one by one: a header (JSON: name, shape, dtype), then bytes.

Invariant: tensors arrive bit-exact and in the order in which they were sent; nothing outlives an update, so servers may
come and go between updates.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed
from torch import Tensor
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

BACKEND = "gloo"
"""Value of ``actor_rollout_ref.rollout.checkpoint_engine.backend`` for this engine."""
_distributed: Any = torch.distributed
"""Untyped alias: torch's stubs lack `TCPStore`, and `broadcast` of a `ProcessGroupGloo`."""
PATIENCE = timedelta(minutes=5)
"""Timeout at the meeting point and for each tensor."""


Meeting = tuple[str, int]
"""Host and port where senders and receivers meet: a `TCPStore` of the trainer's first worker."""


@CheckpointEngineRegistry.register(BACKEND)
class GlooCheckpointEngine(CheckpointEngine):
    """One endpoint of the transfer; VERL creates one per worker and calls its methods in the order above."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        """Create an endpoint.

        :param bucket_size: Passed by VERL and ignored; every tensor is sent in one piece.
        :param is_master: Whether this is the trainer's first worker, which sends the weights.
        """
        self._is_master = is_master
        self._store: Any = None
        self._group: Any = None

    def prepare(self) -> Meeting | None:
        """Return the meeting point from the trainer's first worker, and None from all others."""
        if not self._is_master:
            return None
        host = ray.util.get_node_ip_address()
        self._store = _distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
        return host, self._store.port

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[Meeting | None]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of `init_process_group` for the trainer's workers and for the servers.

        Only the trainer's first worker sends, because it has gathered every tensor; the others have rank -1.

        :param metadata: Results of `prepare`, starting with the trainer's first worker.
        """
        world = 1 + rollout_world_size

        def arguments(ranks: list[int]) -> dict[str, list[Any]]:
            return {"rank": ranks, "world_size": [world] * len(ranks), "meeting": [metadata[0]] * len(ranks)}

        return arguments([0] + [-1] * (actor_wg_world_size - 1)), arguments(list(range(1, world)))

    def init_process_group(self, rank: int, world_size: int, meeting: Meeting) -> None:
        """Join the group; returns when all members have joined.

        :param rank: 0 sends, higher ranks receive, -1 does not participate.
        """
        if rank < 0:
            return
        store = self._store or _distributed.TCPStore(*meeting, is_master=False, timeout=PATIENCE)
        self._group = _distributed.ProcessGroupGloo(store, rank, world_size, PATIENCE)

    def finalize(self) -> None:
        """Leave the group and close the meeting point."""
        self._group = self._store = None

    async def send_weights(self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None) -> None:
        """Send all ``weights``.

        Every worker of the trainer iterates over them, because each tensor is gathered from all workers.
        """
        try:
            async for name, tensor in ensure_async_iterator(weights):
                if self._group is not None:
                    await asyncio.to_thread(_send, self._group, name, tensor.detach())
            if self._group is not None:
                await asyncio.to_thread(_send_header, self._group, {})  # the end
        except BaseException:
            self.finalize()  # close the connection, so that receivers fail instead of waiting for more
            raise

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, Tensor], None]:
        """Yield the weights on the CPU as they arrive; each tensor belongs to the receiver.

        :raises RuntimeError: The sender ended before it sent all weights.
        """
        assert self._group is not None  # VERL has called `init_process_group`
        while (arrived := await asyncio.to_thread(_receive, self._group)) is not None:
            yield arrived


def _send(group: Any, name: str, tensor: Tensor) -> None:
    header = {"name": name, "shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
    _send_header(group, header)
    if tensor.numel():
        group.broadcast(tensor.cpu().contiguous().reshape(-1).view(torch.uint8), 0).wait()


def _send_header(group: Any, header: Mapping[str, Any]) -> None:
    text = torch.frombuffer(bytearray(json.dumps(header), "utf-8"), dtype=torch.uint8)
    group.broadcast(torch.tensor([len(text)]), 0).wait()
    group.broadcast(text, 0).wait()


def _receive(group: Any) -> tuple[str, Tensor] | None:
    """Return the next tensor and its name, or None after the last one."""
    length = torch.zeros(1, dtype=torch.int64)
    group.broadcast(length, 0).wait()
    text = torch.empty(int(length), dtype=torch.uint8)
    group.broadcast(text, 0).wait()
    header = json.loads(bytes(text.tolist()))
    if not header:
        return None
    tensor = torch.empty(header["shape"], dtype=getattr(torch, header["dtype"]))
    if tensor.numel():
        group.broadcast(tensor.reshape(-1).view(torch.uint8), 0).wait()
    return header["name"], tensor
