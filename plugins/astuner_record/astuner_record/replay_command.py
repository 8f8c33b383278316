"""Command ``astuner replay RUN EPISODE``: judge a recorded episode again, or rerun its workflow from a turn."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from astuner import end_loop, find_part, run_services
from astuner.contracts.commands import (
    DebugTagsOption,
    JsonOption,
    OverridesArgument,
    WithOption,
    all_overrides,
    command_line,
    new_app,
    only_data_on_stdout,
    write_json,
)
from astuner.contracts.errors import ConfigError, DataError
from astuner_record.foreign import shown

if TYPE_CHECKING:
    from astuner.contracts.parts import DebuggerPart
    from astuner_record.episode_log import LoggedEpisode
    from astuner_record.replay import RecordedRun
    from astuner_record.replay.fork import Fork
    from astuner_record.replay.recording import Plan
    from astuner_record.replay.verdicts import Rejudge

app = new_app()

EXIT_FAILED = 1
_DIVERGED = (
    "The workflow diverged from the recording: its tools, environment or code now answer differently. To let the model "
    "answer from the divergence on, add --allow-divergence."
)
EXAMPLES = """\
\b
Examples:
  astuner replay launcher_record/math_agent --list --where 'reward<1'
  astuner replay launcher_record/math_agent g0000012-3 --judge 'my_judge.py->MyJudge'
  astuner replay launcher_record/math_agent --where step=180 --judge math_answer
  astuner replay launcher_record/math_agent g0000012-3 --from-turn 1 --times 8
  astuner replay launcher_record/math_agent g0000012-3 --step
