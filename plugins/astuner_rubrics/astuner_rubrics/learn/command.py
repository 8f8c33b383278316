"""Learning as the command does it: with a journal, and a file at the end.

Invariant: a rubric file is written whole and at the end, or not at all; the journal stays, so nothing is paid twice.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from astuner.errors import ConfigError
from astuner.helper_models import BudgetSpent, HelperFailed, HelperModels
from astuner_rubrics.labels import Labels
from astuner_rubrics.learn.examples import NotLearned
from astuner_rubrics.learn.journal import Journal, Spent
from astuner_rubrics.learn.learning import Result, Say, learn
from astuner_rubrics.learn.settings import Settings
from astuner_rubrics.models import choose
from astuner_rubrics.rubric_file import save_rubrics


def journal_of(out: Path) -> Path:
    """The journal beside a rubric file."""
    return out.with_name(f"{out.name}.journal.jsonl")


def run_learning(
    labels: Labels, settings: Settings, helpers: HelperModels, helper: str | None, embedder: str | None, out: Path,
    say: Say,
) -> tuple[Result, Spent]:  # fmt: skip
    """Learn, and write the file.

    :raises NotLearned: something speaks against the rubrics, and `force` is not set.
    :raises HelperFailed, BudgetSpent: of the helper; says that typing the same again goes on.
    """
    if out.is_dir():
        raise ConfigError(f"--out {out}: is a folder; name a file, e.g. {out / 'rubrics.yaml'}")
    path = journal_of(out)
    journal = Journal(path, choose(helpers, helper))
    vectors = Journal(path, helpers.get(embedder, where="--embedder")) if embedder is not None else None
    go_on = f"nothing is lost: type the same again, and what is in {path} is not asked again"
    try:
        result = asyncio.run(learn(labels, settings, journal, vectors, say))
    except BudgetSpent as e:
        raise BudgetSpent(f"{e}; {go_on}") from e
    except HelperFailed as e:
        raise HelperFailed(f"{e}; {go_on}") from e
    spent = journal.spent
    say(f"{spent.asked} answers of {journal.model}, {spent.remembered} of the journal; cost {spent.cost:.4g}")
    if result.objections and not settings.force:
        raise NotLearned("\n".join([*result.objections, f"no file was written; --force writes {out} all the same"]))
    save_rubrics(out, result.rubrics)
    return result, spent
