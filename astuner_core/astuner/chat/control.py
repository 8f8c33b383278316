"""Prevent external text (messages, tools) from becoming control tokens in a rendered prompt.

A tokenizer converts every occurrence of a control token's name in the rendered text to the control token. Only the
template may write such a name. External text can contain a complete name, or a part that the template or a second text
completes: ``<`` + key + ``>`` makes ``<|im_end|>`` of the key ``|im_end|``.

Characters that every such name would contain are therefore *marked* before rendering: each is replaced by a lone
surrogate. After rendering, a name with a marked character is forged. It gets a `CUT` (a `JOINT` if the text does not
contain the complete name), where the encoder splits the text, so the name is encoded as ordinary letters.

Marks must not change the template's decisions. The text is therefore also rendered without the marks of incomplete
names, and both results must have the same text. A text whose mark changes the rendering is left unmarked, and is
refused
if it is part of a forged name.

Cost: texts that neither contain a name nor start or end within one are rendered once, without marks. The same is true
for texts that are only parts of names, if the rendering contains none of these names.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from astuner.contracts.errors import UnsupportedRequest

CUT = f"astuner-cut-{secrets.token_hex(8)}"
"""Separator that splits a control token's name written by a text."""
JOINT = CUT + CUT
"""Separator that splits a name that a text would have completed."""
_MARK = re.compile("[\ud800-\udfff]")
_FIELDS = frozenset(re.findall(r"\w+", "role content name tool_calls tool_call_id reasoning_content id type function"))
_FIELDS |= {"arguments", "description", "parameters", "strict"}
"""Standard keys of messages, calls and tools."""
_FIXED_VALUES = {"type": frozenset(["function"]), "role": frozenset(["system", "user", "assistant", "tool"])}
_MESSAGE_LEVELS, _TOOL_LEVELS = 3, 2
"""Levels of nested mappings with such keys: message, call and function; tool and function."""
_WORD = 40
_MAX_SUBSETS = 64
"""Maximum number of cached searches for subsets of names."""
_NAMES_END = "\0"
_WHOLE_MARKS, _PART_MARKS = 0xD800, 0xDC00
"""First surrogates for characters of complete names and of parts of names; 1024 each."""


def split_at_cuts(rendered: str) -> list[str]:
    """Return the pieces of a rendering to be encoded separately."""
    return [piece for piece in rendered.split(CUT) if piece] or [""]


def without_cuts(rendered: str) -> str:
    """Return a rendering as people read it."""
    return rendered.replace(CUT, "")


