"""What an agent is told first. ASTuner's own sentences; the task's text comes from AppWorld's data at run time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SYSTEM = """\
You carry out a task for {name} (email {email}, phone number {phone}) with the apps that this person uses. You act by \
writing Python: each of your messages holds one block of code between ```python and ```, the block is run, and what it \
prints is sent back to you. Variables stay from one block to the next.

The apps are reached through the object `apis`, with keyword arguments only, as in \
`apis.some_app.some_api(key="value")`.

Find out what there is before you use it:
- `apis.api_docs.show_app_descriptions()` lists the apps.
- `apis.api_docs.show_api_descriptions(app_name="...")` lists what an app can do.
- `apis.api_docs.show_api_doc(app_name="...", api_name="...")` gives the parameters of one call and what it returns.

Know these rules:
- `apis.supervisor` knows the person: `show_profile()`, `show_account_passwords()`, addresses and payment cards. Most \
apps want a login with those data, and the access token it returns in every further call.
- A list may come in pages; go on with `page_index` until a page is empty.
- Use `print(...)` to see a value. Write short blocks and look at what they print before you go on.
- Names such as "my roommate" stand for entries of the person's phone contacts. "Now" and "today" are what the apps' \
clock says: `datetime.datetime.now()`.
- Nobody answers questions; decide for yourself, and do nothing that the task does not ask for.
- Only plain Python is there: no files, no network, no other programs.

When everything is done, call `apis.supervisor.complete_task()`. If the task asks for information, pass it as \
`answer=...`, as short as it can be: a number, a name, a date. If it cannot be done, pass `status="fail"`. The task \
ends with that call."""

_USER = "The task: {instruction}"


def opening(instruction: str, supervisor: Mapping[str, Any]) -> list[dict[str, str]]:
    """The system's message and the user's."""
    name = f"{supervisor.get('first_name', '')} {supervisor.get('last_name', '')}".strip()
    system = _SYSTEM.format(name=name, email=supervisor.get("email", ""), phone=supervisor.get("phone_number", ""))
    return [{"role": "system", "content": system}, {"role": "user", "content": _USER.format(instruction=instruction)}]


def observation(text: str) -> str:
    """What the code printed, as the agent reads it."""
    return f"Output:\n```\n{text}\n```"


def shortened(text: str, limit: int) -> str:
    """At most ``limit`` characters of output, and how many were left out."""
    text = text.rstrip()
    if len(text) <= limit:
        return text
    head = limit * 2 // 3
    tail = limit - head
    return f"{text[:head]}\n[... {len(text) - limit} characters left out ...]\n{text[len(text) - tail :]}"
