"""Read from a chat template's source which strings it searches for in messages, and how it uses them.

A template decides by roles, by the fields of a message, and sometimes by words in a text: ``/no_think`` disables
thinking, ``</think>`` separates a thought from an answer. These words are string constants of the template.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

_CUTTERS = frozenset(["split", "rsplit", "partition", "rpartition", "replace", "removeprefix", "removesuffix"])
"""Methods and filters after which parts of a text may be adjacent to each other, or to the template's text."""
_CASES = frozenset(["lower", "upper", "title", "capitalize", "swapcase", "casefold"])
_FIELD = re.compile(
    "role|content|names?|tool_calls?|tool_call_id|tool_responses?|tool_results|reasoning|reasoning_content|thinking|thought"
    "|id|call_id|type|functions?|arguments|parameters|properties|required|description|items|enum|return|response|text"
    "|image|image_url|images|video|input_audio|audio|file|user|assistant|system|developer|tool|model|ipython|citations"
    "|documents"
)
"""Words that a template searches in the keys of a message or tool, not in its text."""


class Literals(NamedTuple):
    """String constants of a chat template that concern texts."""

    held: frozenset[str]
    """Constants that it searches for in texts."""
    equal: frozenset[str]
    """Constants that it compares with complete values."""
    separators: frozenset[str]
    """Constants at which it splits texts, or which it removes from them."""
    changes_case: bool
    """Whether it changes the case of texts."""
    counts: bool
    """Whether it compares numbers, such as the number of messages, or takes remainders, except for 0, 1 and 2."""

    @classmethod
    def of(cls, templates: Iterable[str]) -> Literals:
        """Read the sources of one or more templates."""
        held, equal, separators = set[str](), set[str](), set[str]()
        changes_case = counts = False
        for tree in map(_parsed, templates):
            for word in _looked_for(tree):
                if word.strip() and not _FIELD.fullmatch(word):
                    held.add(word)
            equal.update(_compared(tree))
            separators.update(filter(None, _cut_at(tree)))
            changes_case = changes_case or _changes_case(tree)
            counts = counts or _counts(tree)
        return cls(frozenset(held), frozenset(equal), frozenset(separators), changes_case, counts)

    def pattern(self) -> re.Pattern[str] | None:
        """Return a pattern that matches any of `held`, or None if it is empty."""
        return re.compile("|".join(map(re.escape, sorted(self.held)))) if self.held else None


def sources(template: Any) -> list[str]:
    """Return the texts of a tokenizer's ``chat_template``: one text, or several by name."""
    return [text for text in (template.values() if isinstance(template, Mapping) else [template]) if text]


def _parsed(template: str) -> Any:
    """Return the syntax tree, parsed with the tags that transformers adds to Jinja."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    tree: Any = _compile_jinja_template(template).environment.parse(template)
    return tree


def _looked_for(tree: Any) -> Iterator[str]:
    from jinja2 import nodes

    for compare in tree.find_all(nodes.Compare):
        for operand in compare.ops:
            if operand.op in ("in", "notin") and not isinstance(operand.expr, (nodes.List, nodes.Tuple, nodes.Dict)):
                yield from _strings(compare.expr)
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr not in ("get", "strip", "lstrip", "rstrip"):
            for argument in call.args:
                yield from _strings(argument)
    for assigned in tree.find_all((nodes.Assign, nodes.Keyword)):  # ``set``, and members of a namespace
        value = assigned.node if isinstance(assigned, nodes.Assign) else assigned.value
        if isinstance(value, nodes.Const) and isinstance(value.value, str) and not value.value.isidentifier():
            yield value.value


def _compared(tree: Any) -> Iterator[str]:
    from jinja2 import nodes

    for compare in tree.find_all(nodes.Compare):
        yield from (word.strip() for word in _strings(compare))


def _cut_at(tree: Any) -> Iterator[str]:
    from jinja2 import nodes

    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _CUTTERS and call.args:
            yield from _strings(call.args[0])
    for filtered in tree.find_all(nodes.Filter):
        if filtered.name in _CUTTERS and filtered.args:
            yield from _strings(filtered.args[0])


def _changes_case(tree: Any) -> bool:
    from jinja2 import nodes

    used = {node.name for node in tree.find_all(nodes.Filter)} | {node.attr for node in tree.find_all(nodes.Getattr)}
    return not used.isdisjoint(_CASES)


def _counts(tree: Any) -> bool:
    from jinja2 import nodes

    constants = (
        constant.value
        for node in tree.find_all((nodes.Compare, nodes.Mod))
        if not any(_measures_text(inner) for inner in node.find_all(nodes.Filter))
        for constant in node.find_all(nodes.Const)
    )
    return any(type(value) in (int, float) and value > 2 for value in constants)


def _measures_text(node: Any) -> bool:
    """Return whether this measures something other than a list of messages, such as an ID."""
    from jinja2 import nodes

    measured = node.node
    name = measured.name if isinstance(measured, nodes.Name) else ""
    return node.name in ("length", "count") and "messages" not in name


def _strings(node: Any) -> Iterator[str]:
    from jinja2 import nodes

    for constant in [node] if isinstance(node, nodes.Const) else node.find_all(nodes.Const):
        if isinstance(constant.value, str):
            yield constant.value
