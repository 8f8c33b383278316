"""The way of the weights in `separate_async`, where there is no NCCL: three ends of it in one process, without Ray."""

import asyncio

import torch
from verl.checkpoint_engine import CheckpointEngineRegistry

from astuner_verl_cpu import weights
from astuner_verl_cpu.weights import BACKEND, GlooCheckpointEngine

SENT = {
    "matrix": torch.arange(6, dtype=torch.float32).reshape(2, 3) / 7,
    "turned": torch.arange(6, dtype=torch.float32).reshape(2, 3).T,
    "half": torch.tensor([1.5, -2.25, float("inf")], dtype=torch.bfloat16),
    "whole": torch.tensor([[1, -(2**40)]]),
    "one": torch.tensor(3.0, dtype=torch.float64),
    "trained": torch.nn.Parameter(torch.ones(3)),
    "none": torch.empty(0, 4, dtype=torch.float16),
}
TRAINERS, SERVERS = 2, 2


def ends():
    """Two workers of the trainer and two beside servers."""
    made = CheckpointEngineRegistry.get(BACKEND)
    assert made is GlooCheckpointEngine
    return [made(bucket_size=1, is_master=i == 0) for i in range(TRAINERS + SERVERS)]


async def met(engines):
    """Do what VERL does before an update, in VERL's order."""
    metadata = [engine.prepare() for engine in engines]
    senders, receivers = GlooCheckpointEngine.build_topology(TRAINERS, SERVERS, metadata)
    arguments = [
        {key: of[key][i] for key in of} for of, n in ((senders, TRAINERS), (receivers, SERVERS)) for i in range(n)
    ]
    await asyncio.gather(
        *(asyncio.to_thread(e.init_process_group, **kw) for e, kw in zip(engines, arguments, strict=True))
    )


async def received(engine):
    return [(name, tensor) async for name, tensor in engine.receive_weights(global_steps=1)]


async def update(engines, sent):
    await met(engines)
    gone_through = [iter(sent.items()) for _ in range(TRAINERS)]
    *_, one, other = await asyncio.gather(
        *(engine.send_weights(w, global_steps=1) for engine, w in zip(engines, gone_through, strict=False)),
        *(received(engine) for engine in engines[TRAINERS:]),
    )
    for engine in engines:
        engine.finalize()
    assert all(next(w, None) is None for w in gone_through), "every worker of the trainer goes through the weights"
    return one, other


def test_what_arrives_is_what_was_sent_bit_for_bit_and_again_at_the_next_update():
    engines = ends()
    for sent in (SENT, {name: -tensor.detach() for name, tensor in SENT.items()}):
        for arrived in asyncio.run(update(engines, sent)):
            assert [name for name, _ in arrived] == list(sent)
            for name, tensor in arrived:
                assert (tensor.dtype, tensor.shape) == (sent[name].dtype, sent[name].shape), name
                assert torch.equal(tensor, sent[name]), name


def test_a_server_that_has_come_later_is_there_at_the_next_update():
    engines = ends()
    asyncio.run(update(engines, SENT))
    engines[-1] = GlooCheckpointEngine(bucket_size=1)
    assert [len(arrived) for arrived in asyncio.run(update(engines, SENT))] == [len(SENT)] * 2


def test_those_who_receive_hear_of_a_sender_that_fails(monkeypatch):
    monkeypatch.setattr(weights, "PATIENCE", weights.timedelta(seconds=30))

    def failing():
        yield "matrix", SENT["matrix"]
        raise ZeroDivisionError

    async def fails(engines):
        await met(engines)
        return await asyncio.gather(
            engines[0].send_weights(failing()), *(received(e) for e in engines[TRAINERS:]), return_exceptions=True
        )

    sent, *heard = asyncio.run(fails(ends()))
    assert isinstance(sent, ZeroDivisionError)
    assert all(isinstance(error, RuntimeError) for error in heard), heard
