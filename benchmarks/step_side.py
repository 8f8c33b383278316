"""Run GRPO steps of one trainer in a separate process, so that trainers do not share freed memory."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import side, trl_side
from benchmarks.local_side import LocalSteps, make_config


def make(asked: dict[str, Any], place: Path) -> trl_side.TrlSteps | LocalSteps:
    """Return the requested trainer; without tools, each answer has exactly the maximum number of tokens."""
    model, dtype, tools, longest = (asked[name] for name in ("model", "dtype", "tools", "longest"))
    sizes = {"groups": asked["groups"], "group_size": asked["group_size"]}
    if asked["trainer"] == "TRL":
        return trl_side.TrlSteps(model, max_completion=longest, tools=tools, forced=not tools, dtype=dtype, **sizes)
    config = make_config(
        place,
        model,
        workflow=f"benchmarks.agents->{'CalculatorLoop' if tools else 'OneTurn'}",
        max_new_tokens=longest,
        max_added_tokens=longest,
        skip_zero_advantage=False,
        dtype=dtype,
        **sizes,
    )
    return LocalSteps(config, place, forced=not tools)


async def serve(asked: dict[str, Any]) -> None:
    with trl_side.quiet(), tempfile.TemporaryDirectory() as place:
        steps = make(asked, Path(place))

        def take() -> dict[str, Any]:
            wall, cpu = time.perf_counter(), time.process_time()
            steps()
            taken = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
            return taken | {"count": asdict(steps.counts[-1])}

        async def step(_: Any) -> dict[str, Any]:
            return await asyncio.to_thread(take)  # `local` runs its own event loop

        await side.obey({}, {"step": step})
        steps.close()


if __name__ == "__main__":
    from astuner_local.allocator import keep_freed_memory

    side.quiet()
    keep_freed_memory()  # as every run of such a model does; it serves both
    asyncio.run(serve(json.loads(sys.argv[1])))
