"""Plan lines of backbones about disk space and expected speed.

Disk space is computed. Speeds are always measurements: rows of ``speeds.yaml`` and of a file that the variable `SPEEDS`
names.
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
"""Maximum ratio of parameters between a model and a measured row."""


def gib(size: float) -> str:
    """Return a number of bytes as text."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**28 else f"{size / 2**20:.3g} MiB"


def disk_plan(config: Config, *, checkpoint: float, state: float) -> dict[str, str]:
    """Return the plan's line about disk space.

    :param checkpoint: Bytes of one checkpoint.
    :param state: Bytes of one state to resume from, without files shared with a checkpoint.
    :raises ConfigError: The disk has too little free space, in addition to the run folder's current files.
    """
    common = config.astuner.trainer_common
    ends = [common.total_steps and math.ceil(common.total_steps / common.save_freq)]
    ends += [common.max_checkpoints and common.max_checkpoints + 1]  # plus the best one
    kept = min((n for n in ends if n), default=None)
    room = next(p for p in (config.run_dir, *config.run_dir.absolute().parents) if p.exists())
    free, most = shutil.disk_usage(room).free, 2 * state + ((kept or 1) + 1) * checkpoint  # plus one of each in writing
    text = (
        f"{gib(checkpoint)} per checkpoint ({f'at most {kept}' if kept else 'all'} kept) and {gib(state)} to resume; "
        f"at most {gib(most)}{'' if kept else ' after the first'}, with one being written; {gib(free)} free in {room}"
    )
    if most - _bytes_in(config.run_dir / "checkpoints", config.run_dir / "resume") > free:
        key = "astuner.trainer_common.max_checkpoints"
        raise ConfigError(
            f"{config.place(key)}: not enough disk space: {text}. Free some space, lower {key}, or move "
            "astuner.experiment_dir to a larger disk"
        )
    return {"disk": text}


def _bytes_in(*folders: Path) -> int:
    """Return the disk usage of the files below folders. Hard links count once."""
    found = [file.stat() for folder in folders for file in folder.rglob("*") if file.is_file()]
    return sum({stat.st_ino: stat.st_size for stat in found}.values())


class Speed(Section):
    """A row of measured speeds: generated tokens of a step divided by ``time/rollout`` and by ``time/train``."""

    backbone: str
    model: str
    parameters: float = Field(gt=0)
    device: str = Field(min_length=1)
    """``cpu``, or a part of torch's name for the GPU, such as ``H100``."""
    gpus: int = Field(1, ge=1)
    """Number of GPUs."""
    rollout: float = Field(gt=0)
    """Tokens per second."""
    train: float = Field(gt=0)
    """Tokens per second."""
    setting: str
    """Other conditions that determine the speed: number format, threads, number and length of episodes."""
    date: date
    commit: str = Field(min_length=1)
    command: str = Field(min_length=1)
    """Command of the measurement."""


def read_speeds(path: Path) -> list[Speed]:
    """Read the rows of a YAML list.

    :raises ConfigError: The file cannot be read, or a row is invalid; the message names the row and the key.
    """
    try:
        return TypeAdapter(list[Speed]).validate_python(yaml.safe_load(path.read_text(encoding="utf-8")))
    except ValidationError as e:
        page = "see docs/backbones/local.md#what-the-plan-says"
        wrong = [f"{path}: row {'.'.join(map(str, p['loc']))}: {p['msg']}; {page}" for p in e.errors()]
        raise ConfigError(wrong) from None
    except (OSError, ValueError, yaml.YAMLError) as e:
        raise ConfigError(f"{SPEEDS} names {path}, not a YAML file of speeds: {' '.join(str(e).split())}") from e


def speed_plan(
    backbone: str, *, parameters: float, device: str, gpus: int = 1, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the plan's line about speed, if a similar model was measured on this device.

    :param device: Name of the device in torch, or ``cpu``; see `device_here`.
    :raises ConfigError: The file that `SPEEDS` names is invalid; see `read_speeds`.
    """
    own = environ.get(SPEEDS, "")
    rows = (read_speeds(Path(own)) if own else []) + read_speeds(Path(__file__).with_name("speeds.yaml"))
    near = [
        (abs(math.log(parameters / row.parameters)), row)
        for row in rows
        if row.backbone == backbone and row.gpus == gpus and row.device.lower() in device.lower()
    ]
    gap, best = min(near, key=lambda found: found[0], default=(math.inf, None))  # the user's rows come first
    if best is None or gap > math.log(_NEAR):
        return {}
    text = (
        f"about {best.rollout:,.0f} generated tokens/s during rollout and {best.train:,.0f} during the update, "
        f"measured with {best.model}, {best.setting} ({best.date}, commit {best.commit}: {best.command})"
    )
    return {"tokens per second": text}


def device_here() -> str:
    """Return torch's name of this machine's first GPU, or ``cpu``."""
    try:
        import torch
    except ImportError:
        return "cpu"
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
