"""Each tutorial is walked: what its page says to type is typed, in one shell, and what it says one sees is seen.

The shell begins in an empty home, with this checkout as ``~/astuner``. A page's blocks are taken in order:

- ``<!-- file: PATH -->`` before a block: it is written to that file.
- ``bash``: it is typed; every command must succeed. A ``text`` block right behind it is what is seen, lines in this
  order: a number stands for any number, ``…`` for anything, and between two lines there may be others.
- ``<!-- short: KEY=VALUE … -->`` before a ``bash`` block: where nobody waits for a whole walk, this is typed behind its
  last line. `make test-tutorials` does without (``ASTUNER_TUTORIALS=whole``).
- ``<!-- learned: RUN POINTS -->`` before a ``text`` block: only at the end of a whole run that is seen, and success in
  the validations of the run folder RUN has risen by so many points at least.

Other blocks are shown, not typed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.docs.test_docs import BLOCKS, ROOT, Block

WHOLE = os.environ.get("ASTUNER_TUTORIALS") == "whole"
DEAR = {"appworld.md", "real_model.md", "your_agent.md"}
"""Two minutes and more each, however short their runs: these are left to `make test-tutorials`."""
PAGES = [
    page
    for page in sorted((ROOT / "docs" / "tutorials").glob("*.md"))
    if page.name not in ({"README.md"} if WHOLE else {"README.md"} | DEAR)
]
PATIENCE = 3600 if WHOLE else 600
"""Seconds that a walk may take."""
NEEDS = {"appworld.md": ["appworld"]}
"""Page -> what `conftest.py` knows of that it needs."""
MADE_ONCE = {  # what takes long to fetch, and other tests fetch too
    ".astuner/smollm2": Path.home() / ".astuner" / "smollm2",
    ".astuner/environments/appworld/venv": ROOT / ".venv-appworld",
    "astuner": ROOT,
}
DONE = "--- that was a block ---"


class Terminal:
    """A shell in which somebody types, and what stands on the screen then."""

    def __init__(self, home: Path) -> None:
        mine = Path.home()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ASTUNER")}
        environment |= {"HOME": str(home), "XDG_CONFIG_HOME": str(mine / ".config")}  # which index pip asks
        environment |= {"XDG_CACHE_HOME": str(mine / ".cache"), "COLUMNS": "120"}
        self.shell = subprocess.Popen(
            ["bash", "--norc", "-e"],  # -e: a command that fails ends it
            cwd=home,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def type(self, text: str) -> str:
        """What is seen until the shell wants more."""
        assert self.shell.stdin is not None
        assert self.shell.stdout is not None
        self.shell.stdin.write(f"{{\n{text}\n}} </dev/null\nprintf '\\n%s\\n' '{DONE}'\n")
        self.shell.stdin.flush()
        seen: list[str] = []
        for line in self.shell.stdout:
            if line.rstrip("\n") == DONE:
                return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", "".join(seen))
            seen.append(line)
        raise AssertionError(f"this did not succeed:\n{text}\n{''.join(seen)}")


@contextmanager
def terminal(home: Path) -> Iterator[Terminal]:
    """A shell that ends with all that was started in it, at the latest when nobody has patience any more."""
    opened = Terminal(home)

    def end() -> None:
        for process in [*psutil.Process(opened.shell.pid).children(recursive=True), opened.shell]:
            process.kill()

    watchdog = threading.Timer(PATIENCE, end)
    watchdog.start()
    try:
        yield opened
    finally:
        watchdog.cancel()
        if opened.shell.poll() is None:
            end()
        opened.shell.communicate()


def blocks_of(page: Path) -> list[Block]:
    return [block for block in BLOCKS if block.page == page]


def marked(block: Block, name: str) -> str | None:
    """What a mark of the block says."""
    return next((mark.removeprefix(f"{name}: ") for mark in block.marks if mark.startswith(f"{name}: ")), None)


def pattern(line: str) -> str:
    """What a line of a page stands for: a number for any number, ``…`` for anything."""
    pieces = re.split(r"(-?\d+(?:[.,:]\d+)*|…)", line)
    pieces[::2] = map(re.escape, pieces[::2])
    pieces[1::2] = [".*" if piece == "…" else r"-?[\d.,:]+" for piece in pieces[1::2]]
    return "".join(pieces)


def unseen(shown: str, screen: str) -> str | None:
    """The first line of ``shown`` that does not stand on the screen, below those before it."""
    shown_lines, seen = ([" ".join(line.split()) for line in text.splitlines()] for text in (shown, screen))
    left = iter(seen)
    for line in filter(None, shown_lines):
        if not any(re.fullmatch(pattern(line), other) for other in left):
            return line
    return None


def gain(run: Path) -> float:
    """Points of success between the first validation of a run and its last."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    first, *_, last = [row["val/success"] for row in rows if "val/success" in row]
    return 100.0 * (last - first)


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE + 60)
@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=pytest.mark.needs(*NEEDS.get(p.name, ())), id=p.stem) for p in PAGES]
)
def test_a_tutorial_is_walked_from_its_first_line_to_its_last(page: Path, tmp_path: Path) -> None:
    MADE_ONCE[".astuner/smollm2"].mkdir(parents=True, exist_ok=True)
    for name, there in MADE_ONCE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(there)
    folder, screen = tmp_path, ""
    with terminal(tmp_path) as typed:
        for block in blocks_of(page):
            if path := marked(block, "file"):
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_text(block.text, encoding="utf-8")
            elif block.language == "bash":
                short = marked(block, "short") if not WHOLE else None
                screen = typed.type(block.text.rstrip() + (f" {short}" if short else ""))
                folder = Path(typed.type("pwd").strip())
                print(f"$ {block.text}{screen}")
            elif block.language == "text" and (WHOLE or not marked(block, "learned")):
                assert not (line := unseen(block.text, screen)), f"{block}: not seen: {line}\n{screen}"
                if learned := marked(block, "learned"):
                    run, points = learned.split()
                    assert gain(folder / run) >= float(points), f"{block}: {gain(folder / run):.0f} points"


def test_what_is_not_on_the_screen_is_missed() -> None:
    screen = "step 3  reward 0.41\nother\nsuccess 61.2 % [50.1, 70.0]\n"
    assert unseen("step 1 reward 0.3\nsuccess 92 % […", screen) is None
    assert unseen("success 92 % …\nstep 1 reward 0.3", screen) == "step 1 reward 0.3"
    assert unseen("step 1 reward", screen) == "step 1 reward"
