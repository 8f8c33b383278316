"""What a chat template does not show of the messages it is given.

Some templates take only the first or the last system message, and say nothing about the others.

Invariant: a message is said to be left out only when its text is nowhere in the rendering, in no spelling.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence

from astuner.contracts.messages import Message


def left_out(text: str, messages: Sequence[Message], render: Callable[[list[Message]], str]) -> list[Message]:
    """Those of ``messages`` (normalised) that ``text`` does not show.

    Assistant messages are not looked at: templates drop earlier reasoning on purpose.

    :param text: what the template wrote for them.
    :param render: writes again, for other contents.  It is used where a text is found neither as it stands nor as JSON
        (gpt-oss), as in a template that escapes it in another way.
    """
    missing = [n for n, m in enumerate(messages) if m["role"] != "assistant" and not _stands_in(text, m["content"])]
    if not missing:
        return []
    marks = {n: f"shown{secrets.token_hex(8)}" for n in missing}
    again = render([{**m, "content": marks[n]} if n in marks else m for n, m in enumerate(messages)]).lower()
    return [messages[n] for n, mark in marks.items() if mark not in again]


def _stands_in(text: str, content: str) -> bool:
    said = content.strip()
    return said in text or json.dumps(said, ensure_ascii=False)[1:-1] in text
