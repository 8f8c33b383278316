"""Anything may be sent: no 5xx comes of input, no request writes or removes anything outside the service's folder."""

from __future__ import annotations

import http.client
import json
import os
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ._service import Client, Live

POSTS = ("/get_env_profile", "/create", "/step", "/evaluate", "/get_info", "/release", "/v1/instances")
NASTY = (
    "..",
    ".",
    "/",
    "../..",
    "../canary",
    "..%2fcanary",
    "\x00",
    "a\nb",
    "\ud83d",
    "𝔘",
    "~",
    "$(id)",
    "x" * 5000,
    "counter",
    "default",
    "train-0",
    "live",
)

texts = st.one_of(st.sampled_from(NASTY), st.text(max_size=20))
leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=8,
)
KEYS = ("env_type", "task_id", "instance_id", "messages", "params", "environment", "action", "request_id", "task")
params = st.fixed_dictionaries(
    {},
    optional={
        "split": values,
        "task": values,
        "request_id": values,
        "sparse": values,
        "details": values,
        "other": values,
    },
)
sensible = {
    "env_type": st.sampled_from(["counter", "default", ""]),
    "environment": st.just("counter"),
    "task_id": st.sampled_from(["train-0", "dev-1"]),
    "instance_id": st.sampled_from(["live", "new", "x"]),
    "messages": st.dictionaries(texts, values, max_size=3),
    "action": st.dictionaries(texts, values, max_size=3),
    "params": params,
    "request_id": texts,
    "task": st.fixed_dictionaries({}, optional={"main_query": texts, "metadata": st.dictionaries(texts, values)}),
}
bodies = st.fixed_dictionaries({}, optional={key: st.one_of(sensible[key], values) for key in KEYS})

fuzz = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def canary(tmp_path_factory) -> Path:
    """A folder with what must not change: what lies beside the service's root."""
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "canary/tasks").mkdir(parents=True)
    (folder / "canary/tasks/train-0").write_text("alive")
    (folder / "roots").mkdir()
    return folder


@pytest.fixture(scope="module")
def target(counter, canary):
    """A service that is never full for long; what it serves does not raise by itself."""
    with Live([counter], max_instances=4, patience=0.0, idle_ttl=1.0, parent=canary / "roots") as live:
        live.create("live", goal=10**9)
        yield live


@pytest.fixture(autouse=True)
def nothing_leaves_the_root(canary, target):
    before = seen(canary)
    yield
    assert seen(canary) == before
    assert (canary / "canary/tasks/train-0").read_text() == "alive"
    assert len(list((canary / "roots").iterdir())) == 1
    if target.get("/v1/instances/live").status != 200:
        target.create("live", goal=10**9)


def seen(folder: Path) -> set[str]:
    found = set()
    for place, folders, files in os.walk(folder):
        if Path(place) == folder / "roots":
            folders[:] = []
        found |= {os.path.join(place, name) for name in (*folders, *files) if Path(place) != folder / "roots"}
    return found


def check(answer, said=""):
    """Whatever it is, it is an answer, and no 5xx but for a service that is full."""
    assert answer.status < 500 or (answer.status == 503 and answer.code == "busy"), (answer.status, answer.raw, said)
    if answer.headers.get("Content-Type", "").startswith("application/json"):
        json.loads(answer.raw)
        assert b"Traceback" not in answer.raw


@fuzz
@given(path=st.sampled_from(POSTS), body=bodies)
def test_any_fields(target, path, body):
    check(target.post(path, body), body)


@fuzz
@given(path=st.sampled_from((*POSTS, "/v1/instances/live/step", "/v1/instances/live/evaluate")), body=values)
def test_any_json(target, path, body):
    check(target.post(path, body if body is not None else 0), body)


@fuzz
@given(
    path=st.sampled_from((*POSTS, "/v1/instances/live/step", "/v1/instances/live/evaluate")),
    raw=st.one_of(
        st.binary(max_size=200),
        st.sampled_from(
            [b"[" * 3000, b'{"a":' * 3000, b"1" * 10000, b'{"task_id":' + b"9" * 9000 + b"}", b"\xef\xbb\xbf{}"]
        ),
    ),
)
def test_any_bytes(target, path, raw):
    check(target.send("POST", path, raw), raw)


@fuzz
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "NONSENSE"]),
    parts=st.lists(st.one_of(st.sampled_from(["v1", "instances", "environments", "tasks", "step", "metrics"]), texts)),
    query=st.dictionaries(st.sampled_from(["split", "offset", "limit", "x"]), texts, max_size=3),
)
def test_any_path(target, method, parts, query):
    path = "/" + "/".join(quote(part, safe="", errors="replace") for part in parts)
    asked = "&".join(f"{key}={quote(value, errors='replace')}" for key, value in query.items())
    answer = target.send(method, f"{path[:6000]}?{asked[:6000]}")
    assert answer.status < 500 if method == "HEAD" else check(answer, path) is None


@fuzz
@given(
    name=texts,
    said=st.sampled_from(["", "/step", "/evaluate", "/info"]),
    method=st.sampled_from(["GET", "POST", "DELETE"]),
)
def test_any_instance_in_the_path(target, name, said, method):
    check(target.send(method, f"/v1/instances/{quote(name, safe='', errors='replace')[:6000]}{said}", b"{}"), name)


@fuzz
@given(
    headers=st.dictionaries(
        st.one_of(
            st.sampled_from(
                ["Host", "Content-Type", "Content-Encoding", "Authorization", "Expect", "Upgrade", "Origin"]
            ),
            st.sampled_from(["Transfer-Encoding", "Content-Length", "Connection", "Range", "X-Request-Id", "Cookie"]),
        ),
        st.one_of(
            st.sampled_from(
                ["chunked", "gzip", "100-continue", "websocket", "close", "-1", "5", "evil.example", "[::1"]
            ),
            st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=30),
        ),
        max_size=3,
    ),
    path=st.sampled_from((*POSTS, "/healthz", "/metrics")),
)
def test_any_headers(target: Client, headers, path):
    try:
        answer = target.send(
            "POST", path, b'{"a": 1}', {k: v.encode("latin-1") for k, v in headers.items()}, timeout=2.0
        )
    except (http.client.HTTPException, ConnectionError, TimeoutError):
        pass  # it was no request, or one whose body never came; the service lives on all the same
    else:
        check(answer, headers)
    assert target.send("GET", "/healthz").raw == b"OK"
