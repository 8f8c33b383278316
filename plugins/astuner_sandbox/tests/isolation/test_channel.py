"""Framed JSON over a socket: what goes in comes out, however it is cut, and nothing hostile is believed."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner_sandbox.isolation.channel import Channel, encode_message, read_message
from tests.table import table

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    one, other = map(Channel, socket.socketpair())
    yield one, other
    one.close()
    other.close()


@given(st.lists(JSON, max_size=4), st.integers(1, 7))
def test_what_is_sent_arrives_in_order_however_it_is_cut(messages, cut) -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    stream = b"".join(map(encode_message, messages))

    def send() -> None:
        for start in range(0, len(stream), cut):
            ours.sendall(stream[start : start + cut])
        ours.close()

    sender = threading.Thread(target=send)
    sender.start()
    arrived = [channel.recv() for _ in messages]
    with pytest.raises(EOFError):
        channel.recv()
    sender.join()
    channel.close()
    assert arrived == messages


@given(JSON)
def test_asyncio_reads_the_same(message) -> None:
    async def read() -> object:
        reader = asyncio.StreamReader()
        reader.feed_data(encode_message(message))
        reader.feed_eof()
        arrived = await read_message(reader)
        with pytest.raises(EOFError):
            await read_message(reader)
        return arrived

    assert asyncio.run(read()) == message


def test_more_than_a_socket_holds_is_sent_while_the_peer_reads(ends) -> None:
    one, other = ends
    text = "x" * (4 << 20)
    sender = threading.Thread(target=one.send, args=(text,))
    sender.start()
    assert other.recv(30) == text
    sender.join()


def test_waiting_ends_at_the_timeout_and_can_be_taken_up_again(ends) -> None:
    one, other = ends
    whole = encode_message("late")
    one._sock.sendall(whole[:6])
    with pytest.raises(TimeoutError):
        other.recv(0.01)
    one._sock.sendall(whole[6:])
    assert other.recv(10) == "late"


def test_a_peer_that_does_not_read_is_a_timeout(ends) -> None:
    with pytest.raises(TimeoutError):
        ends[0].send("x" * (8 << 20), timeout=0.01)


def test_a_peer_that_is_gone_is_an_eof_both_ways(ends) -> None:
    one, other = ends
    one._sock.sendall(encode_message("cut off")[:5])
    one.close()
    with pytest.raises(EOFError):
        other.recv()
    with pytest.raises(EOFError):
        other.send("x" * (8 << 20))


@table(
    "wire",
    [
        struct.pack(">I", 0xFFFFFFFF),  # 4 GiB are announced; nothing is kept for them
        struct.pack(">I", 3) + b"nul",
        struct.pack(">I", 2) + b"\xff\xfe",
        struct.pack(">I", 0),
        struct.pack(">I", 100_000) + b"[" * 100_000,
        struct.pack(">I", 10_000) + b"9" * 10_000,
    ],
)
def test_what_is_no_message_is_a_value_error(ends, wire) -> None:
    one, other = ends
    one._sock.sendall(wire)
    with pytest.raises(ValueError):  # noqa: PT011 - json and this module say it differently
        other.recv(10)

    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(wire)
        await read_message(reader)

    with pytest.raises(ValueError):  # noqa: PT011
        asyncio.run(read())


def test_what_is_too_long_or_no_json_is_not_sent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(ours, max_bytes=10)
        with pytest.raises(ValueError, match="limit of 10"):
            channel.send("x" * 20)
        with pytest.raises(TypeError):
            channel.send(object())
        channel.send("short")
        assert Channel(theirs).recv(10) == "short"


def test_an_open_file_is_passed_with_its_message(tmp_path) -> None:
    ours, theirs = socket.socketpair()
    one, other = Channel(ours), Channel(theirs, descriptors=True)
    (tmp_path / "a").write_text("inside")
    with (tmp_path / "a").open() as f:
        one.send("first")
        one.send("second", descriptors=[f.fileno()])
    assert other.recv(10) == "first"
    assert not other.received
    assert other.recv(10) == "second"
    with os.fdopen(other.received.popleft()) as passed:
        assert passed.read() == "inside"
        assert not os.get_inheritable(passed.fileno())
    one.close()
    other.close()


def test_open_files_nobody_asked_for_are_dropped(ends, tmp_path) -> None:
    one, other = ends
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with (tmp_path / "a").open("w") as f:
        one.send("take this", descriptors=[f.fileno()])
    assert other.recv(10) == "take this"
    assert not other.received
    assert (len(os.listdir("/proc/self/fd")) if before else 0) == before


def test_the_wire_is_plain(ends) -> None:
    one, other = ends
    one.send({"ö": 1})
    size, body = struct.unpack(">I", other._sock.recv(4))[0], other._sock.recv(100)
    assert (size, json.loads(body)) == (len(body), {"ö": 1})


class Counted(socket.socket):
    """Counts how often it is read."""

    reads = 0

    def recv(self, *args) -> bytes:
        self.reads += 1
        return super().recv(*args)


def test_messages_that_are_there_are_read_at_once() -> None:
    ours, theirs = socket.socketpair()
    counted = Counted(fileno=theirs.detach())
    ours.sendall(b"".join(map(encode_message, ["one", "two", "x" * 1000])))
    channel = Channel(counted)
    assert [channel.recv(5), channel.recv(5), channel.recv(5)] == ["one", "two", "x" * 1000]
    assert counted.reads == 1
    ours.close()
    channel.close()


def test_shutdown_ends_the_wait_of_both_ends(ends) -> None:
    one, other = ends
    seen: list[str] = []

    def wait() -> None:
        try:
            one.recv()
        except EOFError:
            seen.append("end")

    waiting = threading.Thread(target=wait)
    waiting.start()
    one.shutdown()
    waiting.join(20)
    assert seen == ["end"]
    with pytest.raises(EOFError):
        other.recv(5)
    one.close()
    one.shutdown()  # harmless
