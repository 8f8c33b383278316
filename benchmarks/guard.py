"""Check that the hot path did not get slower: compare ratios to peers with recorded ratios.

Each ratio divides the hot path's CPU time by the time of a peer that is measured in turns with it.  A ratio does not
depend on the machine's speed, but on its kind: for some ratios processors differ by a quarter.  Recorded ratios are
therefore stored per processor and do not apply to another one; there, measure the previous commit in turns.  Record the
ratios again (``--write``) after an upgrade of a peer.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import random
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import call_in_process, records, step_vs_trl, templates
from benchmarks.call_overhead import AT_ONCE, TURNS, over_http
from benchmarks.episode_log import SHAPES, make_episode
from benchmarks.machine import commit, cpu_name
from benchmarks.measure import interleave
from benchmarks.report import Report
from benchmarks.trl_side import quiet

RECORDED = Path(__file__).with_name("guard.json")


@dataclass(frozen=True)
class Ratio:
    """CPU time of the hot path divided by the CPU time of its peer; lower is better."""

    what: str
    beside: str
    page: str
    value: float
    noise: float = 0.12
    """Relative difference between runs without changes, on two busy cores."""


def run(*, quick: bool) -> Report:
    report = Report(
        "Guard: the hot ratios",
        "CPU time as a multiple of a peer's, measured in turns in this process (for a server, in its process), "
        f"compared with the ratio recorded in `{RECORDED.name}`. A ratio that grew by more than its noise is a "
        "regression. A ratio that shrank by more makes its page outdated too. Medians for steps, whose work varies; "
        "otherwise the best repetition, which other load affects least.",
    )
    ratios = [*_steps(4 if quick else 16), _call(2 if quick else 9), _http(1 if quick else 8), _log(2 if quick else 15)]
    by_processor: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
    recorded = by_processor.get(cpu_name(), {"ratios": {}})
    rows, untrue = [], []
    for ratio in ratios:
        before = recorded["ratios"].get(ratio.what)
        change = ratio.value / before - 1 if before else 0.0
        worse, better = change > ratio.noise, change < -ratio.noise
        report.failed |= worse
        if worse or better:
            untrue.append(
                f"`benchmarks/{ratio.page}.md`: {ratio.what} changed by {change:+.0%} from the recorded ratio"
            )
        verdict = "REGRESSION" if worse else "better" if better else "as recorded" if before else "not recorded"
        numbers = f"{ratio.value:.3f}", f"{before:.3f}" if before else "–", f"±{ratio.noise:.0%}"
        rows.append((ratio.what, ratio.beside, *numbers, verdict))
    report.table(("what", "over", "now", "recorded", "noise", "that is"), rows)
    if "commit" in recorded:
        report.text(f"Recorded at commit {recorded['commit']} on {recorded['date']}.")
        report.text("Outdated: " + "; ".join(untrue) + "." if untrue else "All pages are up to date.")
    else:
        report.text("Nothing is recorded on this kind of processor: measure the commit before in turns.")
    found = {
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "ratios": {ratio.what: round(ratio.value, 4) for ratio in ratios},
    }
    kept = json.dumps({**by_processor, cpu_name(): found}, indent=2) + "\n"
    report.pictures[RECORDED.name] = lambda path: path.write_text(kept, encoding="utf-8")
    return report


def _steps(repeats: int) -> list[Ratio]:
    with quiet():
        timings, _ = step_vs_trl.multi_turn(repeats)
    trl = timings["TRL"].median_cpu
    names = {"a step": step_vs_trl.LOCAL, "a step with the AgentScope agent": step_vs_trl.WITH_AGENTSCOPE}
    return [Ratio(what, "TRL's step", "step_vs_trl", timings[name].median_cpu / trl) for what, name in names.items()]


def _call(repeats: int) -> Ratio:
    name, loop = call_in_process.TEMPLATE, asyncio.new_event_loop()
    tokenizer = templates.tokenizer(name)
    apart = "{# as transformers renders it #}" + tokenizer.chat_template  # `astuner.chat.sandbox` quickens our own

    def whole() -> None:
        for _ in range(AT_ONCE):
            number = random.randrange(10**6)
            messages = records.first_messages(number)
            for turn in range(TURNS):
                said = records.openai_reply(turn, TURNS)
                messages += [said, *records.results(said, number, turn)]
            tokenizer.apply_chat_template(messages, tools=records.TOOLS, chat_template=apart)

    with ExitStack() as stack:
        stack.callback(loop.close)
        times = interleave({"ours": call_in_process.chats(loop, name, TURNS), "whole": whole}, repeats=repeats)
    value = times["ours"].min_cpu / times["whole"].min_cpu
    beside = "transformers rendering and tokenising it once"
    return Ratio(f"{TURNS} calls of a conversation in process", beside, "call_in_process", value)


def _http(repeats: int) -> Ratio:
    bare, ours = over_http(repeats)
    return Ratio("a call over HTTP", "a bare aiohttp handler", "call_overhead", ours / bare, noise=0.25)


def _log(repeats: int) -> Ratio:
    from astuner_record.episode_log import EpisodeLogWriter

    episodes = [make_episode(random.Random(i), f"g{i // 8}", i % 8, SHAPES["tools"]) for i in range(64)]

    def log() -> None:
        with tempfile.TemporaryDirectory() as folder:
            writer = EpisodeLogWriter(Path(folder) / "episodes")
            for episode in episodes:
                writer.episode(1, episode)
            writer.close()

    def as_json() -> None:
        for episode in episodes:
            for turn in episode.turns:
                made = turn.generation
                json.dumps([made.prompt_ids, made.response_ids, made.logprobs, turn.request, turn.message])

    times = interleave({"log": log, "json": as_json}, repeats=repeats)
    value = times["log"].min_cpu / times["json"].min_cpu
    return Ratio("logging an episode", "its turns as JSON text", "episode_log", value, noise=0.2)