class ControlNames:
    """The names of a tokenizer's control tokens, and the protection against texts that contain them."""

    def __init__(self, names: Iterable[str], separators: Iterable[str] = (), *, changes_case: bool = False) -> None:
        """Prepare the search.

        :param separators: Strings at which the chat template splits texts, or which it removes from them.
        :param changes_case: Whether the template changes the case of texts.
        """
        ordered = sorted(names, key=lambda name: (-len(name), name))
        separators = [*separators]
        self._only = lru_cache(_MAX_SUBSETS)(partial(ControlNames, separators=separators, changes_case=changes_case))
        """The same search for a subset of the names."""
        pattern = "|".join(map(re.escape, ordered)) or "(?!)"
        self._names = re.compile(pattern)
        self._in_other_case = re.compile(pattern, re.IGNORECASE) if changes_case else None
        self._joined = self._folded(_NAMES_END + "".join(name + _NAMES_END for name in ordered))
        self._longest = max(map(len, ordered), default=0)
        self._first = self._class_of(name[0] for name in ordered)
        self._last = self._class_of(name[-1] for name in ordered)
        self._separators = _any_of(separators)
        near = filter(None, (self._first.pattern, self._last.pattern, self._separators and self._separators.pattern))
        self._near = re.compile("|".join(near), self._first.flags & re.IGNORECASE)
        """Matches each text that contains a name or, if it is longer than any name, is a part of one."""
        letters = sorted({letter for name in ordered for letter in name})[: _PART_MARKS - _WHOLE_MARKS]
        self._whole_marks, self._part_marks = (
            {ord(letter): chr(first + n) for n, letter in enumerate(letters)} for first in (_WHOLE_MARKS, _PART_MARKS)
        )
        self._is_suspect_word = lru_cache(4096)(self._looks_suspect)
        """Cached for short texts, most of which repeat: names of tools and their arguments."""
        pairs = (*self._whole_marks.items(), *self._part_marks.items())
        self._letters = {mark: chr(letter) for letter, mark in pairs}

    def in_message(self, message: Mapping[str, Any]) -> bool:
        """Return whether a message (normalized) contains a complete name."""
        return any(map(self._names.search, _texts(message, _MESSAGE_LEVELS)))

    def in_tool(self, tool: Mapping[str, Any]) -> bool:
        """Return whether the description of a tool contains a complete name."""
        return any(map(self._names.search, _texts(tool, _TOOL_LEVELS)))

    def render(
        self,
        write: Callable[[Sequence[Any], Sequence[Any]], str],
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
    ) -> str:
        """Return the rendering of messages and tools, with a `CUT` or `JOINT` in each forged name.

        :param write: Renders the chat template.
        :raises UnsupportedRequest: The template refuses the messages, or a forged name cannot be split.
        """
        texts = [*_texts(messages, _MESSAGE_LEVELS), *_texts(tools, _TOOL_LEVELS)]
        suspects = self._suspects(texts)
        if not any(map(self._names.search, suspects)):
            text = write(messages, tools)
            if not (suspects and self._only(frozenset(self._names.findall(text)))._suspects(suspects)):
                return text
        undecodable = {text: _clean(text) for text in texts if _MARK.search(text)}
        whole = {text: self._marked(_clean(text), parts=False) for text in suspects}
        both = {text: self._marked(_clean(text), parts=True) for text in suspects}

        @lru_cache
        def rendered(*parts: str) -> str:
            table = {**undecodable, **whole, **{text: both[text] for text in parts}}
            return write(_mapped(messages, table, _MESSAGE_LEVELS), _mapped(tools, table, _TOOL_LEVELS))

        expected = rendered()
        marked = sorted(text for text in suspects if both[text] != whole[text])
        if not marked:
            return self._cut(expected)
        kept = _largest(marked, lambda parts: self._reads(rendered, parts) == self._plain(expected))
        text = self._cut(rendered(*kept))
        for dropped in sorted(set(marked) - set(kept)):
            self._check_unmarked(dropped, text, partial(rendered, *kept, dropped))
        return text

    def _suspects(self, texts: Iterable[str]) -> set[str]:
        """Return the texts that contain a name, or may be a part of one."""
        looks, looks_short = self._looks_suspect, self._is_suspect_word
        return {text for text in texts if (looks_short(text) if len(text) <= _WORD else looks(text))}

    def _looks_suspect(self, text: str) -> bool:
        """Return whether a text contains a name, or may be a part of one."""
        if not self._longest or (len(text.strip()) >= self._longest and not self._near.search(text)):
            return False
        return self._names.search(text) is not None or next(self._parts(text), None) is not None

    def _parts(self, text: str) -> Iterator[int]:
        """Yield positions of characters that any name with ``text`` as a part would contain.

        A name that starts or ends inside the text, or contains all of it, contains the text's last or first character.
        White space around the text does not count, because templates strip it.
        """
        for start, end in self._spans(text):
            if end - start < self._longest and self._folded(text[start:end]) in self._joined:
                yield from (start, end - 1)
                continue
            for match in self._first.finditer(text, max(start, end - self._longest), end):
                if _NAMES_END + self._folded(text[match.start() : end]) in self._joined:
                    yield end - 1
                    break
            for match in self._last.finditer(text, start, min(end, start + self._longest)):
                if self._folded(text[start : match.end()]) + _NAMES_END in self._joined:
                    yield start
                    break

        if self._in_other_case:
            yield from (match.start() for match in self._in_other_case.finditer(text))

    def _class_of(self, letters: Iterable[str]) -> re.Pattern[str]:
        flags = re.IGNORECASE if self._in_other_case else 0
        return re.compile("|".join(map(re.escape, set(letters))) or "(?!)", flags)

    def _folded(self, text: str) -> str:
        return text.lower() if self._in_other_case else text

    def _spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield start and end of each part between separators, without surrounding white space."""
        at = 0
        cuts = [match.span() for match in self._separators.finditer(text)] if self._separators else []
        for end, following in (*cuts, (len(text), 0)):
            part = text[at:end].rstrip()
            start = at + len(part) - len(part.lstrip())
            if part:
                yield start, at + len(part)
            at = following

    def _marked(self, text: str, *, parts: bool) -> str:
        marked = self._names.sub(lambda name: name[0].translate(self._whole_marks), text)
        if not parts:
            return marked
        letters = list(marked)
        for n in self._parts(text):
            if letters[n] == text[n]:
                letters[n] = text[n].translate(self._part_marks)
        return "".join(letters)

    def _plain(self, marked: str) -> str:
        return _MARK.sub(lambda mark: self._letters[mark[0]], marked)

    def _reads(self, rendered: Callable[..., str], parts: Sequence[str]) -> str | None:
        """Return the plain text of a rendering with these marks; None if the template refuses it because of them."""
        try:
            return self._plain(rendered(*parts))
        except UnsupportedRequest:
            return None

    def _cut(self, marked: str) -> str:
        """Return the plain text, with a `CUT` or `JOINT` after the first character of each forged name."""
        plain, pieces, start, at = self._plain(marked), list[str](), 0, 0
        while match := self._names.search(plain, at):
            at = match.end()
            if mark := _MARK.search(marked, *match.span()):
                at = match.start() + 1  # the rest may contain another name
                pieces += [plain[start:at], CUT if ord(mark[0]) < _PART_MARKS else JOINT]
                start = at
        return "".join([*pieces, plain[start:]])

    def _check_unmarked(self, text: str, written: str, marked: Callable[[], str]) -> None:
        """Check that a text whose mark changes the rendering is not part of a name.

        :raises UnsupportedRequest: It is.
        """
        try:
            harmless = self._cut(marked())
        except UnsupportedRequest:  # the template depends on exactly this text, such as a keyword of a schema
            return
        if self._sequence(harmless) != self._sequence(written):
            raise UnsupportedRequest(
                f"the text {text[:60]!r} becomes part of a control token in the chat template. Send it in another form"
            )

    def _sequence(self, rendered: str) -> list[str]:
        return [name for piece in split_at_cuts(rendered) for name in self._names.findall(piece)]


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    ordered = sorted(filter(None, texts), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _clean(text: str) -> str:
    """Return ``text`` without lone surrogates (for example from undecodable output), which are used as marks here."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if _MARK.search(text) else text


