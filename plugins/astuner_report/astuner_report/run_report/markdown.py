"""A document as Markdown that reads well as it is."""

from __future__ import annotations

import re

from astuner_report.run_report.document import Block, Callout, Code, Document, Figure, Table, Text, shown

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~!$&])")
_MARKS = {"good": "✓", "warning": "!", "error": "✗"}


def to_markdown(document: Document) -> str:
    parts = [f"# {escaped(document.title)}", escaped(document.subtitle)]
    for section in document.sections:
        parts.append(f"## {escaped(section.title)}")
        parts += [_block(block) for block in section.blocks]
    return "\n\n".join(parts) + "\n"


def escaped(text: str) -> str:
    """One line in which nothing is markup, not even HTML, a link, or the beginning of a list."""
    line = _SPECIAL.sub(r"\\\1", " ".join(shown(text).split()))
    line = line.replace("://", "\\://").replace("www.", "www\\.")  # which some would make links of
    return re.sub(r"^(\d+)([.)])(?= |$)", r"\1\\\2", re.sub(r"^([-+=])(?= |$)", r"\\\1", line))


def _block(block: Block) -> str:
    match block:
        case Text(text):
            return escaped(text)
        case Callout(level, text):
            return f"> {_MARKS[level]} {escaped(text)}"
        case Code(text):
            line = " ".join(shown(text).splitlines())
            fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", line)), default=0))
            return f"{fence}bash\n{line}\n{fence}"
        case Figure(_, file, caption):
            return f"![{escaped(caption)}]({file})"
        case Table(head, rows, numbers):
            rule = ["---:" if column in numbers else "---" for column in range(len(head))]
            lines = [head, *rows]
            cells = [[escaped(cell) for cell in line] for line in lines]
            cells.insert(1, rule)
            return "\n".join(f"| {' | '.join(line)} |" for line in cells)
