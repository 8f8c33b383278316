"""Commands of ``astuner data``: create tasks from documents, samples and user conversations.

Invariants: help and listing import neither a server nor a document parser; stdout contains only the result (text, or
one JSON document), and progress is written to stderr.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from astuner.contracts.commands import JsonOption, OverridesArgument, all_overrides, command_line, new_app, write_json
from astuner.contracts.errors import ConfigError, DataError

if TYPE_CHECKING:
    from astuner import Config, Task
    from astuner_flywheel.receiver.store import Store
    from astuner_flywheel.traces.settings import TracingConfig
    from astuner_flywheel.tracing_reader import Prepared
    from astuner_helpers import HelperModels


app = new_app(no_args_is_help=True, help="Create tasks from documents, samples and user conversations.")


def settings_of(path: Path, overrides: Sequence[str], ctx: typer.Context) -> Config:
    """Load a config like `astuner.load_config`, but allow a missing ``astuner.model.path``: nothing is trained.

    :raises astuner.contracts.errors.ConfigError: Anything else is invalid.
    """
    from astuner import load_config

    plugins = command_line(ctx).plugins
    try:
        return load_config(path, overrides, plugins=plugins)
    except ConfigError as e:
        if not any("astuner.model.path is required" in problem for problem in e.problems):
            raise
    return load_config(path, ["astuner.model.path=none", *overrides], plugins=plugins)


DEFAULT_PORT = 4318
"""Default port of OTLP over HTTP."""


@app.command()
def collect(
    database: Annotated[
        Path, typer.Argument(metavar="DB", help="SQLite file to create or append to.", show_default=False)
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on. 0: a free port.")] = DEFAULT_PORT,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Non-loopback needs --key-env.")] = "127.0.0.1",
    key_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Variable with the API key that requests must contain. Default: none."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the addresses and, at the end, the counts as JSON.")
    ] = False,
) -> None:
    """Collect traces (OTLP over HTTP) and user feedback in a SQLite file, until Ctrl-C.

    Send spans to http://127.0.0.1:4318/v1/traces, for example with OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318,
    or in AgentScope 1.x with agentscope.init(tracing_url="http://127.0.0.1:4318/v1/traces"). Send feedback on an answer
    to POST /feedback. The task reader `tracing` and `astuner data import` can read the file while the collector runs.
    """
    from astuner_flywheel.receiver.server import FEEDBACK, TRACES
    from astuner_flywheel.receiver.store import Store
    from astuner_gateway import access_file
    from astuner_gateway.listening import bind, own_key, url_of

    key = own_key(host, key_env, host_at="--host", key_at="--key-env") or ""
    path = database.expanduser()
    with closing(Store(path)) as store:
        if store.remark:
            typer.echo(store.remark, err=True)
        with bind(host, port, listen=True) as listening:
            url = url_of(host, listening)
            where = {"traces_url": f"{url}{TRACES}", "feedback_url": f"{url}{FEEDBACK}"}
            told = {**where, "api_key": key or None, "database": str(path.absolute()), "pid": os.getpid()}
            with access_file.kept("collect", listening.getsockname()[1], told) as access:

                def ready() -> None:
                    if as_json:
                        typer.echo(json.dumps({**where, "access": str(access), "database": str(path)}))
                    else:
                        typer.echo(
                            f"traces:   POST {where['traces_url']}\nfeedback: POST {where['feedback_url']}\n"
                            f"stored in {path}; addresses for applications: {access}\nPress Ctrl-C to stop."
                        )
                    sys.stdout.flush()

                counts = asyncio.run(_collected(store, listening, ready, host=host, key=key))
        kept = store.counts()
    if as_json:
        typer.echo(json.dumps({"since_start": dict(counts), "in_file": kept}))
    else:
        typer.echo(
            f"stopped: {counts['spans']:,} new spans, {counts['feedback']:,} new feedback entries; "
            f"{path} contains {kept['spans']:,} and {kept['feedback']:,}",
            err=True,
        )


async def _collected(
    store: Store, listening: socket.socket, ready: Callable[[], None], *, host: str, key: str
) -> Counter[str]:
    """Serve until SIGINT or SIGTERM, and return the counts when everything is on disk."""
    from astuner_flywheel.receiver.server import Handler
    from astuner_gateway.gate import serve_until_told

    handler = Handler(store, host=host, key=key)
    try:
        await serve_until_told(handler, listening, ready, grace=3.0)
    finally:
        await handler.finished()
    return handler.counts


_EVERY = 5.0


@app.command()
def generate(
    ctx: typer.Context,
    file: Annotated[
        Path,
        typer.Argument(metavar="CONFIG", help="Experiment with a section data_generation.", show_default=False),
    ],
    overrides: OverridesArgument = None,
    tasks: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of tasks. Same as data_generation.tasks=N.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Output folder. Default: generated/<name of CONFIG>.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over. Existing results move to a subfolder earlier-….")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show planned requests and costs without sending any.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Generate tasks from documents (PDF, DOCX, HTML, Markdown, text) or from a few samples.

    Configure the material and the helper model in astuner.task_reader.data_generation of CONFIG. After an interruption,
    repeat the command to continue; no request is sent twice. The folder contains train.jsonl, validation.jsonl and
    report.json. To train on the tasks, use `type: data_generation`.
    """
    from astuner_flywheel.generation.entry import WHERE, Generation
    from astuner_flywheel.support import Live, told

    given = all_overrides(overrides)
    if tasks is not None:
        given.append(f"{WHERE}.tasks={tasks}")
    if folder is not None:
        given.append(f"{WHERE}.folder={json.dumps(str(folder.expanduser().absolute()), ensure_ascii=False)}")
    terminal = sys.stderr.isatty()
    live = Live(every=0.2 if terminal else _EVERY, over=terminal)
    again = shlex.join(["astuner", "data", "generate", str(file), *given])
    config = settings_of(file, given, ctx)
    generation = Generation(config, live, again=again)
    try:
        if dry_run:
            plan = generation.plan(fresh=fresh)
            live.end()
            if as_json:
                write_json(asdict(plan))
            else:
                typer.echo(told("plan", plan=plan))
            return
        report = generation.run(fresh=fresh)
    finally:
        live.end()
    if as_json:
        write_json({**report, "folder": str(generation.folder.path)})
    else:
        typer.echo(told("made", folder=generation.folder, **report))


