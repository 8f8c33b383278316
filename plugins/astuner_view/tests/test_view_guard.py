"""Who may ask, what every answer carries, and that nothing outside of a run folder is ever shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from astuner.contracts.errors import ConfigError
from astuner_view.app import CONTENT_POLICY, Viewer
from astuner_view.runs import Runs
from tests.table import table

from ._runs import Client, make_run, viewing

TOKEN = "0123456789abcdef0123"
CROSS = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors", "sec_fetch_dest": "script"}
VISIT = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}


@table("path", ["/", "/api/runs", "/api/runs/nothing", "/nothing", "/assets/index-1.js", "/health"])
def test_every_answer_carries_the_rules(viewer: Client, path: str) -> None:
    headers = viewer.get(path).headers
    assert headers["content-security-policy"] == CONTENT_POLICY
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["server"] == "astuner"  # and no version
    assert "access-control-allow-origin" not in headers


def test_the_page_and_its_assets_are_served_and_nothing_else(viewer: Client) -> None:
    page = viewer.get("/")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    asset = viewer.get("/assets/index-1.js")
    assert (asset.status, asset.headers["content-type"]) == (200, "text/javascript; charset=utf-8")
    for answer in (page, asset):  # a newer ASTuner's have the same names
        assert answer.headers["cache-control"] == "no-store"
    for path in ("/export.html", "/assets/", "/../conftest.py", "/assets/%2e%2e/index.html", "//index.html/.."):
        assert viewer.get(path).status == 404, path


def test_answers_about_runs_are_not_kept(viewer: Client) -> None:
    assert viewer.get("/api/runs").headers["cache-control"] == "no-store"


@table("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_can_be_changed(viewer: Client, method: str) -> None:
    answer = viewer.get("/api/runs", method=method)
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")


def test_head_is_get_without_the_body(viewer: Client) -> None:
    for path in ("/", "/api/runs", "/api/runs/math/live"):
        answer = viewer.get(path, method="HEAD")
        assert (answer.status, answer.raw) == (200, b"")


@table("host", ["evil.example", "evil.example:8181", "127.0.0.1.evil.example", "localhost.evil.org"])
def test_a_name_that_points_here_is_refused(viewer: Client, host: str) -> None:
    for path in ("/", "/api/runs", "/health"):
        answer = viewer.get(path, host=host)
        assert (answer.status, "localhost" in answer.error) == (403, True)


@table("host", ["localhost:1234", "127.0.0.1", "LOCALHOST", "[::1]:99"])
def test_this_machines_names_are_taken(viewer: Client, host: str) -> None:
    assert viewer.get("/api/runs", host=host).status == 200


def test_other_pages_get_nothing_but_may_link_here(viewer: Client) -> None:
    assert viewer.get("/api/runs", **CROSS).status == 400
    assert viewer.get("/assets/index-1.js", **CROSS).status == 400
    assert viewer.get("/", **CROSS).status == 400
    assert viewer.get("/api/runs", **VISIT).status == 400
    assert viewer.get("/", **VISIT).status == 200
    assert viewer.get("/api/runs", sec_fetch_site="same-origin").status == 200


def test_with_a_token_everything_wants_it(root: Path, static: Path) -> None:
    with viewing(root, token=TOKEN, static=static) as client:
        for path in ("/", "/api/runs", "/assets/index-1.js", "/api/runs/math/files/run.log"):
            answer = client.get(path)
            assert (answer.status, "requires its token" in answer.error) == (401, True)
            assert client.get(path, authorization="Bearer wrong").status == 401
            assert client.get(path, {"token": "wrong"}).status == 401
            assert client.get(path, authorization=f"Bearer {TOKEN}").status == 200
        assert client.get("/health").status == 200


def test_a_link_with_the_token_becomes_a_cookie(root: Path, static: Path) -> None:
    with viewing(root, token=TOKEN, static=static) as client:
        entrance = client.get("/", {"a": "b", "token": TOKEN})
        assert (entrance.status, entrance.headers["location"]) == (303, "/?a=b")
        cookie, *attributes = entrance.headers["set-cookie"].split("; ")
        assert cookie == f"astuner_view_{client.port}={TOKEN}"
        assert set(attributes) == {"Path=/", "HttpOnly", "SameSite=Strict"}
        assert client.get("/api/runs", cookie=cookie).status == 200
        assert client.get("/api/runs", cookie=f"astuner_view_{client.port}=other").status == 401
        assert client.get("/api/runs", cookie="a b=;=;[").status == 401
        from_a_chat = client.get("/", {"token": TOKEN}, **VISIT)  # a redirect would come without the cookie
        assert (from_a_chat.status, from_a_chat.headers["set-cookie"].startswith(cookie)) == (200, True)
        assert client.get("//evil.example/", {"token": TOKEN}).headers["location"] == "/evil.example/"


def test_an_open_address_needs_a_token(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--token-env"):
        Viewer(Runs(tmp_path), host="0.0.0.0", port=1)
    with pytest.raises(ConfigError, match="at least 16"):
        Viewer(Runs(tmp_path), host="0.0.0.0", port=1, token="short")


def test_under_an_open_address_any_name_will_do_with_the_token(root: Path, static: Path) -> None:
    with viewing(root, host="0.0.0.0", token=TOKEN, static=static) as client:
        assert client.get("/api/runs", host="cluster.example:1", authorization=f"Bearer {TOKEN}").status == 200
        assert client.get("/api/runs", host="cluster.example:1").status == 401


def test_files_of_a_run_are_shown_and_can_do_nothing(tmp_path: Path, static: Path) -> None:
    run = make_run(tmp_path / "files")
    (run / "report.html").write_text("<script>alert(1)</script>")
    (run / "reward_curve.svg").write_text("<svg onload='alert(1)'/>")
    with viewing(tmp_path, static=static) as client:
        assert client.of("files").ok["files"] == {
            "report.html": True,
            "reward_curve.svg": True,
            "resolved.yaml": True,
            "run.log": True,
        }
        report = client.of("files", "files/report.html")
        assert (report.status, report.raw) == (200, b"<script>alert(1)</script>")
        for name in ("report.html", "reward_curve.svg"):
            policy = client.of("files", f"files/{name}").headers["content-security-policy"]
            assert policy.startswith("sandbox; default-src 'none'")
            assert "script" not in policy
        assert client.of("files", "files/resolved.yaml").headers["content-type"].startswith("text/plain")


def test_links_in_a_run_folder_lead_nowhere(tmp_path: Path, static: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a password")
    run = make_run(tmp_path / "root" / "links")
    (run / "report.html").symlink_to(secret)
    (run / "run.log").unlink()
    os.mkfifo(run / "run.log")  # reading it would wait forever
    with viewing(tmp_path / "root", static=static) as client:
        assert client.of("links", "files/report.html").status == 404
        assert client.of("links", "files/run.log").status == 404
        assert client.of("links").ok["files"] == {"resolved.yaml": True}


def test_files_that_are_links_or_never_end_are_named_and_hold_up_nobody(tmp_path: Path, static: Path) -> None:
    secret = tmp_path / "secret.jsonl"
    secret.write_text('{"step": 1, "key": "a password"}\n')
    for name in ("metrics.jsonl", "alarms.jsonl", "certificate.json", "summary.json"):
        for kind, target in (("link", secret), ("endless", "/dev/zero"), ("pipe", "")):
            run = make_run(tmp_path / "root" / f"{name}-{kind}")
            (run / name).unlink(missing_ok=True)
            (run / name).symlink_to(target) if target else os.mkfifo(run / name)
    locked = make_run(tmp_path / "root" / "locked")
    os.mkfifo(locked.with_name(".locked.lock"))
    with viewing(tmp_path / "root", static=static) as client:
        runs = [run["id"] for run in client.get("/api/runs").ok["runs"]]
        assert len(runs) == 13
        for run in runs:
            answers = [client.of(run), client.of(run, "metrics")]
            assert b"a password" not in b"".join(answer.raw for answer in answers)
            told = [p for p in answers[0].ok["problems"] if p.endswith(" was ignored, because it is not a plain file")]
            assert [p.partition(" ")[0] for p in told] == ([] if run == "locked" else [run.rpartition("-")[0]])


def test_a_config_that_grows_as_it_is_read_is_a_problem_of_its_run_alone(tmp_path: Path, static: Path) -> None:
    multiplied = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9))
    for name, text in {
        "aliases": f"a0: &a0 [x]\n{multiplied}astuner: {{trainer_common: {{total_steps: *a8}}}}\n",
        "deep": "astuner: " + "[" * 100_000,
        "long": "a: " + "x" * (2 << 20),
    }.items():
        (make_run(tmp_path / name) / "resolved.yaml").write_text(text)
    make_run(tmp_path / "good")
    with viewing(tmp_path, static=static) as client:
        assert len(client.get("/api/runs").ok["runs"]) == 4
        for name in ("aliases", "deep", "long"):
            assert any("resolved.yaml" in p for p in client.of(name).ok["problems"])


def test_without_the_build_it_says_how_to_make_it(root: Path, tmp_path: Path) -> None:
    with viewing(root, static=tmp_path) as client:
        page = client.get("/")
        assert page.status == 500
        assert page.raw.startswith(b"The built page is missing: ")
        assert b"npm run build" in page.raw
        assert client.get("/api/runs").status == 200
