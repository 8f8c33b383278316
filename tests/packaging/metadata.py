"""Writes into every pyproject.toml what all distributions say alike, their version among it: `make metadata`.

The root's pyproject.toml is the one place: what stands there between the marks is written between those of the others.
``make metadata VERSION=0.2.0`` first gives the root, `astuner.__version__` and the bounds of ours a new version.
"""

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
OURS = [*sorted((ROOT / "plugins").iterdir()), *sorted((ROOT / "plugins").glob("*/cpu"))]
"""The folders of all distributions of ours but the core's."""
EXAMPLE = ROOT / "examples" / "plugins" / "astuner-acme"
"""A third party's: of it, only the bounds are ours to say."""
BLOCK = re.compile(r"^# as all: (\w+)\n.*?^# end\n", re.M | re.S)
VERSION = re.compile(r'^version = "(.+)"$', re.M)


def bounds(version: str) -> tuple[str, str]:
    """Those that packages of ours have of one another: the usual, and that of what may change with any release."""
    major, minor, _ = version.split(".")
    return f">={major}.{minor},<{major}.{int(minor) + 1}", f"=={version}"


def alike(text: str, root: str, folder: str) -> str:
    """A pyproject.toml with the root's blocks in place of its own, for a project in ``folder``."""
    for found in BLOCK.finditer(root):
        block = found.group().replace("$HFPR_VERSION/", f"$HFPR_VERSION/{folder}/")
        if excluded := re.search(r'^requires-python = ".*<3\.(\d+)"', text, re.M):
            line = re.compile(r'^  "Programming Language :: Python :: 3\.(\d+)",\n', re.M)
            block = line.sub(lambda m, end=int(excluded[1]): m[0] if int(m[1]) < end else "", block)
        mine = next((b for b in BLOCK.finditer(text) if b[1] == found[1]), None)
        if mine is None:
            mark = found.group().partition("\n")[0]
            sys.exit(f"{folder}/pyproject.toml has no lines from {mark!r} to '# end'; copy them from another package")
        text = text[: mine.start()] + block + text[mine.end() :]
    return text


def wanted() -> dict[Path, str]:
    """Each pyproject.toml but the root's, as it should be."""
    root = (ROOT / "pyproject.toml").read_text("utf-8")
    (version,) = VERSION.findall(root)
    usual, exact = bounds(version)
    texts = {}
    for folder in (*OURS, EXAMPLE):
        text = (folder / "pyproject.toml").read_text("utf-8")
        if folder != EXAMPLE:
            text = alike(text, root, folder.relative_to(ROOT).as_posix())
            text = VERSION.sub(f'version = "{version}"', text, count=1)
        text = re.sub(r'("astuner-[\w-]+(?:\[[\w,-]+\])?)>=\d+\.\d+,<\d+\.\d+"', rf'\1{usual}"', text)
        text = re.sub(r'("astuner-[\w-]+)==\d+\.\d+\.\d+"', rf'\1{exact}"', text)
        text = re.sub(r"(# the hooks may change in )\d+\.\d+", rf"\g<1>{usual.partition('<')[2]}", text)
        texts[folder / "pyproject.toml"] = text
    return texts


def give_version(version: str) -> None:
    """A new one, to what is of the root."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        sys.exit(f"{version!r} is no version; type: make metadata VERSION=0.2.0")
    file, init = ROOT / "pyproject.toml", ROOT / "astuner_core" / "astuner" / "__init__.py"
    text = VERSION.sub(f'version = "{version}"', file.read_text("utf-8"), count=1)
    file.write_text(re.sub(r'("astuner-\w+)>=[\d.]+,<[\d.]+"', rf'\1{bounds(version)[0]}"', text), "utf-8")
    text = re.sub(r'^__version__ = ".*"$', f'__version__ = "{version}"', init.read_text("utf-8"), flags=re.M)
    api = version.rpartition(".")[0]  # it may change with these two, as the bounds say
    init.write_text(re.sub(r'^API_VERSION = ".*"$', f'API_VERSION = "{api}"', text, flags=re.M), "utf-8")


def main(version: str = "") -> None:
    if version:
        give_version(version)
    for path, text in wanted().items():
        path.write_text(text, "utf-8")
        shutil.copyfile(ROOT / "LICENSE", path.with_name("LICENSE"))


if __name__ == "__main__":
    main(*sys.argv[1:])
