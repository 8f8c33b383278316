"""``astuner data import``: what the task reader ``tracing`` does, once, into files that can be read and edited."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from astuner.contracts.errors import ConfigError, DataError

if TYPE_CHECKING:
    from astuner import Task
    from astuner_flywheel.traces.pipeline import Prepared
    from astuner_flywheel.traces.settings import TracingConfig
    from astuner_helpers import HelperModels

_MADE_BY = "astuner data import"
INTO_A_FOLDER = 0.1
"""The share that is held out where nobody says it, and there is a place for it."""


def import_(
    ctx: typer.Context,
    sources: Annotated[
        list[str] | None,
        typer.Argument(metavar="SOURCE...", help="Databases; OTLP or chats as JSON lines.", show_default=False),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A file tasks.jsonl, or a folder for train, validation and a report."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="CONFIG", help="Take astuner.task_reader.tracing and helper models from an experiment."),
    ] = None,
    feedback: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="Users' feedback as JSON lines (repeatable).")
    ] = None,
    keep: Annotated[
        str | None, typer.Option(metavar="WHICH", help="all (default), rated, liked, disliked or corrected.")
    ] = None,
    turns: Annotated[str | None, typer.Option(metavar="WHICH", help="last (default) or every.")] = None,
    liked_as_answer: Annotated[
        bool | None, typer.Option("--liked-as-answer", help="A liked answer is its task's reference.")
    ] = None,
    require_answer: Annotated[
        bool | None, typer.Option("--require-answer", help="Only tasks with a reference answer.")
    ] = None,
    near_duplicates: Annotated[
        float | None, typer.Option(metavar="THRESHOLD", help="Leave out questions nearly as others, e.g. 0.8.")
    ] = None,
    validation_share: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Held out for validation. Default: with --config what it says; else 0.1 into a folder, 0 into a file.",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Decides which tasks are held out.")] = None,
    pii: Annotated[
        str | None, typer.Option(metavar="redact|keep", help="E-mail addresses, telephone numbers, keys.")
    ] = None,
    on_bad_trace: Annotated[str | None, typer.Option(metavar="skip|stop", help="What cannot be read.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing; print what would come of it.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that another program made.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Make tasks of what users asked: astuner data import traces.sqlite --to tasks.jsonl

    The same sources and options give the same files, so it may be run again at any time; what helper models said is
    kept and not asked again.
    """
    from astuner_flywheel.traces.pipeline import prepare

    if to is None and not dry_run:
        raise ConfigError("--to PATH says where the tasks go (tasks.jsonl, or a folder); or try with --dry-run")
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
    base, section, helpers = _experiment(config, to, tuple(_disabled(ctx)))
    settings = _settings(section, {name: value for name, value in given.items() if value is not None})
    where = Path() if sources or config is None else base
    target = None if to is None else _Target.of(to.expanduser(), settings)
    if target is not None:
        target.check_apart(where / Path(name).expanduser() for name in [*settings.sources, *settings.feedback])
        target.check_free(overwrite)
    done = prepare(settings, where, helpers, _say)
    if target is not None and not dry_run:
        target.write(done)
    if as_json:
        typer.echo(json.dumps({**done.report, "files": [] if target is None or dry_run else target.names}, indent=2))
    else:
        _show(done.report)
        if target is not None and not dry_run:
            typer.echo(f"written: {', '.join(target.names)}")
            if target.validation is not None and not done.validation:
                typer.echo("note: nothing is held out, so there is no validation.jsonl (--validation-share 0.1)")


