"""The promoted checkpoints of an experiment and their history (`astuner promote`, `astuner serve`).

::

    launcher_record/my_agent.promoted/    next to the run folder: it remains when a new run moves that folder
      promoted.json                       the serving checkpoint, and the history
      0001/step-000050/                   the model, with its card (README.md)

Invariant: ``promoted.json`` is replaced atomically, after the files it refers to are on the disk. If the process is
killed, the previous checkpoint still serves.
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
"""Value of ``--checkpoint`` for the checkpoint that serves."""
FORMAT = 1
"""Version of the file format. Readers reject newer versions."""
_ID = re.compile(r"[0-9]{4,8}")


def promoted_folder(run_dir: Path) -> Path:
    """Return the folder of a run's promoted checkpoints."""
    return run_dir.absolute().with_name(f"{run_dir.name}.promoted")


@dataclass(frozen=True, kw_only=True)
class Promotions:
    """Promoted checkpoints of one experiment, and the one that serves."""

    folder: Path
    serving: str | None = None
    """Entry that serves; None for the model before training."""
    entries: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """ID -> ``name`` of its folder, ``before`` (the entry that served before), and the gate's data."""
    changes: Sequence[Mapping[str, Any]] = ()
    """Changes of the serving entry, oldest first: ``at``, ``by``, ``to``."""

    @classmethod
    def read(cls, run_dir: Path) -> Promotions | None:
        """Read the promotions of a run.

        :returns: None if nothing was promoted.
        :raises CheckpointError: The file is damaged, or has a newer format.
        """
        folder = promoted_folder(run_dir)
        file = folder / "promoted.json"
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            if (version := int(data["format"])) > FORMAT:
                raise CheckpointError(
                    f"{file} has the format {version}, this version reads up to {FORMAT}: upgrade ASTuner's packages"
                )
            entries = {str(name): {**entry} for name, entry in data["entries"].items()}
            found = cls(folder=folder, serving=data["serving"], entries=entries, changes=tuple(data["changes"]))
            for name, entry in entries.items():  # used as paths
                if not _ID.fullmatch(name) or Path(entry["name"]).name != entry["name"]:
                    raise ValueError(f"{name!r} is not a valid entry name")
            if not {found.serving, *(entry["before"] for entry in entries.values())} <= {None, *entries}:
                raise ValueError("it refers to a missing entry")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise CheckpointError(
                f"{file} is damaged: {e!r}. Move it away and promote a model of that folder again: astuner promote "
                f"FILE --checkpoint {folder}/NUMBER/NAME; or select a model with --checkpoint"
            ) from e
        return found

    def model(self, entry: str | None) -> Path | None:
        """Return the checkpoint folder of an entry; None for the model before training."""
        return None if entry is None else self.folder / entry / self.entries[entry]["name"]

    def write(self) -> None:
        """Replace the file.

        :raises OSError: It cannot be written; the old file remains.
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
    """Return the promoted checkpoint that serves; None for the model before training.

    :raises CheckpointError: Nothing was promoted, or its folder is missing.
    """
    found = Promotions.read(run_dir)
    if found is None:
        raise CheckpointError(
            f"nothing was promoted in {run_dir}. Promote a checkpoint: astuner promote FILE; or use another one: "
            "--checkpoint best"
        )
    model = found.model(found.serving)
    if model is not None and not model.is_dir():
        raise CheckpointError(f"the promoted {model} is missing. Go back with: astuner promote FILE --back")
    return model
