"""How new weights reach rollout servers that share no process with the trainer, where there is no NCCL.

VERL's mode ``separate_async`` has a `CheckpointEngine` in each worker of the trainer and one beside each rollout
server.  For every update VERL calls in all of them: ``prepare``, ``init_process_group``, then ``send_weights`` here
and ``receive_weights`` there, and ``finalize``.  In this one the trainer's first worker opens a meeting point, those
who send or receive meet there as a gloo group of their own, and one tensor after the other is broadcast: a header
(JSON: name, shape, dtype), then its bytes.

Invariant: what arrives is, bit for bit and in its order, what was sent; nothing outlives an update, so that servers
may come and go between two of them.
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
"""What ``actor_rollout_ref.rollout.checkpoint_engine.backend`` calls it."""
_distributed: Any = torch.distributed
"""Torch's stubs lack `TCPStore`, and `broadcast` of a `ProcessGroupGloo`."""
PATIENCE = timedelta(minutes=5)
"""How long one waits for the others, at the meeting point and for each tensor."""


Meeting = tuple[str, int]
"""Host and port where those who send or receive find each other: a `TCPStore` of the trainer's first worker."""


@CheckpointEngineRegistry.register(BACKEND)
class GlooCheckpointEngine(CheckpointEngine):
    """One end of the way; VERL makes one per worker, and calls its methods in the order above."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        """
        :param bucket_size: VERL passes it; there are no buckets here, a tensor travels as a whole.
        :param is_master: whether this is the trainer's first worker, from whom the weights come.
        """
        self._is_master = is_master
        self._store: Any = None
        self._group: Any = None

    def prepare(self) -> Meeting | None:
        """The meeting point, from the trainer's first worker; None from all others."""
        if not self._is_master:
            return None
        host = ray.util.get_node_ip_address()
        self._store = _distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
        return host, self._store.port

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[Meeting | None]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """The arguments of `init_process_group`, for each of the trainer's workers and each beside a server.

        Only the first of the trainer's sends, for it has gathered every tensor; the others' rank is -1.

        :param metadata: what `prepare` returned, the trainer's first worker's first.
        """
        world = 1 + rollout_world_size

        def arguments(ranks: list[int]) -> dict[str, list[Any]]:
            return {"rank": ranks, "world_size": [world] * len(ranks), "meeting": [metadata[0]] * len(ranks)}

        return arguments([0] + [-1] * (actor_wg_world_size - 1)), arguments(list(range(1, world)))

    def init_process_group(self, rank: int, world_size: int, meeting: Meeting) -> None:
        """Meet the others; returns when all are there.

        :param rank: 0 sends, those above receive, -1 takes no part.
        """
        if rank < 0:
            return
        store = self._store or _distributed.TCPStore(*meeting, is_master=False, timeout=PATIENCE)
        self._group = _distributed.ProcessGroupGloo(store, rank, world_size, PATIENCE)

    def finalize(self) -> None:
        """Leave the group and close the meeting point."""
        self._group = self._store = None

    async def send_weights(self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None) -> None:
        """Send all of ``weights``.

        Every worker of the trainer goes through them, since each is gathered from all workers as it is taken.
        """
        try:
            async for name, tensor in ensure_async_iterator(weights):
                if self._group is not None:
                    await asyncio.to_thread(_send, self._group, name, tensor.detach())
            if self._group is not None:
                await asyncio.to_thread(_send_header, self._group, {})  # the end
        except BaseException:
            self.finalize()  # so that those who receive see the end of the connection, instead of waiting for more
            raise

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, Tensor], None]:
        """The weights as they arrive, on the CPU; each tensor is the receiver's own.

        :raises RuntimeError: the sender is gone before it has sent all.
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
    """The next tensor and its name; None after the last one."""
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
