"""Simulated users of an application: they ask word problems, and say whether the answer was right.

The application is `converse`: an agent with a calculator on the official openai client, which knows nothing of training
but the id of its last reply.  The users are the rest: they know the answer, and send it as feedback.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import openai

PROBLEMS = Path(__file__).parents[1] / "math_agent" / "data" / "train.jsonl"
SYSTEM_PROMPT = "You solve math problems with a calculator. Answer with \\boxed{}."
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "Two numbers and a sign, such as 2 * 3."}},
            "required": ["expression"],
        },
    },
}
START = 120.0
"""Seconds in which a run that was started beside this must have its service."""
SIGNS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b}


def calculate(arguments: str) -> str:
    """Return the tool's result, or an error message that the model reads."""
    try:
        left, sign, right = json.loads(arguments)["expression"].split()
        return f"{SIGNS[sign](float(left), float(right)):g}"
    except (ValueError, LookupError, TypeError, AttributeError, ZeroDivisionError) as error:
        return f"error: {error}"


def converse(client: openai.OpenAI, question: str) -> tuple[str, str]:
    """Return the application's answer and the ID of its completion."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
    for _ in range(3):
        completion = client.chat.completions.create(model="astuner", messages=messages, tools=[CALCULATOR])
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            said = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    return message.content or "", completion.id


def rate(access: dict[str, Any], completion_id: str, reward: float) -> None:
    """Tell the service what a user thinks."""
    body = json.dumps({"msg_ids": [completion_id], "reward": reward}).encode()
    headers = {"Authorization": f"Bearer {access['api_key']}", "Content-Type": "application/json"}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy between two processes here
    opener.open(urllib.request.Request(access["feedback_url"], body, headers), timeout=60).read()


def find_access() -> Path:
    """Return the file with address and key of the only running service; wait until a starting run has written it."""
    folder = Path(os.environ.get("ASTUNER_HOME") or Path.home() / ".astuner").expanduser() / "feedback"
    until = time.monotonic() + START
    while not (found := list(folder.glob("*.json"))) and time.monotonic() < until:
        time.sleep(0.5)
    if len(found) != 1:
        raise SystemExit(f"there are {len(found)} files in {folder}; name the one that the run named, with --access")
    return found[0]


def use(access: dict[str, Any], problems: list[dict[str, str]], seen: list[float]) -> None:
    """One user after another."""
    client = openai.OpenAI(
        base_url=access["base_url"],
        api_key=access["api_key"],
        max_retries=20,  # it waits while the model is trained
        http_client=openai.DefaultHttpxClient(trust_env=False),
    )
    while True:
        problem = random.choice(problems)
        try:
            answer, completion_id = converse(client, problem["question"])
            boxed = re.findall(r"\\boxed\{([^}]*)\}", answer)
            reward = float(bool(boxed) and boxed[-1] == problem["answer"].rpartition("#### ")[2])
            rate(access, completion_id, reward)
        except (openai.APIError, OSError) as error:
            print(f"a conversation failed: {error}", flush=True)
            time.sleep(1.0)
        else:
            seen.append(reward)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--access", type=Path, help="the file that the run named when it started")
    parser.add_argument("--users", type=int, default=64, help="how many talk at once")
    options = parser.parse_args()
    file = options.access or find_access()
    access = json.loads(file.read_text(encoding="utf-8"))
    problems = [json.loads(line) for line in PROBLEMS.read_text(encoding="utf-8").splitlines()]
    seen: list[float] = []
    for _ in range(options.users):
        threading.Thread(target=use, args=(access, problems, seen), daemon=True).start()
    while file.exists():  # it goes with the service
        time.sleep(5.0)
        last = seen[-500:]
        if last:
            print(
                f"{len(seen)} conversations; of the last {len(last)} {sum(last) / len(last):.0%} were right", flush=True
            )


if __name__ == "__main__":
    main()
