"""Writes tasks and demonstrations of this example: ``python examples/shop_lookup/make_tasks.py``.

A question asks for the price, the stock or the weight of a thing.  The three numbers are drawn for each task, so they
can only be looked up.  Training, validation and test have wordings and things of their own.

A demonstration is a whole conversation, as the agent of ``shop.py`` has it with a model that does it right.  They show
few of the wordings that are trained on, and none that is held out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from agentscope.tool import FunctionTool, Toolkit  # 2.x
from shop import PROPERTIES, SYSTEM_PROMPT, answer, make_tool

HERE = Path(__file__).parent
WORDINGS = yaml.safe_load((HERE / "wordings.yaml").read_text(encoding="utf-8"))
SIZES = {"train": 400, "validation": 128, "test": 256}
DEMONSTRATIONS, SHOWN = 48, 1
"""How many, and of how many wordings of each property."""
THINGS = {
    "train": "lamp radio phone camera watch printer speaker tablet toaster fan clock drill mixer kettle scale router",
    "validation": "laptop keyboard mouse oven fridge shaver iron blender",
    "test": "table chair sofa mirror carpet bicycle guitar piano tent ladder hammer mattress pillow basket bucket vase",
}


def tasks(split: str, seed: int = 0, *, wordings: int | None = None) -> Iterator[dict[str, Any]]:
    """Tasks without end, each property as often as the others.

    :param wordings: only the first so many of each property.
    """
    rng, things = random.Random(f"{seed}/{split}/{wordings}"), THINGS[split].split()
    while True:
        for asked in rng.sample(PROPERTIES, len(PROPERTIES)):
            thing, wording = rng.choice(things), rng.choice(WORDINGS[split][asked][:wordings])
            shelf = {name: rng.randint(2, 99) for name in PROPERTIES}
            yield {"main_query": wording.format(thing=thing), "thing": thing, "asked": asked, "shelf": shelf}


def demonstration(task: dict[str, Any]) -> dict[str, Any]:
    """Return the conversation in which the agent looks up the number and answers with it."""
    number = str(task["shelf"][task["asked"]])
    call = {"name": "look_up", "arguments": {"thing": task["thing"], "what": task["asked"]}}
    return {
        "messages": [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": task["main_query"]},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": "1", "name": "look_up", "content": number},
            {"role": "assistant", "content": answer(number)},
        ],
        "tools": asyncio.run(Toolkit(tools=[FunctionTool(make_tool({}))]).get_tool_schemas()),
    }


def write(file: Path, rows: Iterator[dict[str, Any]], count: int) -> None:
    file.write_text("".join(json.dumps(next(rows)) + "\n" for _ in range(count)), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "data")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    for split, size in SIZES.items():
        write(folder / f"{split}.jsonl", tasks(split), size)
    shown = map(demonstration, tasks("train", wordings=SHOWN))
    write(folder / "demonstrations.jsonl", shown, DEMONSTRATIONS)
