"""Call a chat template in the fastest way that gives the same result as transformers.

transformers' `apply_chat_template` spends up to half of its time on looking up the template and on checking and copying
values. This module calls the compiled template directly, in transformers' sandbox and with the same plain data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from astuner.contracts.chat_family import Tools
from astuner.contracts.messages import Message

_SCALARS = frozenset([str, int, float, bool, type(None)])


class Write(Protocol):
    """Write messages and tools as text."""

    def __call__(self, messages: Sequence[Message], tools: Tools, *, generation_prompt: bool) -> str: ...


def through_transformers(tokenizer: Any, template: str | None, variables: Mapping[str, Any]) -> Write:
    """Return a function that calls `apply_chat_template`.

    :param template: Jinja text; None for the tokenizer's template.
    """

    def write(messages: Sequence[Message], tools: Tools, *, generation_prompt: bool) -> str:
        text = tokenizer.apply_chat_template(
            messages,
            tools=[*tools] or None,
            chat_template=template,
            add_generation_prompt=generation_prompt,
            tokenize=False,
            **variables,
        )
        assert isinstance(text, str)  # tokenize=False
        return text

    return write


def fastest_writer(
    tokenizer: Any,
    template: str | None,
    variables: Mapping[str, Any],
    tried: Iterable[tuple[Sequence[Message], Tools]],
) -> Write:
    """Return `through_transformers`, or a faster function with equal results for all conversations in ``tried``."""
    slow = through_transformers(tokenizer, template, variables)
    fast = _direct(tokenizer, template, variables, otherwise=slow)
    if fast is None:
        return slow
    asks = (True, False)
    same = all(_outcome(fast, *each, ask) == _outcome(slow, *each, ask) for each in tried for ask in asks)
    return fast if same else slow


def _outcome(write: Write, messages: Sequence[Message], tools: Tools, ask: bool) -> tuple[type | None, str]:
    try:
        return None, write(messages, tools, generation_prompt=ask)
    except Exception as e:  # templates may raise anything for messages that they do not support
        return type(e), str(e)


def _direct(tokenizer: Any, template: str | None, variables: Mapping[str, Any], *, otherwise: Write) -> Write | None:
    """Return a function that calls the compiled template.

    :param otherwise: Function for data that is not plain, which transformers converts or refuses.
    :return: None if the tokenizer has a custom implementation or several templates, or for other transformers releases.
    """
    from transformers import PreTrainedTokenizerBase
    from transformers.utils import chat_template_utils

    of_release: Any = chat_template_utils
    text = template or tokenizer.chat_template
    apply = getattr(tokenizer.apply_chat_template, "__func__", None)
    if apply is not PreTrainedTokenizerBase.apply_chat_template or isinstance(tokenizer.chat_template, Mapping):
        return None
    given = {"documents": None, **tokenizer.special_tokens_map, **variables}
    try:
        render, with_aliases = of_release._compile_jinja_template(text).render, of_release._alias_reasoning_fields
        reasoning = frozenset(of_release._REASONING_FIELDS)
    except AttributeError:
        return None
    if not _is_plain(given):
        return None

    def write(messages: Sequence[Message], tools: Tools, *, generation_prompt: bool) -> str:
        if not (messages and all(map(_is_plain_dict, messages)) and all(map(_is_plain_dict, tools))):
            return otherwise(messages, tools, generation_prompt=generation_prompt)
        chat = [*messages]
        for n, message in enumerate(messages):
            if None in message.values():
                chat[n] = {key: member for key, member in message.items() if member is not None}
            if not reasoning.isdisjoint(message):
                chat[n : n + 1] = with_aliases(chat[n : n + 1])
        written: str = render(messages=chat, tools=[*tools] or None, add_generation_prompt=generation_prompt, **given)
        return written

    return write


def _is_plain_dict(value: Any) -> bool:
    return type(value) is dict and _is_plain(value)


def _is_plain(value: Any) -> bool:
    """Return whether a value consists of JSON types only, which a template in the sandbox cannot modify."""
    kind = type(value)
    if kind is dict:
        for key, member in value.items():
            if type(key) is not str or (type(member) is not str and not _is_plain(member)):
                return False
        return True
    return all(map(_is_plain, value)) if kind is list else kind in _SCALARS
