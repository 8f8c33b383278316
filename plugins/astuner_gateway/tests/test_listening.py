"""What all servers of ours share: a port, who can reach it, and a body that is safe to work on."""

from __future__ import annotations

import json
import logging
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner.contracts.errors import ConfigError
from astuner_gateway.listening import bind, is_loopback, is_own_name, is_token, quiet_http_logger
from astuner_http.strict_json import MAX_DEPTH, parse_json
from tests.table import table

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), VALUES, max_size=5))
def test_an_object_comes_out_as_it_was_written(value: dict[str, Any]) -> None:
    assert parse_json(json.dumps(value).encode()) == value


@given(st.binary(max_size=60), st.booleans())
def test_any_bytes_are_an_object_or_refused(raw: bytes, halves: bool) -> None:
    try:
        found = parse_json(raw, halves=halves)
    except ValueError:
        return
    json.dumps(found, allow_nan=False).encode()


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"[]", "not an object, but list"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": -1e999}', "-1e999 is too large"),
        (b"{\xff", "not UTF-8 from byte 1 on"),
        (b'{"a": ' + b"9" * 5000 + b"}", "digits"),
        (b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1), "nested more than 100"),
        (b'{"a":' + b"[" * 200_000, "nested more than 100"),
        (b"{", "Expecting"),
        (b"", "Expecting"),
    ],
)
@pytest.mark.parametrize("halves", [False, True])
def test_what_is_refused_says_why(raw: bytes, says: str, halves: bool) -> None:
    with pytest.raises(ValueError, match=says):
        parse_json(raw, halves=halves)


def test_half_a_surrogate_pair_passes_only_where_it_is_asked_for() -> None:
    half, pair = b'{"a": "\\ud83d"}', b'{"a": "\\ud83d\\ude00"}'
    assert parse_json(half, halves=True) == {"a": "\ud83d"}
    assert parse_json(pair) == {"a": "\U0001f600"}
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        parse_json(half)


@table("host", ["localhost", "127.0.0.1", "127.9.9.9", "::1"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@table("host", ["0.0.0.0", "::", "", "10.0.0.1", "example.org", "localhost.example.org", "127.1"])
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)


@table(
    ("header", "own"),
    [
        ("localhost:80", True),
        ("LOCALHOST", True),
        ("127.0.0.1:1", True),
        ("[::1]:8080", True),
        ("box.lan:8080", True),
        ("evil.example:8080", False),
        ("localhost.evil.example", False),
        ("[evil", False),
        ("", False),
    ],
)
def test_a_rebound_name_is_not_ours(header: str, own: bool) -> None:
    assert is_own_name(header, "Box.lan") is own


def test_a_token_is_long_and_fits_into_a_header() -> None:
    assert is_token("0123456789abcdef")
    assert not any(map(is_token, ["0123456789abcde", "0123456789abcde\n", "0123456789 abcdef", "0123456789abcdé!"]))


def test_a_free_port_is_bound_and_listens_only_when_asked() -> None:
    with bind("127.0.0.1", 0) as quiet, bind("127.0.0.1", 0, listen=True) as open_to_all:
        assert not quiet.getblocking()
        socket.create_connection(open_to_all.getsockname()).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(quiet.getsockname())
        port = open_to_all.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1, port {port}: Address already in use"):
            bind("127.0.0.1", port)


@table(("host", "port"), [("127.0.0.1", 65536), ("127.0.0.1", -1), ("a" * 70, 0), ("no host", 0)])
def test_an_address_that_is_none_is_a_config_error(host: str, port: int) -> None:
    with pytest.raises(ConfigError, match="cannot listen on"):
        bind(host, port)


def test_what_is_logged_of_nonsense_has_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    logger = quiet_http_logger("astuner.test.http")
    assert quiet_http_logger("astuner.test.http").filters == logger.filters == logger.filters[:1]
    with caplog.at_level(logging.ERROR, "astuner.test.http"):
        try:
            raise ValueError("Authorization: Bearer secret")
        except ValueError:
            logger.exception("malformed")
    assert "malformed" in caplog.text
    assert "secret" not in caplog.text
