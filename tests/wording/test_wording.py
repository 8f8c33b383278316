"""The wording check finds phrases in each kind of text and compares their number with the budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.table import table
from tests.wording import Flagged, compare_with_budget, flagged_phrases, hand_written_words

PHRASES = {"nobody": r"\bnobody\b", "is told": r"\bis told\b"}


def flagged(tmp_path: Path, path: str, text: str) -> list[tuple[int, str]]:
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(text)
    return [(phrase.line, phrase.name) for phrase in flagged_phrases(tmp_path, [path], PHRASES)]


@table(
    ("path", "text", "expected"),
    [
        ("README.md", "One.\n\nNobody reads it.\n", [(3, "nobody")]),
        ("docs/a/page.md", "It is told, and\nnobody is told.\n", [(2, "nobody"), (1, "is told"), (2, "is told")]),
        ("plugins/astuner_x/README.md", "Nobody\n", [(1, "nobody")]),
        ("docs/page.md", "```\nnobody\n```\nNobody\n", [(4, "nobody")]),
        ("docs/page.md", "A line break: it is\ntold.\n", []),  # as written in the patterns
        ("plugins/astuner_x/notes.md", "Nobody\n", []),  # neither a page nor a README
        ("tests/README.md", "Nobody\n", []),
        ("astuner_core/a.py", '"""First.\n\nNobody calls it now.\n"""\n', [(3, "nobody")]),
        ("astuner_core/a.py", "x = 1  # nobody reads it\n", [(1, "nobody")]),
        ("plugins/p/a.py", 'raise ValueError(f"nobody asked for {x} here")\n', [(1, "nobody")]),
        ("plugins/p/a.py", 'names = ["nobody", "is told"]\n', []),  # not sentences
        ("plugins/p/tests/test_a.py", "# nobody\n", []),
        ("plugins/p/a.js", "// nobody\n", []),
    ],
)
def test_phrases_are_found_where_people_read(
    path: str, text: str, expected: list[tuple[int, str]], tmp_path: Path
) -> None:
    assert flagged(tmp_path, path, text) == expected


@table(
    ("path", "area"),
    [
        ("README.md", "."),
        ("docs/backbones/verl.md", "docs"),
        ("plugins/astuner_view/astuner_view/app.py", "plugins/astuner_view"),
        ("astuner_core/astuner/chat/codec.py", "astuner_core"),
    ],
)
def test_a_phrase_belongs_to_an_area(path: str, area: str) -> None:
    assert Flagged(path, 1, "nobody", "nobody").area == area


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ({"docs": 2}, {}),
        ({"docs": 1}, {"docs": (2, 1)}),
        ({"docs": 3}, {"docs": (2, 3)}),
        ({}, {"docs": (2, 0)}),
        ({"docs": 2, "plugins/p": 1}, {"plugins/p": (0, 1)}),
    ],
)
def test_more_and_fewer_phrases_than_the_budget_are_reported(
    budget: dict[str, int], expected: dict[str, tuple[int, int]]
) -> None:
    phrases = [Flagged("docs/a.md", line, "nobody", "nobody") for line in (1, 2)]
    assert compare_with_budget(phrases, budget) == expected


def test_generated_parts_and_the_changelog_do_not_count_as_hand_written(tmp_path: Path) -> None:
    pages = {
        "README.md": "two words\n<!-- generated: keys -->\nnot these words\n<!-- end -->\n",
        "CHANGELOG.md": "not these words",
        "benchmarks/README.md": "not these words",
        "plugins/astuner_x/README.md": "three more words",
        "plugins/astuner_x/notes.md": "not these words",
    }
    for path, text in pages.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert hand_written_words(tmp_path, pages) == 5