def _is_fixed(key: Any, member: Any) -> bool:
    """Return whether this is a standard member of a message, call or tool."""
    return type(member) is str and key in _FIXED_VALUES and member in _FIXED_VALUES[key]


def _texts(value: Any, levels: int) -> list[str]:
    """Return every external string in messages (``levels`` 3) or tools (2), including keys."""
    texts: list[str] = []
    _collect(value, levels, texts)
    return texts


def _collect(value: Any, levels: int, texts: list[str]) -> None:
    if isinstance(value, str):
        texts.append(value)
    elif isinstance(value, (dict, Mapping)):  # dict first, because the check of an abstract class is slower
        for key, member in value.items():
            if levels and key in _FIELDS:
                pass
            elif type(key) is str:
                texts.append(key)
            else:
                _collect(key, 0, texts)
            if type(member) is not str:
                _collect(member, levels and levels - 1, texts)
            elif not levels or key not in _FIXED_VALUES or member not in _FIXED_VALUES[key]:
                texts.append(member)
    elif isinstance(value, (list, tuple)):
        for member in value:
            _collect(member, levels, texts)


def _mapped(value: Any, table: Mapping[str, str], levels: int) -> Any:
    """Return a copy of messages or tools with the strings of `_texts` replaced."""
    if isinstance(value, str):
        return table.get(value, value)
    if isinstance(value, Mapping):
        return {
            key if levels and key in _FIELDS else _mapped(key, table, 0): (
                member if levels and _is_fixed(key, member) else _mapped(member, table, max(0, levels - 1))
            )
            for key, member in value.items()
        }
    return [_mapped(member, table, levels) for member in value] if isinstance(value, (list, tuple)) else value


def _largest(items: Sequence[str], fits: Callable[[Sequence[str]], bool]) -> list[str]:
    """Return items that fit together, found by bisection: usually all of them."""

    def extend(kept: list[str], more: Sequence[str]) -> list[str]:
        if fits([*kept, *more]):
            return [*kept, *more]
        if len(more) == 1:
            return kept
        half = len(more) // 2
        return extend(extend(kept, more[:half]), more[half:])

    return extend([], items)
