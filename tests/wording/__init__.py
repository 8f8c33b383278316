"""Check pages, docstrings, comments and messages for phrases that readers have to read twice.

``make lint`` runs ``python -m tests.wording``. The phrases and the number that each area may still contain are in
``phrases.yaml``. An area is a folder such as ``docs`` or ``plugins/astuner_view``. The numbers only decrease.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

PAGES = ("docs", "examples")
CODE = ("astuner_core", "plugins", "benchmarks", "docs", "examples")
NOT_FOR_USERS = ("CHANGELOG.md", "benchmarks/", "examples/search_documents/documents/")
GENERATED = re.compile(r"<!-- generated: [a-z ]+ -->\n.*?<!-- end -->", re.DOTALL)
CODE_BLOCK = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)
FEWEST_SPACES = 3
"""In a string literal that counts as a sentence."""


class Flagged(NamedTuple):
    """A phrase in a file."""

    path: str
    line: int
    name: str
    text: str

    @property
    def area(self) -> str:
        """Return the folder whose budget counts this phrase."""
        parts = Path(self.path).parts
        if len(parts) == 1:
            return "."
        return "/".join(parts[:2]) if parts[0] == "plugins" else parts[0]


def tracked_files(root: Path) -> list[str]:
    """Return the paths of the files that git tracks, relative to ``root``."""
    listing = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], capture_output=True, text=True, check=True)
    return [path for path in listing.stdout.split("\0") if path]


def is_page(path: str) -> bool:
    """Return whether a file is a page that users read."""
    parts = Path(path).parts
    in_a_page_folder = len(parts) == 1 or parts[0] in PAGES or parts[-1] == "README.md"
    return path.endswith(".md") and in_a_page_folder and "tests" not in parts


def hand_written_words(root: Path, paths: Iterable[str]) -> int:
    """Return the number of words of all pages, without their generated parts, the changelog and benchmarks."""
    pages = [path for path in paths if is_page(path) and not path.startswith(NOT_FOR_USERS)]
    return sum(len(GENERATED.sub("", (root / path).read_text(encoding="utf-8")).split()) for path in pages)


def prose(path: str, content: str) -> Iterator[tuple[int, str]]:
    """Yield line numbers and texts of a page, or of the docstrings, messages and comments of a module."""
    parts = Path(path).parts
    if is_page(path):
        yield 1, CODE_BLOCK.sub(lambda block: "\n" * block[0].count("\n"), content)
    elif path.endswith(".py") and parts[0] in CODE and "tests" not in parts:
        for node in ast.walk(ast.parse(content)):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and text.count(" ") >= FEWEST_SPACES:
                yield node.lineno, text
        for token in tokenize.generate_tokens(io.StringIO(content).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def flagged_phrases(root: Path, paths: Iterable[str], phrases: Mapping[str, str]) -> list[Flagged]:
    """Return the flagged phrases of some files.

    :param paths: relative to ``root``; files without prose are skipped.
    :param phrases: regular expressions by name; upper and lower case are equal.
    """
    expressions = {name: re.compile(phrase, re.IGNORECASE) for name, phrase in phrases.items()}
    return [
        Flagged(path, first + text[: match.start()].count("\n"), name, " ".join(match[0].split()))
        for path in paths
        if path.endswith((".md", ".py")) and (root / path).is_file()
        for first, text in prose(path, (root / path).read_text(encoding="utf-8"))
        for name, expression in expressions.items()
        for match in expression.finditer(text)
    ]


def compare_with_budget(flagged: Iterable[Flagged], budget: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return (number of phrases, budget) of each area in which they differ."""
    counts = Counter(phrase.area for phrase in flagged)
    return {
        area: (counts[area], budget.get(area, 0))
        for area in sorted({*counts, *budget})
        if counts[area] != budget.get(area, 0)
    }
