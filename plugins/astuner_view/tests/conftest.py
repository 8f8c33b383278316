"""A root with one good run, and a viewer of it, for all tests that leave nothing behind in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("tokenizers")

from ._runs import Client, good_run, viewing


@pytest.fixture(scope="session")
def static(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page that is built, in place of the real one."""
    folder = tmp_path_factory.mktemp("static")
    (folder / "assets").mkdir()
    (folder / "index.html").write_text("<!doctype html><title>ASTuner</title>")
    (folder / "assets" / "index-1.js").write_text("console.log(1)")
    (folder / "export.html").write_text(
        '<!doctype html><html><head><meta charset="utf-8"><style>p{color:red}</style></head><body>\n'
        '<script type="application/json" id="astuner-data">null</script>\n'
        '<script type="module">console.log("<header>the page")</script></body></html>\n'
    )
    return folder


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launcher_record")
    good_run(folder / "math")
    return folder


@pytest.fixture(scope="session")
def viewer(root: Path, static: Path) -> Iterator[Client]:
    with viewing(root, static=static) as client:
        yield client
