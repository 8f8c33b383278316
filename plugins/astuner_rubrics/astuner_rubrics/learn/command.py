"""Learning as the command does it: with a journal, and a file at the end.

Invariant: a rubric file is written whole and at the end, or not at all; the journal stays, so nothing is paid twice.
What a person made (examples, an experiment, rubrics that were edited) is never written over unasked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from astuner.contracts.errors import ConfigError
from astuner_helpers import BudgetSpent, HelperFailed, HelperModels
from astuner_rubrics.labels import Labels
from astuner_rubrics.learn.examples import NotLearned
from astuner_rubrics.learn.journal import Journal, Spent
from astuner_rubrics.learn.learning import Result, Say, learn
from astuner_rubrics.learn.settings import Settings
from astuner_rubrics.models import choose
from astuner_rubrics.rubric_file import load_rubrics, save_rubrics


def journal_of(out: Path) -> Path:
    """The journal beside a rubric file."""
    return out.with_name(f"{out.name}.journal.jsonl")


def check_out(out: Path, inputs: Sequence[Path], *, overwrite: bool) -> None:
    """Whether rubrics may be written to ``out``.

    :param inputs: files that the command reads; they are not written over even if asked.
    :param overwrite: whether something else than rubrics as they were learned may be written over.
    :raises ConfigError: they may not; says why, and what to type.
    """
    if out.is_dir():
        raise ConfigError(f"--out {out}: is a folder; name a file, e.g. {out / 'rubrics.yaml'}")
    if not out.exists():
        return
    if any(path.exists() and path.samefile(out) for path in inputs):
        raise ConfigError(f"--out {out}: is a file that this command reads; name another place for the rubrics")
    if overwrite:
        return
    try:
        there = load_rubrics(out)
    except ConfigError:
        why = "is there and no rubric file"
    else:
        if there.learned is not None and not there.is_edited:
            return
        why = "was edited since it was learned" if there.is_edited else "was written by hand"
    raise ConfigError(f"--out {out}: {why}; name another place, or add --overwrite")


def run_learning(
    labels: Labels, settings: Settings, helpers: HelperModels, helper: str | None, embedder: str | None, out: Path,
    say: Say, *, inputs: Sequence[Path] = (), overwrite: bool = False,
) -> tuple[Result, Spent]:  # fmt: skip
    """Learn, and write the file.

    :raises ConfigError: the file may not be written, see `check_out`; this is looked at again when the rubrics are
        there, since somebody may edit the file meanwhile.
    :raises NotLearned: something speaks against the rubrics, and `force` is not set.
    :raises HelperFailed, BudgetSpent: of the helper; says that typing the same again goes on.
    """
    check_out(out, inputs, overwrite=overwrite)
    path = journal_of(out)
    journal = Journal(path, choose(helpers, helper))
    vectors = Journal(path, helpers.get(embedder, where="--embedder")) if embedder is not None else None
    try:
        result = asyncio.run(learn(labels, settings, journal, vectors, say))
    except BudgetSpent as e:
        raise BudgetSpent(f"{e}; {_go_on(path)}") from e
    except HelperFailed as e:
        raise HelperFailed(f"{e}; {_go_on(path)}") from e
    except KeyboardInterrupt:
        say(f"stopped; {_go_on(path)}")
        raise
    spent = journal.spent
    say(f"{spent.asked} answers of {journal.model}, {spent.remembered} of the journal; cost {spent.cost:.4g}")
    if result.objections and not settings.force:
        raise NotLearned("\n".join([*result.objections, f"no file was written; --force writes {out} all the same"]))
    check_out(out, inputs, overwrite=overwrite)
    save_rubrics(out, result.rubrics)
    return result, spent


def _go_on(journal: Path) -> str:
    """How to go on after learning was stopped."""
    known = f", and what is in {journal} is not asked again" if journal.exists() else ""
    return f"nothing is lost: type the same again{known}"
