"""What strange code leaves in its folder is removed, and nothing besides."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from astuner_sandbox.isolation import scratch


def nested(top: Path, levels: int) -> None:
    """A chain of folders that is deeper than Python's stack and longer than a path may be."""
    at = os.open(top, os.O_DIRECTORY)
    try:
        for _ in range(levels):
            os.mkdir("d" * 20, dir_fd=at)
            below = os.open("d" * 20, os.O_DIRECTORY, dir_fd=at)
            os.close(at)
            at = below
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=at))
    finally:
        os.close(at)


@pytest.fixture
def kept(tmp_path) -> Path:
    """A file elsewhere that must outlive everything here."""
    file = tmp_path / "elsewhere" / "kept"
    file.parent.mkdir()
    file.write_text("x")
    return file


def test_nested_folders_go(tmp_path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    nested(top, 3000)
    scratch.remove(top)
    assert not top.exists()
    scratch.remove(top)  # there is nothing left to do


def test_links_go_and_not_what_they_name(tmp_path, kept) -> None:
    top = tmp_path / "top"
    (top / "a" / "b").mkdir(parents=True)
    (top / "a" / "b" / "link").symlink_to(kept.parent)
    scratch.remove(top)
    top.symlink_to(kept.parent)
    scratch.remove(top)
    assert not top.is_symlink()
    assert kept.read_text() == "x"


def test_a_file_goes(tmp_path) -> None:
    (tmp_path / "output").write_text("x")
    scratch.remove(tmp_path / "output")
    assert not (tmp_path / "output").exists()


@pytest.mark.slow
def test_a_root_is_locked_and_goes_with_all_that_is_in_it(tmp_path) -> None:
    root = scratch.Root("mine-", tmp_path)
    nested(root.path, 3000)
    scratch.remove_abandoned("mine-", tmp_path)
    assert root.path.is_dir()
    root.close()
    assert list(tmp_path.iterdir()) == []


def test_what_resists_does_not_stop_the_next_root(tmp_path, monkeypatch, caplog) -> None:
    left = tmp_path / "mine-left"
    left.mkdir()
    (left / scratch.LOCK).touch()

    def resists(folder: Path) -> None:
        raise OSError(f"{folder} resists")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(scratch, "remove", resists)
        root = scratch.Root("mine-", tmp_path)
    assert f"{left} resists" in caplog.text
    root.close()
    assert left.is_dir()
    scratch.Root("mine-", tmp_path).close()
    assert list(tmp_path.iterdir()) == []
