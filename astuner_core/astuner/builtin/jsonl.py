"""Read tasks from JSON Lines files: one JSON object per line, in UTF-8.

Files are read lazily, with at most one line of ``max_line_bytes`` in memory. A line that is not a task either stops the
run, with its number and problem, or is skipped and recorded in `JsonlTaskReader.skipped`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pydantic import Field

from astuner.builtin.file_formats import describe_other_format
from astuner.contracts.building import BuildContext
from astuner.contracts.errors import DataError
from astuner.contracts.rows import BadRow, FieldMap, parse_json
from astuner.contracts.section import Section
from astuner.contracts.task_reader import TaskReader
from astuner.contracts.types import Split, Task
from astuner.plugins.user_code import close_name

_BOM = b"\xef\xbb\xbf"


class JsonlSplit(Section):
    """The file of one split."""

    file_path: str = Field(min_length=1)
    """JSON Lines file, relative to the folder of the experiment file."""


class JsonlConfig(Section):
    """Options of the task reader `jsonl`."""

    training: JsonlSplit
    """Training tasks."""
    validation: JsonlSplit | None = None
    """Validation tasks; null disables validation."""
    query_field: str | None = None
    """Field with the query; null uses the first of main_query, question, problem, query, prompt."""
    id_field: str | None = None
    """Field with the task's label; null uses task_id or id, otherwise file name and line number."""
    max_line_bytes: int = Field(4 << 20, ge=2)
    """Maximum length of a line; a longer line is an error."""


class JsonlTaskReader(TaskReader):
    """Task reader for the JSON Lines files ``training.file_path`` and ``validation.file_path``.

    :param base_dir: Folder of relative paths; None is the working directory.
    :param on_bad_line: ``stop`` raises `DataError` at a bad line; ``skip`` skips and records it.
    """

    config: JsonlConfig

    def __init__(
        self, config: JsonlConfig, base_dir: Path | None = None, on_bad_line: Literal["stop", "skip"] = "stop"
    ) -> None:
        super().__init__(config)
        self._base_dir = base_dir or Path()
        self._on_bad_line = on_bad_line
        self.skipped: dict[str, str] = {}
        """Place (``path:line``) -> problem of every line skipped so far."""

    @classmethod
    def from_config(cls, section: Any, context: BuildContext) -> JsonlTaskReader:
        return cls(section, context.base_dir, context.config.astuner.data.on_bad_line)

    def read(self, split: Split) -> Iterator[Task]:
        """Yield the tasks of ``split`` in file order; none without a validation file.

        :raises DataError: The file cannot be read, has no tasks, or (with on_bad_line: stop) has a bad line.
        """
        section = self.config.training if split is Split.TRAIN else self.config.validation
        if section is None:
            return
        path = self._base_dir / Path(section.file_path).expanduser()
        fields = FieldMap(self.config.query_field, self.config.id_field)
        tasks = 0
        try:
            with path.open("rb") as file:
                for number, line in enumerate(_lines(file, self.config.max_line_bytes), start=1):
                    try:
                        task = fields.task(_object(line, self.config.max_line_bytes), f"{path.name}:{number}")
                    except BadRow as e:
                        if number == 1 and (other := describe_other_format(path, section.file_path)):
                            raise DataError(f"{path}:1:1: {other}") from None
                        self._refuse(f"{path}:{number}", str(e))
                        continue
                    tasks += 1
                    yield task
        except (OSError, ValueError) as e:  # ValueError: the path contains a null byte
            why = f"{getattr(e, 'strerror', None) or e}; {_advice(e, path)}"
            raise DataError(f"cannot read the {split.value} tasks in {path}: {why}") from e
        if not tasks:
            raise DataError(f"{path} contains no tasks: {self._why_empty(path)}")

    def _refuse(self, place: str, fault: str) -> None:
        if self._on_bad_line == "stop":
            raise DataError(
                f"{place}: {fault}. Fix the line (one JSON object in UTF-8), or skip bad lines with "
                "astuner.data.on_bad_line: skip"
            )
        self.skipped[place] = fault

    def _why_empty(self, path: Path) -> str:
        bad = [fault for place, fault in self.skipped.items() if place.startswith(f"{path}:")]
        return f"all {len(bad)} lines are bad; the first: {bad[0]}" if bad else "the file is empty"


def _lines(file: BinaryIO, limit: int) -> Iterator[bytes]:
    """Yield the lines without line ends; only the first ``limit + 1`` bytes of a line over the limit."""
    first = True
    while line := file.readline(limit + 2):
        if len(line) == limit + 2 and not line.endswith(b"\n"):
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(1 << 16)
        line = line.rstrip(b"\r\n")
        yield line.removeprefix(_BOM) if first else line
        first = False


def _object(line: bytes, limit: int) -> object:
    if len(line) > limit:
        raise BadRow(f"the line is longer than {limit:,} bytes (max_line_bytes)")
    if not line.strip():
        raise BadRow("the line is empty")
    return parse_json(line)


def _advice(e: Exception, path: Path) -> str:
    if isinstance(e, FileNotFoundError):
        close = close_name(path.name, (file.name for file in path.parent.glob("*")))
        return f"correct file_path (relative to the folder of the experiment file){close}"
    if isinstance(e, IsADirectoryError):
        return "set file_path to a file, not a folder"
    return "check the file and its permissions"