_MADE_BY = "astuner data import"
INTO_A_FOLDER = 0.1
"""Default share of held-out tasks if the target is a folder."""


@app.command("import")
def import_(
    ctx: typer.Context,
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE...", help="Databases, OTLP traces, platform exports or chats.", show_default=False
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Output file tasks.jsonl, or folder for train, validation and report."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="CONFIG", help="Use astuner.task_reader.tracing and helper models of an experiment."),
    ] = None,
    feedback: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="User feedback as JSON lines (repeatable).")
    ] = None,
    keep: Annotated[
        str | None, typer.Option(metavar="WHICH", help="Keep all (default), rated, liked, disliked or corrected.")
    ] = None,
    turns: Annotated[str | None, typer.Option(metavar="WHICH", help="Use the last (default) or every turn.")] = None,
    liked_as_answer: Annotated[
        bool | None, typer.Option("--liked-as-answer", help="Use liked answers as reference answers.")
    ] = None,
    require_answer: Annotated[
        bool | None, typer.Option("--require-answer", help="Keep only tasks with a reference answer.")
    ] = None,
    near_duplicates: Annotated[
        float | None, typer.Option(metavar="THRESHOLD", help="Drop near-duplicate questions, e.g. 0.8.")
    ] = None,
    validation_share: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Held-out share. Default: as in --config, else 0.1 for a folder and 0 for a file.",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the validation split.")] = None,
    pii: Annotated[
        str | None, typer.Option(metavar="redact|keep", help="Handling of e-mail addresses, phone numbers and keys.")
    ] = None,
    on_bad_trace: Annotated[str | None, typer.Option(metavar="skip|stop", help="Handling of unreadable data.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the result without writing files.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files of other programs.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Create tasks from questions of users.

    Example: astuner data import traces.sqlite --to tasks.jsonl

    The same sources and options produce the same files, so you can repeat the command at any time. Answers of helper
    models are cached.
    """
    from astuner_flywheel.support import told
    from astuner_flywheel.tracing_reader import prepare

    if to is None and not dry_run:
        raise ConfigError("set --to PATH to tasks.jsonl or a folder, or use --dry-run")
    given = {
        "sources": sources or None,
        "feedback": feedback,
        "keep": keep,
        "turns": turns,
        "liked_as_answer": liked_as_answer,
        "require_answer": require_answer,
        "validation_share": validation_share,
        "seed": seed,
        "pii": pii,
        "on_bad_trace": on_bad_trace,
        "filters": None if near_duplicates is None else {"near_duplicates": {"threshold": near_duplicates}},
    }
    if validation_share is None and config is None and to is not None and not _is_one_file(to):
        given["validation_share"] = INTO_A_FOLDER
    base, section, helpers = _experiment(config, to, ctx)
    settings = _settings(section, {name: value for name, value in given.items() if value is not None})
    where = Path() if sources or config is None else base
    target = None if to is None else _Target.of(to.expanduser(), settings)
    if target is not None:
        target.check([where / Path(name).expanduser() for name in [*settings.sources, *settings.feedback]], overwrite)
    done = prepare(settings, where, helpers, partial(typer.echo, err=True))
    if target is not None and not dry_run:
        target.write(done)
    if as_json:
        write_json({**done.report, "files": [] if target is None or dry_run else target.names})
    else:
        typer.echo(told("imported", answered=done.report["with a reference answer"], **done.report))
        if target is not None and not dry_run:
            typer.echo(f"written: {', '.join(target.names)}")
            if target.validation is not None and not done.validation:
                share = settings.validation_share
                advice = (
                    f"the share {share:g} gives no task; add tasks or increase --validation-share"
                    if share
                    else f"use --validation-share {INTO_A_FOLDER:g}"
                )
                typer.echo(f"note: no tasks are held out, so there is no validation.jsonl ({advice})")


@dataclass(frozen=True)
class _Target:
    train: Path
    validation: Path | None
    report: Path

    @classmethod
    def of(cls, to: Path, settings: TracingConfig) -> _Target:
        """Return the target files.

        :raises ConfigError: There is no place for validation tasks, or a file has the name of the folder.
        """
        if _is_one_file(to):
            if settings.validation_share:
                raise ConfigError(f"--to {to} is one file, but --validation-share needs two; use a folder")
            return cls(to, None, to.with_suffix(".report.json"))
        if to.is_file():
            raise ConfigError(f"--to {to} is a file; use a name that ends in .jsonl, or a folder")
        return cls(to / "train.jsonl", to / "validation.jsonl", to / "report.json")

    def check(self, read: Iterable[Path], overwrite: bool) -> None:
        """Check that the files may be written.

        :raises ConfigError: A source or a file of another program would be replaced.
        """
        written = {path.resolve() for path in (self.train, self.validation, self.report) if path is not None}
        for path in read:
            if path.resolve() in written:
                raise ConfigError(f"--to would replace the source {path}; use another path")
        others = [str(path) for path in (self.train, self.validation) if path is not None and path.exists()]
        if others and not overwrite and not self._is_ours():
            raise ConfigError(f"{' and '.join(others)} would be replaced; use another path, or add --overwrite")

    @property
    def names(self) -> list[str]:
        return [str(p) for p in (self.train, self.validation, self.report) if p is not None and p.exists()]

    def write(self, done: Prepared) -> None:
        """Write all files atomically, the report last."""
        from astuner_flywheel.support import write_json, write_rows

        try:
            self.train.parent.mkdir(parents=True, exist_ok=True)
            sides = {self.train: done.train} | ({self.validation: done.validation} if self.validation else {})
            for path, tasks in sides.items():
                if tasks:
                    write_rows(path, map(_row, tasks))
                else:
                    path.unlink(missing_ok=True)
            write_json(self.report, {"made_by": _MADE_BY, **done.report})
        except OSError as e:
            raise DataError(f"cannot write to {self.train.parent}: {e.strerror or e}") from e

    def _is_ours(self) -> bool:
        try:
            return bool(json.loads(self.report.read_text(encoding="utf-8")).get("made_by") == _MADE_BY)
        except (OSError, ValueError, AttributeError):
            return False


def _is_one_file(to: Path) -> bool:
    return to.suffix == ".jsonl"


def _row(task: Task) -> dict[str, Any]:
    return {
        "task_id": task.task_id,
        "main_query": task.main_query,
        "init_messages": list(task.init_messages),
        "metadata": dict(task.metadata),
    }


def _experiment(
    config: Path | None, to: Path | None, ctx: typer.Context
) -> tuple[Path, Mapping[str, Any], HelperModels | None]:
    """Return the base folder, the raw section and the helper models of an experiment."""
    if config is None:
        return Path(), {}, None
    from astuner_helpers import HelperModels
    from astuner_helpers.settings import HelperModelKeys

    loaded = settings_of(config, (), ctx)
    section = loaded.section("task reader", "tracing")
    if section is None:
        raise ConfigError(f"{config} has no astuner.task_reader.type: tracing; pass the sources instead of --config")
    scope = str((to or loaded.run_dir).absolute())
    models = loaded.keys_of(HelperModelKeys).helper_models
    return loaded.base_dir, section.model_dump(), HelperModels(models, scope=scope)


def _settings(section: Mapping[str, Any], given: Mapping[str, Any]) -> TracingConfig:
    from pydantic import ValidationError

    from astuner_flywheel.traces.settings import TracingConfig

    merged = {**section, **given}
    if "filters" in given and "filters" in section:
        merged["filters"] = {**section["filters"], **given["filters"]}
    if not merged.get("sources"):
        raise ConfigError("pass at least one SOURCE: a database, or OTLP, chats or an export as JSON")
    try:
        return TracingConfig.model_validate(merged)
    except ValidationError as e:
        raise ConfigError([f"--{str(w['loc'][0]).replace('_', '-')}: {w['msg']}" for w in e.errors()]) from None
