"""HTML of runs and episodes for notebooks.

Episodes contain untrusted text, so the templates escape every value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import singledispatch
from typing import Any

from markupsafe import Markup

from astuner.contracts.display import Displayed, RunView
from astuner.contracts.errors import safe_text
from astuner.contracts.types import Episode, ExternalTurn, Turn
from astuner_record.episode_log import LoggedEpisode
from astuner_report.curve import reward_curve_svg
from astuner_report.rendering import rendered

MAIN_METRICS = ("val/success", "val/reward/mean", "success/mean", "reward/mean", "response_length/mean", "entropy")
MOST_MESSAGES = 100


@singledispatch
def to_html(displayed: Displayed) -> str:
    """Return the HTML of a run, a result or an episode, without scripts.

    :raises NotImplementedError: The object has neither a known type nor a ``view``.
    """
    if isinstance(view := getattr(displayed, "view", None), Displayed):
        return to_html(view)
    raise NotImplementedError(f"{type(displayed).__name__} has no HTML representation")


@to_html.register
def _(view: RunView) -> str:
    at = view.progress
    return rendered(
        "notebook_run.html",
        view=view,
        steps_done=max((row["step"] for row in view.rows if "reward/mean" in row), default=0),
        remaining=at.remaining if at else None,
        curve=Markup(reward_curve_svg(view.rows)) if view.rows else "",  # escaped by its own template
        metrics=_first_and_last(view.rows) if view.status else {},
    )


@to_html.register
def _(episode: Episode) -> str:
    return _episode_html(episode)


@to_html.register
def _(logged: LoggedEpisode) -> str:
    return _episode_html(logged.episode, {f"{c.agent} {c.sample}": c.advantage for c in logged.credit})


def _episode_html(episode: Episode, advantages: Mapping[str, float] | None = None) -> str:
    messages = [*_messages(episode)]
    return rendered(
        "notebook_episode.html",
        episode=episode,
        task=episode.workflow_task.task,
        outcome={None: "", True: "success", False: "no success"}[episode.is_success],
        response=safe_text(episode.output.response) if episode.output and episode.output.response is not None else "",
        advantages=advantages or {},
        messages=messages[:MOST_MESSAGES],
        omitted=max(0, len(messages) - MOST_MESSAGES),
    )


def _messages(episode: Episode) -> Iterator[tuple[str, str]]:
    """Yield speaker and text of each message, in the order of the replies."""
    turns: list[Turn | ExternalTurn] = [*episode.turns, *episode.external]
    for turn in sorted(turns, key=lambda turn: turn.index):
        for message in turn.request:
            yield str(message.get("role", "")), _text(message)
        yield f"{turn.agent} (reply {turn.index})", _text(turn.message)


def _text(message: Mapping[str, Any]) -> str:
    """Return the content of a message, with its reasoning and tool calls."""
    content = message.get("content")
    calls: Sequence[Any] = message.get("tool_calls") or ()
    parts = [message.get("reasoning_content"), content, *(call.get("function", call) for call in calls)]
    return safe_text("\n".join(p if isinstance(p, str) else json.dumps(p, ensure_ascii=False) for p in parts if p))


def _first_and_last(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return the first and the last value of the main metrics."""
    values = {name: [row[name] for row in rows if row.get(name) is not None] for name in MAIN_METRICS}
    return {name: (numbers[0], numbers[-1]) for name, numbers in values.items() if numbers}
