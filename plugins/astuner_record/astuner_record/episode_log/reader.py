"""A run's log for whoever looks at it: count, list, filter, search, and jump to one episode.

Lists come from the index, an episode from its own bytes in its own file.  A run that goes on is followed by calling
`EpisodeLog.refresh` now and then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

from astuner.contracts.errors import DataError
from astuner.contracts.types import Episode, Sample, Split
from astuner.rollout.samples import build_samples
from astuner_record.episode_log import overview
from astuner_record.episode_log.index import SEPARATOR, Index
from astuner_record.episode_log.journal import recover
from astuner_record.episode_log.rows import Row, read_episode
from astuner_record.episode_log.schema import files, pyarrow
from astuner_record.episode_log.stream import Place, StreamFile
from astuner_record.episode_log.where import query_of

ORDERS = ("written", "step", "reward", "seconds", "turns", "tokens", "time")
"""What a list can be sorted by; ``written`` is the order in which episodes were written."""
_BATCHES = 4
"""That are kept; of a few MiB each."""


@dataclass(frozen=True, kw_only=True)
class Listed:
    """An episode as a list shows it: a row of the index."""

    id: int
    """Of the row in the index; another one after the index was made again."""
    file: str
    place: Place
    """Of the batch."""
    row: int
    """In the batch."""
    episode_id: str
    group_id: str
    task_id: str
    step: int
    split: str
    attempt: int
    time: float
    """When it ended, in seconds since 1970."""
    query: str
    """Its first 300 characters."""
    stop_reason: str
    reward: float | None
    success: bool | None
    error: str
    seconds: float
    retries: int
    agents: tuple[str, ...]
    tools: tuple[str, ...]
    """Those that were called."""
    turns: int
    """Those of models outside of the run among them."""
    tokens: int
    """Generated."""
    prompt_tokens: int
    """Of the prompts, each counted once."""
    branches: int
    """How many turns continue no earlier one."""


@dataclass(frozen=True, kw_only=True)
class Credited:
    """What one sample of an episode was credited with."""

    step: int
    """The one it was trained in."""
    sample: int
    agent: str
    policy: str
    advantage: float
    token_weight: float
    reward: float
    trained_tokens: int
    trainer_logprobs: tuple[float, ...] | None = None
    """Of each trained token, in their order, under the weights before the update; None where the trainer computed none:
    see `astuner.contracts.events.LogprobsComputed`."""


@dataclass(frozen=True, kw_only=True)
class LoggedEpisode:
    """An episode out of the log, with its credit."""

    step: int
    row: Row
    """As it is in the file; free-form values are JSON text."""
    credit: tuple[Credited, ...]
    """One per sample, in their order; empty where the episode was not trained on."""

    @cached_property
    def episode(self) -> Episode:
        """With whole prompts, as it was when it ended."""
        return read_episode(self.row)

    def samples(self) -> tuple[Sample, ...]:
        """The samples that were trained on: which token was trained, with which advantage and weight.

        Each is that of `credit` at the same place, whose ``trainer_logprobs`` are of the ones in its loss mask.
        """
        if not self.credit:
            return ()
        built = build_samples(self.episode, max_samples=len(self.credit)).samples
        return tuple(
            replace(s, advantage=c.advantage, token_weight=c.token_weight, reward=c.reward)
            for s, c in zip(built, self.credit, strict=True)
        )


class EpisodeLog:
    """The log of one run, open for reading; of one thread."""

    def __init__(self, run: Path) -> None:
        """
        :param run: a run folder.
        :raises DataError: it has no log, or a damaged one.
        :raises MissingDependency: pyarrow is not installed.
        """
        self.folder = run / "episodes"
        pyarrow()
        problems = recover(self.folder)  # what is nowhere else makes a file
        if not files(self.folder):
            raise DataError(
                f"there is no episode log in {self.folder}: no episode has ended yet, or the run was made with "
                "astuner.trainer_common.save_tokens=false, without pyarrow, or by an ASTuner that wrote none"
            )
        self._index = Index(self.folder, to_read=True)
        self._files: dict[str, StreamFile] = {}
        self._batches: dict[tuple[str, Place], Any] = {}
        """The last ones that were read."""
        self.problems: tuple[str, ...] = ()
        """What cannot be read, as of the last `refresh`, a sentence each."""
        self.refresh()
        self.problems = tuple(dict.fromkeys((*problems, *self.problems)))

    def refresh(self) -> None:
        """See what was written since."""
        self._close_files()
        self.problems = (*recover(self.folder), *self._index.refresh())

    def count(self, where: Sequence[str] = ()) -> int:
        """How many episodes meet all conditions.

        :raises ConfigError: a condition cannot be read.
        """
        sql, values = query_of(where)
        return int(self._index.db.execute(f"SELECT count(*) FROM episodes WHERE {sql}", values).fetchone()[0])

    def list(
        self,
        where: Sequence[str] = (),
        *,
        order: str = "written",
        descending: bool = False,
        limit: int = -1,
        offset: int = 0,
    ) -> list[Listed]:
        """Episodes that meet all conditions, e.g. ``["reward>=0.5", "agent=wolf"]``.

        :param order: one of `ORDERS`.
        :param limit: -1 for all.
        :raises ConfigError: a condition cannot be read.
        """
        sql, values = query_of(where)
        rows = self._index.db.execute(  # what is sorted are ids, and not whole rows
            f"SELECT episodes.* FROM (SELECT id FROM episodes WHERE {sql} ORDER BY {_ordering(order, descending)} "
            f"LIMIT ? OFFSET ?) AS page JOIN episodes USING (id) ORDER BY {_ordering(order, descending)}",
            [*values, limit, offset],
        )
        names = [column[0] for column in rows.description]
        return [_listed(dict(zip(names, row, strict=True))) for row in rows]

    def find(self, episode_id: str) -> Listed:
        """:raises DataError: there is no such episode."""
        found = self.list([f"episode={episode_id}"])
        if not found:
            raise DataError(f"there is no episode {episode_id!r} in {self.folder}; `astuner export` lists them")
        return found[0]

    def read(self, listed: Listed | str) -> LoggedEpisode:
        """One episode with everything that the log knows about it.

        :param listed: what a list says, or an episode's id.
        :raises DataError: there is no such episode, or its file was replaced since the list was made.
        """
        at = self.find(listed) if isinstance(listed, str) else listed
        row = self._batch(at.file, at.place).slice(at.row, 1).to_pylist()[0]
        return LoggedEpisode(step=row["step"], row=row, credit=self.credit(at.episode_id))

    def read_all(self, where: Sequence[str] = ()) -> Iterator[LoggedEpisode]:
        """The episodes that meet all conditions, as they were written."""
        for listed in self.list(where):
            yield self.read(listed)

    def credit(self, episode_id: str) -> tuple[Credited, ...]:
        """What the samples of an episode were credited with."""
        rows = self._index.db.execute(
            "SELECT file, offset, length, row, step, sample, agent, policy, advantage, token_weight, reward, "
            "trained_tokens FROM credit WHERE episode_id = ? ORDER BY sample",
            (episode_id,),
        )
        names = [column[0] for column in rows.description][4:]
        return tuple(
            Credited(
                **dict(zip(names, row[4:], strict=True)),
                trainer_logprobs=self._trainer_logprobs(row[0], Place(offset=row[1], length=row[2]), row[3]),
            )
            for row in rows.fetchall()
        )

    def position(
        self, episode_id: str, where: Sequence[str] = (), *, order: str = "written", descending: bool = False
    ) -> int | None:
        """Which place an episode has in such a `list`, counted from 0; None where it is not in it; raises as that."""
        return overview.position(self._index.db, episode_id, where, _ordering(order, descending))

    def steps(self, split: str = Split.TRAIN.value) -> Sequence[overview.StepOverview]:
        """The steps of a split, in order; step 0 is before training."""
        return overview.steps(self._index.db, split)

    def groups(
        self, where: Sequence[str] = (), *, limit: int = -1, offset: int = 0
    ) -> Sequence[overview.GroupOverview]:
        """The groups of the episodes that meet all conditions, as they were begun to be written; raises as `list`."""
        return overview.groups(self._index.db, where, limit, offset)

    def count_groups(self, where: Sequence[str] = ()) -> int:
        """How many groups there are of the episodes that meet all conditions; raises as `list`."""
        return overview.count_groups(self._index.db, where)

    def facets(self) -> overview.Facets:
        """Which values there are to filter by, and how many episodes have each."""
        return overview.facets(self._index.db)

    def close(self) -> None:
        self._close_files()
        self._index.close()

    def __enter__(self) -> EpisodeLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _trainer_logprobs(self, file: str, place: Place, row: int) -> tuple[float, ...] | None:
        batch = self._batch(file, place)
        if "trainer_logprobs" not in batch.schema.names:
            return None
        found = batch.column("trainer_logprobs").slice(row, 1).to_pylist()[0]
        return None if found is None else tuple(found)

    def _batch(self, file: str, place: Place) -> Any:
        """A batch; whoever reads one row wants the next one of it soon."""
        if (file, place) not in self._batches:
            while len(self._batches) >= _BATCHES:
                del self._batches[next(iter(self._batches))]
            read = self._file(file)
            if place.end > read.size:
                raise _replaced(read.path)
            self._batches[file, place] = read.read(place)
        return self._batches[file, place]

    def _file(self, name: str) -> StreamFile:
        if name not in self._files:
            file = StreamFile(self.folder / name)
            if not self._index.is_of(name, file.file_id):
                raise _replaced(file.path)
            self._files[name] = file
        return self._files[name]

    def _close_files(self) -> None:
        self._batches.clear()
        for file in self._files.values():
            file.close()
        self._files.clear()


def _ordering(order: str, descending: bool) -> str:
    """SQL after ORDER BY; episodes that are equal in it are in the order in which they were indexed."""
    if order not in ORDERS:
        raise ValueError(f"order is one of {', '.join(ORDERS)}, not {order!r}")
    columns = ("file", "offset", "id") if order == "written" else (order, "id")
    return ", ".join(f"{column} {'DESC' if descending else 'ASC'}" for column in columns)


def _replaced(path: Path) -> DataError:
    return DataError(f"{path} was replaced by a run that was resumed; type the command again")


def _listed(row: dict[str, Any]) -> Listed:
    place = Place(offset=row.pop("offset"), length=row.pop("length"))
    success = row.pop("success")
    agents, tools = (tuple(filter(None, row.pop(key).split(SEPARATOR))) for key in ("agents", "tools"))
    return Listed(**row, agents=agents, tools=tools, place=place, success=None if success is None else bool(success))
