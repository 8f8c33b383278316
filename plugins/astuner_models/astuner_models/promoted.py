"""Which checkpoint was let through to serve, and which ones before it (`astuner promote`, `astuner serve`).

::

    launcher_record/my_agent.promoted/    beside the run's folder: a new run moves that away, and this stays
      promoted.json                       which one serves, and the history
      0001/step-000050/                   the model, with its card (README.md)

Invariant: ``promoted.json`` is replaced as a whole, after what it names is on the disk; a process that is killed leaves
what served before.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from astuner.contracts.errors import CheckpointError

PROMOTED = "promoted"
"""What ``--checkpoint`` calls the one that serves."""
FORMAT = 1
"""Version of the file's layout; a reader refuses a newer one."""
_ID = re.compile(r"[0-9]{4,8}")


def promoted_folder(run_dir: Path) -> Path:
    """Where a run's promoted checkpoints are."""
    return run_dir.absolute().with_name(f"{run_dir.name}.promoted")


@dataclass(frozen=True, kw_only=True)
class Promotions:
    """What was promoted in one experiment, and what serves."""

    folder: Path
    serving: str | None = None
    """The entry that serves; None: the model before training."""
    entries: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Id -> ``name`` of its folder, ``before`` (what served before it), and what the gate wrote down."""
    changes: Sequence[Mapping[str, Any]] = ()
    """Every change of what serves, the oldest first: ``at``, ``by``, ``to``."""

    @classmethod
    def read(cls, run_dir: Path) -> Promotions | None:
        """
        :returns: None where nothing was ever promoted.
        :raises CheckpointError: the file is damaged, or of a newer version.
        """
        folder = promoted_folder(run_dir)
        file = folder / "promoted.json"
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            if (version := int(data["format"])) > FORMAT:
                raise CheckpointError(
                    f"{file} has the format {version} and this version reads up to {FORMAT}: upgrade ASTuner's packages"
                )
            entries = {str(name): {**entry} for name, entry in data["entries"].items()}
            found = cls(folder=folder, serving=data["serving"], entries=entries, changes=tuple(data["changes"]))
            for name, entry in entries.items():  # they become paths
                if not _ID.fullmatch(name) or Path(entry["name"]).name != entry["name"]:
                    raise ValueError(f"{name!r} is no entry's name")
            if not {found.serving, *(entry["before"] for entry in entries.values())} <= {None, *entries}:
                raise ValueError("an entry that it names is not there")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise CheckpointError(
                f"{file} is damaged: {e!r}; move it away, and promote again one of the models beside it: astuner "
                f"promote FILE --checkpoint {folder}/NUMBER/NAME; or name the model to use: --checkpoint"
            ) from e
        return found

    def model(self, entry: str | None) -> Path | None:
        """The checkpoint folder of an entry; None: the model before training."""
        return None if entry is None else self.folder / entry / self.entries[entry]["name"]

    def write(self) -> None:
        """Replace the file.

        :raises OSError: it cannot be written; the old one is still there.
        """
        data = {"format": FORMAT, "serving": self.serving, "entries": self.entries, "changes": self.changes}
        temporary = self.folder / f".promoted.{os.getpid()}.tmp"
        try:
            with temporary.open("w", encoding="utf-8") as file:
                json.dump(data, file, indent=1, ensure_ascii=False)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.folder / "promoted.json")
        finally:
            temporary.unlink(missing_ok=True)


def served_checkpoint(run_dir: Path) -> Path | None:
    """The promoted checkpoint that serves; None: the model before training.

    :raises CheckpointError: nothing was promoted, or its folder is not there.
    """
    found = Promotions.read(run_dir)
    if found is None:
        raise CheckpointError(
            f"nothing was promoted in {run_dir}; promote a checkpoint: astuner promote FILE; or take another one: "
            "--checkpoint best"
        )
    model = found.model(found.serving)
    if model is not None and not model.is_dir():
        raise CheckpointError(f"{model}, which was promoted, is not there; go back: astuner promote FILE --back")
    return model