"""


@app.command(epilog=EXAMPLES)
def replay(
    ctx: typer.Context,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", show_default=False)],
    episode: Annotated[
        str | None, typer.Argument(metavar="[EPISODE]", help="Episode ID, as printed by --list.", show_default=False)
    ] = None,
    overrides: OverridesArgument = None,
    list_them: Annotated[bool, typer.Option("--list", help="List the run's episodes and exit.")] = False,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="CONDITION", help="Select episodes, e.g. step=180 or 'reward<1' (repeatable)."),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE.py->CLASS", help="Judge with this judge. Default: the run's judge."),
    ] = None,
    from_turn: Annotated[
        int | None,
        typer.Option(min=0, metavar="K", help="Rerun the workflow; the model answers from this turn on."),
    ] = None,
    to_turn: Annotated[int | None, typer.Option(min=1, metavar="M", help="Stop before this turn.")] = None,
    times: Annotated[int, typer.Option(min=1, metavar="N", help="Rerun the workflow this many times.")] = 1,
    checkpoint: Annotated[
        str, typer.Option(metavar="newest|base|step-000050|DIR", help="Checkpoint of the model that answers.")
    ] = "newest",
    backbone: Annotated[
        str | None,
        typer.Option(
            metavar="debug|local", help="Backbone that serves the model. Default: local for local runs, else debug."
        ),
    ] = None,
    allow_divergence: Annotated[
        bool, typer.Option("--allow-divergence", help="Let the model answer requests that differ from the recording.")
    ] = False,
    step: Annotated[bool, typer.Option("--step", help="Show each model call, and wait for Enter before it.")] = False,
    pdb: Annotated[bool, typer.Option("--pdb", help="Set a breakpoint before turn K.")] = False,
    debug_tags: DebugTagsOption = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write forks here. Default: RUN/replays/.")] = None,
    services: WithOption = None,
    parallel: Annotated[int, typer.Option(min=1, metavar="N", help="Judge up to this many episodes concurrently.")] = 8,
    show: Annotated[int, typer.Option(min=0, metavar="N", help="List up to this many episodes.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """Judge a recorded episode again, or rerun its workflow from a turn.

    Without --from-turn, --step and --pdb, a judge scores the recording and nothing runs. For a damaged log, the
    command uses the intact episodes; with several episodes selected, it then exits with code 3.
    """
    from astuner_record.episode_log.salvage import end_partly
    from astuner_record.replay import RecordedRun
    from astuner_record.replay.recording import Plan, last_turn

    given = list(overrides or ())
    if episode is not None and "=" in episode and (where or list_them):
        given, episode = [episode, *given], None
    given = all_overrides(given)
    command_line(ctx).check_services(services or ())
    again = from_turn is not None or step or pdb
    if not list_them and (episode is None) == (not where):
        raise ConfigError(
            "Pass an episode: astuner replay RUN EPISODE. To judge several, pass --where CONDITION; --list prints IDs."
        )
    if again and (where or list_them):
        raise ConfigError("--from-turn, --step and --pdb need a single episode. Remove --where and --list.")
    if not again and (to_turn is not None or times > 1 or out is not None or allow_divergence):
        raise ConfigError("--to-turn, --times, --out and --allow-divergence need a rerun. Add --from-turn K.")
    if step or pdb:
        _check_by_hand(from_turn if pdb else 0, times)
    debug: DebuggerPart | None = None
    if debug_tags:
        debug = find_part(command_line(ctx).plugins, "debugger", wanted_by="--db")(debug_tags)
        given = [*debug.overrides, *given]
    stopping = debug.active() if debug else nullcontext()
    with only_data_on_stdout(as_json), stopping, RecordedRun(run) as recorded:
        if judge is not None:
            given.insert(0, f"astuner.task_judge.judge={found_here(judge)}")
        how = _How(ctx, recorded, given, tuple(services or ()), show)
        if list_them:
            answer = _list(how, where or [])
        elif episode is None:
            answer = _judge_many(how, where or [], parallel)
        elif not again:
            answer = _judge_one(how, episode)
        else:
            logged = recorded.episode(episode)
            plan = Plan(
                from_turn=last_turn(logged.episode) if from_turn is None else from_turn,
                to_turn=to_turn,
                allow_divergence=allow_divergence,
                step=step,
                break_at=from_turn if pdb else None,
            )
            plan.check(logged.episode)
            chosen = backbone or ("local" if recorded.backbone == "local" else "debug")
            answer = _fork(how, logged, plan, chosen, checkpoint, times, out)
        if debug:
            debug.end()
    if as_json:
        write_json(answer.data)
    else:
        typer.echo(shown(answer.text))
    if answer.error:
        typer.echo(f"astuner: {answer.error}", err=True)
    if answer.failed:
        raise typer.Exit(EXIT_FAILED)
    end_partly(recorded.log.problems if episode is None else [])


@dataclass(frozen=True)
class _How:
    """Arguments common to all replay modes."""

    ctx: typer.Context
    recorded: RecordedRun
    overrides: list[str]
    services: tuple[str, ...]
    show: int


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """Output of a replay."""

    data: Any
    text: str
    failed: bool = False
    error: str = ""


def _check_by_hand(stop_at: int | None, times: int) -> None:
    if stop_at is None:
        raise ConfigError("--pdb stops before a turn. Choose it with --from-turn K.")
    if times > 1:
        raise ConfigError("--step and --pdb work with a single rerun. Remove --times.")
    if not sys.stdin.isatty():
        raise ConfigError(
            "--step and --pdb prompt on the terminal, but standard input is not a terminal. Run the command in a "
            "terminal, or remove these options."
        )


def found_here(judge: str) -> str:
    """Return the judge with a file path resolved against the working directory, unless the file is part of the run."""
    file, arrow, name = judge.partition("->")
    path = Path(file).expanduser()
    return f"{path.resolve()}{arrow}{name}" if arrow and path.is_file() else judge


def _list(how: _How, where: list[str]) -> _Answer:
    from astuner_record.replay import short

    found, total = how.recorded.log.list(where, limit=how.show), how.recorded.log.count(where)
    fields = (
        "episode_id", "group_id", "task_id", "step", "split", "attempt", "reward", "success", "stop_reason", "turns",
        "agents", "query",
    )  # fmt: skip
    width = max((len(one.episode_id) for one in found), default=0)
    lines = [
        f"{one.episode_id:<{width}}  step {one.step:<5} {one.split:<10} "
        f"{'none' if one.reward is None else f'{one.reward:.4g}':>7}  {one.turns} turns  {one.stop_reason:<12} "
        f"{short(one.query)}"
        for one in found
    ]
    if total > len(found):
        lines.append(f"{total - len(found)} more: use --show N, or select fewer with --where CONDITION")
    rows = [{name: getattr(one, name) for name in fields} for one in found]
    return _Answer(data={"total": total, "episodes": rows}, text="\n".join(lines) or "no episode matches every --where")


def _judge_one(how: _How, episode_id: str) -> _Answer:
    from astuner_record.replay.verdicts import rejudged_row, verdict_text

    episode = how.recorded.episode(episode_id).episode
    with _asking(how) as asker:
        (result,) = run_async(asker.ask([episode]))
    data = {"run": str(how.recorded.dir.path), "judge": asker.name, **rejudged_row(result)}
    return _Answer(data=data, text=verdict_text(result, asker.name), failed=result.verdict is None)


def _judge_many(how: _How, where: list[str], parallel: int) -> _Answer:
    from astuner_record.replay.verdicts import Rejudged, agreement, rejudged_row, verdicts_text

    log = how.recorded.log
    total, done = log.count(where), 0
    if not total:
        raise DataError(f"No episode of {how.recorded.dir.path} matches every --where. To list episodes, use --list.")

    def progress(one: Rejudged) -> None:
        nonlocal done
        done += 1
        if done % max(1, total // 20) == 0 or done == total:
            typer.echo(f"{done} of {total} episodes", err=True)

    episodes = (logged.episode for logged in log.read_all(where))
    with _asking(how) as asker:
        found: list[Rejudged] = run_async(asker.ask_all(episodes, max_parallel=parallel, on_verdict=progress))
    agreed = agreement(found)
    data = {
        "run": str(how.recorded.dir.path),
        "judge": asker.name,
        "agreement": agreed,
        "episodes": [rejudged_row(one) for one in found],
    }
    return _Answer(data=data, text="\n".join(verdicts_text(found, agreed, asker.name, show=how.show)))


@contextmanager
def _asking(how: _How) -> Iterator[Rejudge]:
    from astuner_record.replay.verdicts import Rejudge

    config = how.recorded.config(how.overrides, backbone="debug", plugins=command_line(how.ctx).plugins)
    with run_services(config, how.services):
        yield Rejudge(config)


def _fork(
    how: _How, logged: LoggedEpisode, plan: Plan, backbone: str, checkpoint: str, times: int, out: Path | None
) -> _Answer:
    from astuner.contracts.parts import AT_LEISURE
    from astuner_models.serving import find_checkpoint
    from astuner_record.replay.fork import BY_HAND, OVERRIDES, about_plan, fork_row, forks_text, run_forks, write_forks
    from astuner_record.replay.recording import last_turn, real_models, tokenizers_only

    recorded, ended = how.recorded, 0
    leisure = AT_LEISURE if plan.step or plan.break_at is not None else ()
    plugins = command_line(how.ctx).plugins
    config = recorded.config([*leisure, *OVERRIDES, *how.overrides], backbone=backbone, plugins=plugins)
    all_recorded = plan.from_turn >= last_turn(logged.episode) and not plan.allow_divergence
    folder = None if all_recorded else find_checkpoint(config, "latest" if checkpoint == "newest" else checkpoint)

    def progress(fork: Fork) -> None:
        nonlocal ended
        ended += 1
        if times > 1:
            typer.echo(f"{ended} of {times} forks: reward {fork.episode.reward}", err=True)

    with run_services(config, how.services):
        models = nullcontext(tokenizers_only(config)) if all_recorded else real_models(config, folder)
        with models as loaded:
            forks = run_async(run_forks(config, logged.episode, plan, loaded, times, on_fork=progress))
    answered = "none: all is recorded" if all_recorded else str(folder or "base")
    about = about_plan(recorded.dir, logged, plan, answered)
    text, written = "\n".join(forks_text(logged.episode, forks, plan.from_turn)), None
    if all(fork.stopped != BY_HAND for fork in forks):
        written = write_forks(recorded.dir, config, logged, forks, about, out)
        text += f"\nwritten to {written}\nview with: astuner view {written}"
    failed = any(fork.divergences for fork in forks) and not plan.allow_divergence
    data = {**about, "folder": written and str(written), "forks": [fork_row(fork) for fork in forks]}
    return _Answer(data=data, text=text, failed=failed, error=_DIVERGED if failed else "")


def run_async(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine on a new event loop, where Ctrl-C interrupts immediately, including at a prompt."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(work)
    finally:
        end_loop(loop, 2.0)
