"""Play an environment manually: lines become the agent's messages, and observations are shown.

`Lines` reads from a terminal or a pipe, `Screen` and `json_line` show events, and `play` connects them to the
environment. Invariant: every action was written by the user; at the end of the input the environment is evaluated.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from astuner.contracts.environment import Environment, Evaluation, StepResult
from astuner.contracts.errors import ConfigError
from astuner.contracts.types import Task

HELP = """\
Each line is a message of the agent. A line with an opening fence (```) starts a block up to the closing fence.
  :block            Send all lines up to the next empty line as one message
  :file PATH        Send the content of a file as one message
  :call NAME JSON   Call a tool, for example :call move {"to": "north"}
  :evaluate         Show the current score
  :describe         Show the description of the environment
  :tools            Show the tools of the environment
  :quit             Quit (or Ctrl-D)
  ::…               Send a message that starts with a colon"""

Action = Mapping[str, Any]
Ending = Literal["terminated", "truncated", "quit", "input ended"]


Show = Callable[..., None]
"""Receives the name of an event and its data as keyword arguments."""


class Lines:
    """Reader of standard input, line by line."""

    def __init__(self, prompt: str = "") -> None:
        """Create a reader.

        :param prompt: Shown before each line, with editing and history. Empty: not interactive.
        """
        self._prompt = prompt
        if prompt:
            with contextlib.suppress(ImportError):  # reading works without it
                import readline  # noqa: F401

    def next(self, prompt: str | None = None) -> str | None:
        """Return the next line without its line break, or None at the end of the input.

        :param prompt: Prompt to show instead of the default, inside a block.
        :raises ConfigError: The input cannot be decoded.
        """
        try:
            return input((prompt or self._prompt) if self._prompt else "")
        except EOFError:
            return None
        except UnicodeDecodeError as e:
            raise ConfigError(f"Standard input is not valid {e.encoding}: {e.reason}") from None

    def block(self, ends: Callable[[str], bool]) -> list[str]:
        """Return all lines up to and including the one that ends the block, or up to the end of the input."""
        lines: list[str] = []
        while (line := self.next("… ")) is not None:
            lines.append(line)
            if ends(line):
                break
        return lines


class Command(str):
    """Command instead of an action: ``evaluate``, ``describe``, ``tools``, ``quit`` or ``help``."""


def read(lines: Lines) -> Action | Command | None:
    """Return the next action or command, or None at the end of the input.

    :raises ValueError: The command is unknown or incomplete.
    """
    while (line := lines.next()) is not None and not line.strip():
        pass  # skip empty lines; :block followed by an empty line sends an empty message
    if line is None:
        return None
    if line.lstrip().startswith("```"):
        fence = line.lstrip()[: len(line.lstrip()) - len(line.lstrip().lstrip("`"))]
        return _said("\n".join([line, *lines.block(lambda text: text.strip() == fence)]))
    if line.startswith("::"):
        return _said(line[1:])
    if not line.startswith(":"):
        return _said(line)
    name, _, rest = line[1:].partition(" ")
    if name in ("evaluate", "describe", "tools", "quit", "help"):
        return Command(name)
    if name == "block":
        return _said("\n".join(lines.block(lambda text: not text)).rstrip("\n"))
    if name == "file":
        try:
            return _said(Path(rest.strip()).expanduser().read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as e:
            raise ValueError(f":file {rest.strip()}: {e}") from None
    if name == "call":
        return _called(rest)
    raise ValueError(
        f"Unknown command :{name}. Enter :help for a list, or :: to send a message that starts with a colon."
    )


def _said(text: str) -> Action:
    return {"role": "assistant", "content": text}


def _called(text: str) -> Action:
    name, _, arguments = text.strip().partition(" ")
    try:
        data = json.loads(arguments or "{}")
    except ValueError as e:
        raise ValueError(f":call {name}: the arguments are not valid JSON: {e}") from None
    if not name or not isinstance(data, dict):
        raise ValueError(':call requires a name and a JSON object, for example :call move {"to": "north"}')
    function = {"name": name, "arguments": json.dumps(data, ensure_ascii=False)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }


def play(world: Environment, task: Task, lines: Lines, show: Show, *, strict: bool) -> Ending:
    """Reset ``world`` to ``task`` and play until the episode or the input ends.

    :param strict: Whether an invalid line is an error instead of a note.
    :raises ConfigError: An invalid line, if ``strict``.
    :raises EnvironmentFailed: The environment failed.
    """
    result = world.reset(task)
    show("start", task_id=task.task_id, **_seen(result))
    reward, steps = result.reward, 0
    ending: Ending | None = _over(result)
    while ending is None:
        try:
            given = read(lines)
        except ValueError as e:
            if strict:
                raise ConfigError(str(e)) from None
            show("note", text=str(e))
            continue
        if given is None:
            ending = "input ended"
        elif isinstance(given, Command):
            if given == "quit":
                ending = "quit"
            elif given == "help":
                show("note", text=HELP)
            elif given == "evaluate":
                show("evaluation", **_evaluation(world))
            else:
                described = dict(world.describe())
                if given == "tools":
                    described = {"tools": described.get("tools", [])}
                show("description", data=described)
        else:
            result = world.step(given)
            reward, steps = reward + result.reward, steps + 1
            show("step", action=given, **_seen(result))
            ending = _over(result)
    show("end", reason=ending, steps=steps, reward=reward, evaluation=_evaluation(world))
    return ending


def _evaluation(world: Environment) -> dict[str, Any]:
    found = Evaluation.of(world.evaluate())
    return {"score": found.score, "success": found.is_success, "details": dict(found.details)}


def _seen(result: StepResult) -> dict[str, Any]:
    data = asdict(result)
    return {**data, "messages": [dict(message) for message in result.as_messages], "info": dict(result.info)}


def _over(result: StepResult) -> Ending | None:
    return "terminated" if result.terminated else "truncated" if result.truncated else None


def json_line(event: str, **data: Any) -> None:
    """Print an event as one line of JSON."""
    print(json.dumps({"event": event, **data}, ensure_ascii=False, default=str), flush=True)


class Screen:
    """Printer of events for people."""

    def __init__(self, *, echo: bool = False) -> None:
        """Create a printer.

        :param echo: Whether to show the actions too, because they were not typed in this terminal.
        """
        self._echo = echo

    def __call__(self, event: str, **data: Any) -> None:
        print("\n".join(self._lines(event, data)), flush=True)

    def _lines(self, event: str, data: Mapping[str, Any]) -> list[str]:
        if event == "note":
            return [data["text"]]
        if event == "description":
            return [json.dumps(data["data"], ensure_ascii=False, indent=2, default=str)]
        if event == "evaluation":
            return [_score(data)]
        if event == "end":
            ended = f"{data['reason']} after {data['steps']} steps, reward {data['reward']:g}"
            return ["", f"{ended}; {_score(data['evaluation'])}"]
        lines = [f"task {data['task_id']}", ""] if event == "start" else []
        if self._echo and event == "step":
            calls = [call["function"] for call in data["action"].get("tool_calls") or ()]
            called = ", ".join(f"{call['name']}({call['arguments']})" for call in calls)
            lines += ["", f"> {data['action']['content'] or called}"]
        for message in data["messages"]:
            head = "" if message.get("role", "user") == "user" else f"[{message['role']}] "
            lines.append(head + _text(message.get("content")))
        if data["reward"]:
            lines.append(f"(reward {data['reward']:g})")
        return lines


def _score(data: Mapping[str, Any]) -> str:
    details = f"  {json.dumps(data['details'], ensure_ascii=False, default=str)}" if data["details"] else ""
    return f"score {data['score']:g}, {'success' if data['success'] else 'no success'}{details}"


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)
