"""`astuner view`: the address, the port, the token, the end; and the page for a colleague."""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import html.parser
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from astuner.cli import main
from astuner.config.schema import AstunerSection
from astuner.contracts.errors import ConfigError, DataError
from astuner.contracts.types import StopReason
from astuner_gateway.listening import reachable
from astuner_view.episodes import explained
from astuner_view.export import PLACEHOLDER, export, page_with
from astuner_view.runs import find_run
from astuner_view.serving import address, open_socket
from astuner_view.settings import DEFAULT_PORT
from tests.table import table

from ._runs import HOSTILE, OLDER, episode, make_run, turn, write_log

VIEW = [sys.executable, "-m", "astuner", "view"]


@contextlib.contextmanager
def started(*arguments: object, **variables: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """The command in the background, and what it printed as JSON."""
    with subprocess.Popen(
        [*VIEW, *map(str, arguments), "--json", "--no-browser"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **variables},
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            said = ""
            while not said.endswith("}\n"):
                line = process.stdout.readline()
                assert line, process.stderr.read() if process.stderr else ""
                said += line
            yield process, json.loads(said)
        finally:
            if process.poll() is None:
                process.kill()


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What the command says of arguments that it does not take."""

    def call(*arguments: object) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["view", *map(str, arguments)])
        said = capsys.readouterr()
        assert (ended.value.code, said.out) == (2, "")
        return said.err

    return call


def fetch(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


@pytest.mark.slow
def test_it_serves_until_ctrl_c(root: Path) -> None:
    with started("--root", root, "--port", "0") as (process, said):
        assert said["host"] == "127.0.0.1"
        assert said["url"] == f"http://127.0.0.1:{said['port']}/"
        assert [run["id"] for run in fetch(said["url"] + "api/runs")["runs"]] == ["math"]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert process.stderr is not None
        assert process.stderr.read() == "Stopped\n"


@pytest.mark.slow
def test_one_run_alone_is_shown_alone(root: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "other")
    (tmp_path / "math").symlink_to(root / "math")
    with started("math", "--root", tmp_path, "--port", "0", "--host", "::1" if socket.has_ipv6 else "127.0.0.1") as (
        process, said,
    ):  # fmt: skip
        base, _, fragment = said["url"].partition("#")
        assert fragment == "/run/math"
        assert [run["id"] for run in fetch(base + "api/runs")["runs"]] == ["math"]
        process.terminate()


@pytest.mark.slow
def test_an_open_address_is_given_a_token_as_part_of_the_link(root: Path) -> None:
    with started("--root", root, "--port", "0", "--host", "0.0.0.0") as (process, said):
        token = re.fullmatch(r"http://[^/]+/\?token=([\w-]{32})", said["url"])
        assert token, said
        asked = urllib.request.Request(f"http://127.0.0.1:{said['port']}/api/runs")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(asked, timeout=30)
        asked.add_header("Authorization", f"Bearer {token[1]}")
        with urllib.request.urlopen(asked, timeout=30) as answer:
            assert answer.status == 200
        process.terminate()


@pytest.mark.slow
def test_a_token_of_ones_own(root: Path, refused: Callable[..., str]) -> None:
    own = {"ASTUNER_TEST_TOKEN": "my-own-token-0123456789"}
    with started("--root", root, "--port", "0", "--token-env", "ASTUNER_TEST_TOKEN", **own) as (process, said):
        assert said["url"].endswith("/?token=my-own-token-0123456789")
        process.terminate()
    said = refused("--root", root, "--token-env", "ASTUNER_NO_SUCH_VARIABLE")
    assert "the variable ASTUNER_NO_SUCH_VARIABLE is not set" in said


def test_a_taken_port_is_an_error_only_when_it_was_asked_for(root: Path, refused: Callable[..., str]) -> None:
    with open_socket("127.0.0.1", None) as first, open_socket("127.0.0.1", None) as second:
        ports = [s.getsockname()[1] for s in (first, second)]
        assert DEFAULT_PORT <= ports[0] < ports[1]
        said = refused("--root", root, "--port", ports[0])
        assert f"cannot listen on 127.0.0.1, port {ports[0]}" in said
        assert "hoose another port with --port N" in said


@table(
    ("arguments", "says"),
    [
        (("nothing",), r"nothing is not a run folder.* math\. Run `astuner view RUN`"),
        (("--export", "x.html"), "--export requires a run"),
        (("--where", "reward>=1"), "require --export"),
        (("math", "--export", "no/such/folder/x.html"), "does not exist"),
        (("--host", "no.such.host.invalid"), "cannot listen on"),
        (("--episode", "g1-0"), "name the run, as in `astuner view RUN --episode g1-0`"),
        (("math", "--episode", "a", "--episode", "b", "--episode", "c"), "once, or twice"),
    ],
)
def test_what_is_asked_wrongly(root: Path, refused: Callable[..., str], arguments: tuple[str, ...], says: str) -> None:
    assert re.search(says, refused("--root", root, *arguments))


def test_a_run_is_found_by_path_name_or_id(tmp_path: Path) -> None:
    good = make_run(tmp_path / "deep" / "my run")
    assert find_run(tmp_path, str(good)) == good.resolve()
    assert find_run(tmp_path, "deep/my run") == good.resolve()
    with pytest.raises(ConfigError, match="deep/my run"):
        find_run(tmp_path, "my run")
    with pytest.raises(ConfigError, match="There are no runs"):
        find_run(tmp_path / "empty", "x")


def test_addresses() -> None:
    with open_socket("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        assert (
            address(listening, "127.0.0.1", run="a~1", token="t k") == f"http://127.0.0.1:{port}/?token=t%20k#/run/a~1"
        )
        one, two = ("a~1", "v000004-00002-0"), ("a~1", "v000000-00002-0")
        assert address(listening, "::1", episodes=[one]).endswith("/#/run/a~1/episode/v000004-00002-0")
        left, right = "left=a~1%2Fv000004-00002-0", "right=a~1%2Fv000000-00002-0"
        assert address(listening, "::1", episodes=[one, two]).endswith(f"/#/compare?{left}&{right}")
        assert address(listening, "::1") == f"http://[::1]:{port}/"
        assert address(listening, "0.0.0.0") == f"http://{reachable('0.0.0.0')}:{port}/"


# ---------------------------------------------------------------------------------------------------------- export


class Elements(html.parser.HTMLParser):
    """What a browser makes of a page: its elements, and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside in ("script", "style"):
            self.texts.setdefault(self._inside, []).append(data)


def data_of(file: Path) -> Any:
    return json.loads(Elements(file.read_text(encoding="utf-8")).texts["script"][0])


def test_a_page_has_everything_of_the_run(root: Path, static: Path, tmp_path: Path) -> None:
    done = export(root / "math", tmp_path / "x.html", [], 200, static)
    assert (done["episodes"], done["of"], done["bytes"]) == (5, 5, (tmp_path / "x.html").stat().st_size)
    data = data_of(tmp_path / "x.html")
    assert set(data) >= {"format", "exported", "astuner", "run", "metrics", "steps", "groups", "episodes"}
    assert data["format"] == 1
    assert data["run"]["name"] == "math"
    assert data["run"]["facets"]["split"] == [["train", 4], ["validation", 1]]
    assert [row["step"] for row in data["metrics"]] == [0, 1]
    assert [len(data["steps"][split]) for split in ("train", "validation")] == [2, 1]
    assert len(data["groups"]) == 3
    one = next(e for e in data["episodes"] if e["episode_id"] == "g0-0")
    assert one["tokens"]["turns"][0]["response"]["texts"][-2:] == ["é", "<|end|>"]
    assert sum(one["tokens"]["turns"][0]["response"]["trained"]) == 6


def test_a_page_has_the_newest_of_what_was_asked_for(root: Path, static: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.html"
    done = export(root / "math", file, ["split=train"], 2, static)
    assert (done["episodes"], done["of"]) == (2, 4)
    data = data_of(file)
    assert [e["episode_id"] for e in data["episodes"]] == ["g1-0", "g1-1"]
    assert [g["group_id"] for g in data["groups"]] == ["g1"]
    assert data["episodes_total"] == 4
    export(root / "math", file, [], 1, static)  # over an earlier page
    with pytest.raises(ConfigError, match="reward"):
        export(root / "math", file, ["reward>>1"], 1, static)
    assert len(data_of(file)["episodes"]) == 1
    with pytest.raises(DataError, match=r"No episode matches every --where\. .* 5 episodes"):
        export(root / "math", file, ["step=99"], 1, static)
    assert len(data_of(file)["episodes"]) == 1
    mine = tmp_path / "mine.html"
    mine.write_text("my own page")
    with pytest.raises(ConfigError, match="Choose another name"):
        export(root / "math", mine, [], 1, static)
    assert mine.read_text() == "my own page"


def test_a_page_that_cannot_be_written_is_said_and_leaves_nothing(
    root: Path, static: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(DataError, match=r"Could not write .*x\.html: No space left on device"):
        export(root / "math", tmp_path / "x.html", [], 200, static)
    monkeypatch.undo()
    assert not list(tmp_path.glob("*x.html*"))


def test_what_of_the_log_cannot_be_read_is_said(root: Path, static: Path, tmp_path: Path) -> None:
    run = shutil.copytree(root / "math", tmp_path / "runs" / "math")
    (run / "episodes" / "episodes.sqlite").unlink()
    shutil.copytree(OLDER, run / "episodes", dirs_exist_ok=True)
    last = run / "episodes" / "tokens-000003.arrows"
    last.write_bytes(last.read_bytes()[:-40])
    (problem,) = export(run, tmp_path / "x.html", [], 200, static)["problems"]
    assert "are not a complete batch" in problem


def test_a_page_can_run_its_own_script_and_nothing_else(root: Path, static: Path, tmp_path: Path) -> None:
    export(root / "math", tmp_path / "x.html", [], 200, static)
    page = Elements((tmp_path / "x.html").read_text(encoding="utf-8"))
    policy = next(a["content"] for tag, a in page.found if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    script, style = page.texts["script"][1], page.texts["style"][0]
    assert rules["script-src"] == f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
    assert rules["style-src"] == f"'sha256-{base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()}'"
    assert rules["default-src"] == "'none'"
    tags = [tag for tag, _ in page.found]
    assert tags.index("meta") < tags.index("style") < tags.index("script")


def test_hostile_text_stays_inside_of_its_element(tmp_path: Path, static: Path) -> None:
    run = make_run(tmp_path / HOSTILE.replace("/", "").replace("\0", "")[:40])
    said = {"role": "assistant", "content": HOSTILE, "-->": "<!--<script>"}
    write_log(run, [(1, episode("g0-0", error=HOSTILE, turns=(turn(0, [1], [2], message=said),)))])
    export(run, tmp_path / "x.html", [], 200, static)
    text = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert [tag for tag, _ in Elements(text).found].count("script") == 2
    inside = text.partition('id="astuner-data">')[2].partition("</script>")[0]
    assert not set(inside) & set("<>&\u2028\u2029")
    assert data_of(tmp_path / "x.html")["episodes"][0]["turns"][0]["reply"] == said


def test_a_run_without_a_log_is_exported_with_its_metrics(tmp_path: Path, static: Path) -> None:
    done = export(make_run(tmp_path / "bare"), tmp_path / "x.html", [], 200, static)
    assert (done["episodes"], done["of"]) == (0, 0)
    data = data_of(tmp_path / "x.html")
    assert len(data["metrics"]) == 2
    assert data["run"]["problems"] == []


def test_a_page_that_is_not_built_or_not_ours(tmp_path: Path, root: Path) -> None:
    with pytest.raises(DataError, match="The built page is missing"):
        export(root / "math", tmp_path / "x.html", [], 200, tmp_path)
    assert not (tmp_path / "x.html").exists()
    with pytest.raises(DataError, match="element for the data is missing"):
        page_with("<html><head></head></html>", {})
    with pytest.raises(DataError, match="element for the data is missing"):
        page_with(f"<html><head></head>{PLACEHOLDER}{PLACEHOLDER}</html>", {})


def test_the_command_writes_it(tmp_path: Path, root: Path, static: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from astuner.contracts.commands import new_app
    from astuner_view.cli import view

    app = new_app()
    app.command()(view)

    monkeypatch.setattr("astuner_view.export.export.__defaults__", (static,))
    asked = ["math", "--root", str(root), "--export", str(tmp_path / "x.html"), "--where", "split=train"]
    result = CliRunner().invoke(app, [*asked, "--limit", "3"], catch_exceptions=False)
    assert re.fullmatch(r"3 episodes \(the newest of 4; use --limit N for more\), .* MiB: .*x\.html\n", result.output)
    result = CliRunner().invoke(app, [*asked, "--json"], catch_exceptions=False)
    assert json.loads(result.output)["episodes"] == 4


# -------------------------------------------------------------------------------------------------------- failures


def test_every_end_but_the_good_one_is_explained() -> None:
    assert explained(StopReason.COMPLETED, "") is None
    for reason in set(StopReason) - {StopReason.COMPLETED}:
        said = explained(reason, "because")
        assert said is not None
        assert said["why"] == "because"
        for key in re.findall(r"astuner\.((?:\w+\.)*\w+)", f"{said['what']} {said['advice']}"):
            section: Any = AstunerSection
            for part in key.split("."):
                assert part in section.model_fields, f"{reason}: there is no key astuner.{key}"
                section = section.model_fields[part].annotation