@dataclass(frozen=True)
class _Target:
    train: Path
    validation: Path | None
    report: Path

    @classmethod
    def of(cls, to: Path, settings: TracingConfig) -> _Target:
        """:raises ConfigError: there is no place for the validation, or a file where the folder would be."""
        if _is_one_file(to):
            if settings.validation_share:
                raise ConfigError(f"--to {to} is one file, and --validation-share needs two; name a folder instead")
            return cls(to, None, to.with_suffix(".report.json"))
        if to.is_file():
            raise ConfigError(f"--to {to} is a file; name one that ends in .jsonl, or a folder")
        return cls(to / "train.jsonl", to / "validation.jsonl", to / "report.json")

    def check_free(self, overwrite: bool) -> None:
        """:raises ConfigError: files are there that this command did not make."""
        others = [str(path) for path in (self.train, self.validation) if path is not None and path.exists()]
        if others and not overwrite and not self._is_ours():
            raise ConfigError(f"{' and '.join(others)} would be replaced; name another place, or add --overwrite")

    def check_apart(self, read: Iterable[Path]) -> None:
        """:raises ConfigError: what is read would be replaced."""
        written = {path.resolve() for path in (self.train, self.validation, self.report) if path is not None}
        for path in read:
            if path.resolve() in written:
                raise ConfigError(f"--to would replace {path}, which is read; name another place")

    @property
    def names(self) -> list[str]:
        return [str(p) for p in (self.train, self.validation, self.report) if p is not None and p.exists()]

    def write(self, done: Prepared) -> None:
        """Each file appears whole, the report last."""
        from astuner.support.json_lines import write_jsonl

        try:
            self.train.parent.mkdir(parents=True, exist_ok=True)
            sides = {self.train: done.train} | ({self.validation: done.validation} if self.validation else {})
            for path, tasks in sides.items():
                if tasks:
                    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
                    write_jsonl(temporary, map(_row, tasks))
                    temporary.replace(path)
                else:
                    path.unlink(missing_ok=True)
            temporary = self.report.with_name(f".{self.report.name}.{os.getpid()}.tmp")
            temporary.write_text(json.dumps({"made_by": _MADE_BY, **done.report}, indent=2), encoding="utf-8")
            temporary.replace(self.report)
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
    config: Path | None, to: Path | None, disabled: tuple[str, ...]
) -> tuple[Path, Mapping[str, Any], HelperModels | None]:
    """Base folder, the section as it is written, and the helper models of an experiment."""
    if config is None:
        return Path(), {}, None
    from astuner_flywheel.settings_of import settings_of
    from astuner_helpers import HelperModels
    from astuner_helpers.settings import HelperModelKeys

    loaded = settings_of(config, (), disabled)
    section = loaded.section("task reader", "tracing")
    if section is None:
        raise ConfigError(f"{config} has no astuner.task_reader.type: tracing; name the sources instead of --config")
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
        raise ConfigError("name at least one SOURCE: a database, OTLP JSON lines, or chats as JSON lines")
    try:
        return TracingConfig.model_validate(merged)
    except ValidationError as e:
        raise ConfigError([f"--{str(w['loc'][0]).replace('_', '-')}: {w['msg']}" for w in e.errors()]) from None


def _disabled(ctx: typer.Context) -> list[str]:
    return [text.removeprefix("no:") for text in ctx.find_root().params.get("plugin") or ()]


def _show(report: Mapping[str, Any]) -> None:
    read, split, feedback = report["read"], report["split"], report["feedback"]
    typer.echo("read:     " + ", ".join(f"{n:,} {what}" for what, n in read.items()))
    for name in ("unreadable", "dropped"):
        for reason, of in report[name].items():
            typer.echo(f"{name + ':':<12}{of['count']:,} × {reason} (first: {of['first']})")
    if feedback["given"] or feedback["inferred"] or feedback["liked"] or feedback["disliked"] or feedback["corrected"]:
        typer.echo("feedback: " + ", ".join(f"{n:,} {what}" for what, n in feedback.items()))
    if report["redacted"]:
        typer.echo("redacted: " + ", ".join(f"{n:,} × {what}" for what, n in report["redacted"].items()))
    for leak in split["leaks"]:
        typer.echo(f"leak:     {leak['task_id']} is like {leak['like']}: {leak['action']}")
    for note in split["notes"]:
        typer.echo(f"note:     {note}")
    typer.echo(
        f"tasks:    {split['train']:,} to train on, {split['validation']:,} to validate on; "
        f"{report['with a reference answer']:,} with a reference answer"
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
