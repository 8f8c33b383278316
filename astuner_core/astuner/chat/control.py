"""Keep text from outside (messages, tools) from becoming control tokens in a rendered prompt.

A tokenizer makes a control token of every occurrence of its name in the rendered text.  Only the template may write
such a name.  Text from outside can hold a complete name, or a part of one that the template, or a second text,
completes: ``<`` + key + ``>`` makes ``<|im_end|>`` of the key ``|im_end|``.

So the characters that every such name would have to contain are *marked* before rendering: each is replaced by a lone
surrogate.  After rendering, a name that contains a marked character is forged.  It gets a `CUT`
(a `JOINT` where the text does not hold the complete name itself), at which the encoder splits the text, and is encoded
as the letters that it has.

Marks must not change what a template decides.  The text is therefore also rendered without the marks of incomplete
names, and must read the same.  A text whose mark changes the rendering is left unmarked, and is refused if it takes
part in a forged name.

Cost: texts that neither hold a name nor begin or end within one are rendered once, without marks.  So are texts that
are parts of names only, where the rendering contains none of these names.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from astuner.contracts.errors import UnsupportedRequest

CUT = f"astuner-cut-{secrets.token_hex(8)}"
"""Separator in a rendering where the name of a control token, written by a text, is split."""
JOINT = CUT + CUT
"""The same, of a name that a text would have completed."""
_MARK = re.compile("[\ud800-\udfff]")
_FIELDS = frozenset(re.findall(r"\w+", "role content name tool_calls tool_call_id reasoning_content id type function"))
_FIELDS |= {"arguments", "description", "parameters", "strict"}
"""Keys that messages, calls and tools have by their form."""
_FIXED_VALUES = {"type": frozenset(["function"]), "role": frozenset(["system", "user", "assistant", "tool"])}
_MESSAGE_LEVELS, _TOOL_LEVELS = 3, 2
"""Nested mappings that have such keys: message, call and function; tool and function."""
_WORD = 40
_MAX_SUBSETS = 64
"""Sets of names that renderings contain, of which each has its own search."""
_NAMES_END = "\0"
_WHOLE_MARKS, _PART_MARKS = 0xD800, 0xDC00
"""First surrogates for characters of complete names and of parts of names; 1024 each."""


def split_at_cuts(rendered: str) -> list[str]:
    """Return the pieces of a rendering that are to be encoded separately."""
    return [piece for piece in rendered.split(CUT) if piece] or [""]


def without_cuts(rendered: str) -> str:
    """Return a rendering as people read it."""
    return rendered.replace(CUT, "")


class ControlNames:
    """The names of a tokenizer's control tokens, and how text from outside is kept from making them."""

    def __init__(self, names: Iterable[str], separators: Iterable[str] = (), *, changes_case: bool = False) -> None:
        """Prepare the search.

        :param separators: strings at which the chat template splits texts, or which it removes from them.
        :param changes_case: the template writes texts in small or capital letters.
        """
        ordered = sorted(names, key=lambda name: (-len(name), name))
        separators = [*separators]
        self._only = lru_cache(_MAX_SUBSETS)(partial(ControlNames, separators=separators, changes_case=changes_case))
        """The same search, for some of the names."""
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
        """What a text holds that holds a name or, if it is longer than any name, is a part of one."""
        letters = sorted({letter for name in ordered for letter in name})[: _PART_MARKS - _WHOLE_MARKS]
        self._whole_marks, self._part_marks = (
            {ord(letter): chr(first + n) for n, letter in enumerate(letters)} for first in (_WHOLE_MARKS, _PART_MARKS)
        )
        self._is_suspect_word = lru_cache(4096)(self._looks_suspect)
        """For short texts, most of which come again: names of tools and their arguments."""
        pairs = (*self._whole_marks.items(), *self._part_marks.items())
        self._letters = {mark: chr(letter) for letter, mark in pairs}

    def in_message(self, message: Mapping[str, Any]) -> bool:
        """Return whether a message (normalised) holds a complete name."""
        return any(map(self._names.search, _texts(message, _MESSAGE_LEVELS)))

    def in_tool(self, tool: Mapping[str, Any]) -> bool:
        """Return whether the description of a tool holds a complete name."""
        return any(map(self._names.search, _texts(tool, _TOOL_LEVELS)))

    def render(
        self,
        write: Callable[[Sequence[Any], Sequence[Any]], str],
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
    ) -> str:
        """Return what ``write`` makes of messages and tools, with a `CUT` or `JOINT` in each forged name.

        :param write: renders the chat template.
        :raises UnsupportedRequest: the template refuses the messages, or a name is forged and cannot be split.
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
        """Return the texts that hold a name, or may be a part of one."""
        looks, looks_short = self._looks_suspect, self._is_suspect_word
        return {text for text in texts if (looks_short(text) if len(text) <= _WORD else looks(text))}

    def _looks_suspect(self, text: str) -> bool:
        """Return whether a text holds a name, or may be a part of one."""
        if not self._longest or (len(text.strip()) >= self._longest and not self._near.search(text)):
            return False
        return self._names.search(text) is not None or next(self._parts(text), None) is not None

    def _parts(self, text: str) -> Iterator[int]:
        """Yield the characters of ``text`` that any name would contain of which the text is a part.

        A name that begins or ends inside of the text, or has all of it in its middle, contains the text's last or first
        character.  White space around the text does not count, since templates strip it.
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
        """Yield begin and end of each part between separators, without the white space around it."""
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
        """What a rendering with these marks reads like; None where the template refuses it because of them."""
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
                at = match.start() + 1  # what remains of it may hold another name
                pieces += [plain[start:at], CUT if ord(mark[0]) < _PART_MARKS else JOINT]
                start = at
        return "".join([*pieces, plain[start:]])

    def _check_unmarked(self, text: str, written: str, marked: Callable[[], str]) -> None:
        """Check that a text whose mark changes the rendering takes part in no name.

        :raises UnsupportedRequest: it does.
        """
        try:
            harmless = self._cut(marked())
        except UnsupportedRequest:  # the template depends on exactly this text, such as a keyword of a schema
            return
        if self._sequence(harmless) != self._sequence(written):
            raise UnsupportedRequest(
                f"the text {text[:60]!r} becomes part of a control token in the chat template; send it in another form"
            )

    def _sequence(self, rendered: str) -> list[str]:
        return [name for piece in split_at_cuts(rendered) for name in self._names.findall(piece)]


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    ordered = sorted(filter(None, texts), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _clean(text: str) -> str:
    """Return ``text`` without lone surrogates (from a tool's undecodable output), which are used as marks here."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if _MARK.search(text) else text


def _is_fixed(key: Any, member: Any) -> bool:
    """Return whether a message, call or tool has this member by its form."""
    return type(member) is str and key in _FIXED_VALUES and member in _FIXED_VALUES[key]


def _texts(value: Any, levels: int) -> list[str]:
    """Return every string from outside in messages (``levels`` 3) or tools (2), keys included."""
    texts: list[str] = []
    _collect(value, levels, texts)
    return texts


def _collect(value: Any, levels: int, texts: list[str]) -> None:
    if isinstance(value, str):
        texts.append(value)
    elif isinstance(value, (dict, Mapping)):  # a plain one is told apart without asking its abstract class
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
    """Return items that fit together, found by halving: all of them where they do, as is usual."""

    def extend(kept: list[str], more: Sequence[str]) -> list[str]:
        if fits([*kept, *more]):
            return [*kept, *more]
        if len(more) == 1:
            return kept
        half = len(more) // 2
        return extend(extend(kept, more[:half]), more[half:])

    return extend([], items)
