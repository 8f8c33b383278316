"""What a backbone's plan says beside memory: room on the disk, and how fast the run is expected to be.

The room is computed. Speeds never are: they are rows that somebody measured, of ``speeds.yaml`` and of the person's own
file, which the variable `SPEEDS` names.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from pydantic import Field, TypeAdapter, ValidationError

from astuner.contracts.errors import ConfigError
from astuner.contracts.section import Section

if TYPE_CHECKING:
    from astuner import Config

SPEEDS = "ASTUNER_SPEEDS"
_NEAR = 1.25
"""A row is of a model's size where neither has more parameters than this times the other's."""


def gib(size: float) -> str:
    """A number of bytes, as people say it."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**28 else f"{size / 2**20:.3g} MiB"


def disk_plan(config: Config, *, checkpoint: float, state: float) -> dict[str, str]:
    """Return the plan's line about the disk.

    :param checkpoint: bytes of one of ``checkpoints/``.
    :param state: bytes of what a run continues from, without what shares its files with a checkpoint.
    :raises ConfigError: The disk has too little space, counting what the run folder already holds.
    """
    common = config.astuner.trainer_common
    ends = [common.total_steps and math.ceil(common.total_steps / common.save_freq)]
    ends += [common.max_checkpoints and common.max_checkpoints + 1]  # and the best one
    kept = min((n for n in ends if n), default=None)
    room = next(p for p in (config.run_dir, *config.run_dir.absolute().parents) if p.exists())
    free, most = shutil.disk_usage(room).free, 2 * state + ((kept or 1) + 1) * checkpoint  # one of each in writing
    text = (
        f"{gib(checkpoint)} a checkpoint, of which {f'at most {kept}' if kept else 'all'} stay, and {gib(state)} to "
        f"continue from; {gib(most)} at most{'' if kept else ' after the first'}, new ones in writing included; "
        f"{gib(free)} are free in {room}"
    )
    if most - _bytes_in(config.run_dir / "checkpoints", config.run_dir / "resume") > free:
        key = "astuner.trainer_common.max_checkpoints"
        raise ConfigError(
            f"{config.place(key)}: not enough disk space: {text}. Free some, lower {key}, or move "
            "astuner.experiment_dir to a larger disk"
        )
    return {"disk": text}


def _bytes_in(*folders: Path) -> int:
    """Return what the files below some folders take on the disk; files with several names count once."""
    found = [file.stat() for folder in folders for file in folder.rglob("*") if file.is_file()]
    return sum({stat.st_ino: stat.st_size for stat in found}.values())


class Speed(Section):
    """A row of measured speeds: generated tokens of a step over its ``time/rollout``, and over its ``time/train``."""

    backbone: str
    model: str
    parameters: float = Field(gt=0)
    device: str = Field(min_length=1)
    """``cpu``, or a part of the name that torch has for a GPU, such as ``H100``."""
    gpus: int = Field(1, ge=1)
    """How many of them."""
    rollout: float = Field(gt=0)
    """Tokens per second."""
    train: float = Field(gt=0)
    """Tokens per second."""
    setting: str
    """Whatever else decides the speed: number format, threads, how many episodes of which length."""
    date: date
    commit: str = Field(min_length=1)
    command: str = Field(min_length=1)
    """What was typed to measure it."""


def read_speeds(path: Path) -> list[Speed]:
    """The rows of a file, a YAML list.

    :raises ConfigError: it cannot be read, or a row is not one; the message names the row and the key.
    """
    try:
        return TypeAdapter(list[Speed]).validate_python(yaml.safe_load(path.read_text(encoding="utf-8")))
    except ValidationError as e:
        page = "what a row has: docs/backbones/local.md#what-the-plan-says"
        wrong = [f"{path}: row {'.'.join(map(str, p['loc']))}: {p['msg']}; {page}" for p in e.errors()]
        raise ConfigError(wrong) from None
    except (OSError, ValueError, yaml.YAMLError) as e:
        raise ConfigError(f"{SPEEDS} names {path}, which is no YAML file of speeds: {' '.join(str(e).split())}") from e


def speed_plan(
    backbone: str, *, parameters: float, device: str, gpus: int = 1, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """A line of the plan: what was measured for a model of about this size on such a device, or that nothing was.

    :param device: as torch names it, or ``cpu``, see `device_here`.
    :raises ConfigError: the person's own file is not one, see `read_speeds`.
    """
    own = environ.get(SPEEDS, "")
    rows = (read_speeds(Path(own)) if own else []) + read_speeds(Path(__file__).with_name("speeds.yaml"))
    near = [
        (abs(math.log(parameters / row.parameters)), row)
        for row in rows
        if row.backbone == backbone and row.gpus == gpus and row.device.lower() in device.lower()
    ]
    gap, best = min(near, key=lambda found: found[0], default=(math.inf, None))  # the person's own first
    if best is None or gap > math.log(_NEAR):
        text = (
            f"nobody has measured {backbone} with about {parameters:,.0f} parameters on {gpus} x {device}"
            f"; rows of your own: a file that {SPEEDS} names"
        )
    else:
        text = (
            f"about {best.rollout:,.0f} generated and {best.train:,.0f} trained, as measured with {best.model}, "
            f"{best.setting} ({best.date}, commit {best.commit}: {best.command})"
        )
    return {"tokens per second": text}


def device_here() -> str:
    """This machine's first GPU, as torch names it, or ``cpu``."""
    try:
        import torch
    except ImportError:
        return "cpu"
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
