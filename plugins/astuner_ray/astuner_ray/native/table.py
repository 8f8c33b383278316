"""Convert ``astuner.*`` keys to an engine's keys, as defined in the ``keys.yaml`` of its backbone.

::

    words:     texts and lists that several keys share
    told:      one row for each engine key that ASTuner sets; a leading ``+`` adds a key that its files lack
      KEY:
        ours:    keys below ``astuner.`` that determine the value
        always:  value, if it is the same in every experiment
        fact:    or the name of one of the backbone's `Facts`
        unset:   value that keeps the engine's default
        says:    description of the value; default: the value of the single key in ``ours``
        why:     reason for the value
        free:    true: users may write the key below the engine's section
    locked:    further keys and sections that users may not write, and the alternative
    honours:   keys below ``astuner.`` that the backbone handles itself, and where
    refused:   keys with restricted values (``but``) or no support, and the alternative

ASTuner relies on most of the values that it sets, so setting only the engine's key would make the two disagree: unless
a row is free, users write the ``astuner.`` key.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import yaml

from astuner import Optim, TrainerCommon
from astuner.contracts.backbone import Capabilities
from astuner_models import serving
from astuner_objectives.step import is_corrected
from astuner_ray.native.facts import Facts

_F = TypeVar("_F", bound=Facts, contravariant=True)


class _Unset:
    """Type of `UNSET`: the engine's default stays."""

    def __repr__(self) -> str:
        return "the engine's default"


UNSET: Final = _Unset()


@dataclass(frozen=True, kw_only=True)
class Row(Generic[_F]):
    """One key of the engine."""

    native: str
    """Dotted name; a leading ``+`` adds a key that the engine's own files do not have."""
    ours: tuple[str, ...] = ()
    """Keys below ``astuner.`` that determine it; empty: the same in every experiment."""
    value: Callable[[_F], Any]
    """Returns the value, or `UNSET`."""
    says: str = ""
    """Description of the value; empty: the value of the single key in ``ours``."""
    why: str = ""
    locked: bool = True


class Table(Generic[_F]):
    """The settings that a backbone passes to its engine, and the ``astuner.`` keys that it supports."""

    def __init__(self, file: Path, values: Mapping[str, Callable[[_F], Any]]) -> None:
        """Read ``keys.yaml``.

        :param file: Path of ``keys.yaml``.
        :param values: Functions for rows without ``always`` or ``fact`` that do not copy a single key.
        """
        said = yaml.load(file.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        self.rows: tuple[Row[_F], ...] = tuple(_row(key, row, values.get(key)) for key, row in said["told"].items())
        self.locked: Mapping[str, str] = said["locked"]
        self.converted = frozenset(key for row in self.rows for key in row.ours)
        """Keys below ``astuner.`` that reach the engine's configuration."""
        self.own = frozenset(said["honours"])
        """Keys that the backbone handles itself."""
        refused = said["refused"].items()
        self.capabilities = Capabilities(
            in_process=False,
            honours=self.converted | self.own,
            only={key: tuple(found["but"]) for key, found in refused if "but" in found},
            instead={key: found["instead"] for key, found in refused},
        )

    def why_locked(self, native: str) -> str:
        """Return why users may not write the engine's key ``native`` (without ``+``); empty if they may."""
        for row in self.rows:
            if row.native.removeprefix("+") == native:
                if not row.locked:
                    return ""
                keys = " and ".join(f"astuner.{key}" for key in row.ours)
                return f"write {keys} instead" if keys else row.why
        section = max((s for s in self.locked if native == s or native.startswith(f"{s}.")), key=len, default="")
        return self.locked.get(section, "")


def _row(native: str, said: Mapping[str, Any], value: Callable[[_F], Any] | None) -> Row[_F]:
    ours, always = tuple(_flat(said.get("ours", ()))), said.get("always")
    if value is None and "always" in said:
        value = lambda facts: always  # noqa: E731
    elif value is None and "fact" in said:
        value = _fact(said["fact"])
    elif value is None:
        (key,) = ours
        value = _fact(f"a.{key}")
    if "unset" in said:
        value = _unless(said["unset"], value)
    says = said.get("says", f"{always}" if "always" in said else "")
    why, locked = said.get("why", ""), not said.get("free", False)
    return Row(native=native, ours=ours, value=value, says=says, why=why, locked=locked)


def _flat(keys: Any) -> Iterator[str]:
    """Yield the keys of a key or of nested lists of keys."""
    if isinstance(keys, str):
        yield keys
    else:
        for below in keys:
            yield from _flat(below)


def _fact(dotted: str) -> Callable[[Facts], Any]:
    """Return a function that reads a fact and converts it to a plain YAML value."""
    read = operator.attrgetter(dotted)

    def value(facts: Facts) -> Any:
        found = read(facts)
        return list(found) if isinstance(found, tuple) else found

    return value


def _unless(unset: Any, value: Callable[[_F], Any]) -> Callable[[_F], Any]:
    return lambda facts: UNSET if (found := value(facts)) == unset else found


# ------------------------------------------------------------------------------------- values shared by several engines

PASSED = tuple(name for name in Optim.model_fields if name not in ("lr", "weight_decay", "grad_clip"))
"""Settings below ``trainer_common.optim`` that go to the optimizer itself: VERL passes learning rate and weight decay
separately, and clips gradients itself."""


def kwargs_for(optim: Optim, *, total_steps: int | None, updates_per_step: int, vocab_size: int) -> dict[str, Any]:
    """Return VERL's ``override_optimizer_config`` for `astuner_ray.training.optim.PolicyOptimizer` as plain values.

    VERL creates the optimizer with ``lr``, ``weight_decay`` and these.  VERL's own schedule must stay constant without
    warm-up, because the optimizer applies the schedule.  Trinity's trainer passes all of it on to VERL.

    :param total_steps: Training steps of the run.
    :param updates_per_step: Optimizer steps of a training step: `mini_batch_num` x `ppo_epochs`.
    :param vocab_size: Rows of the model's embedding, ``vocab_size`` in its ``config.json``; a tokenizer often has fewer
        tokens.
    """
    return {
        **optim.model_dump(mode="json", include=set(PASSED)),
        "total_steps": None if total_steps is None else total_steps * updates_per_step,
        "updates_per_step": updates_per_step,
        "vocab_size": vocab_size,
    }


def optimizer(facts: Facts) -> dict[str, Any]:
    """Return `kwargs_for` the run."""
    return kwargs_for(
        facts.a.trainer_common.optim,
        total_steps=facts.total_steps,
        updates_per_step=facts.updates_per_step,
        vocab_size=facts.vocab_size,
    )


def precision(facts: Facts) -> Any:
    """Return ``model.dtype`` in the notation of VERL's FSDP settings."""
    return {"auto": UNSET, "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[facts.a.model.dtype]


def chat_template(facts: Facts) -> Any:
    """Return the text that replaces the tokenizer's template.

    :raises ConfigError: The template cannot be read.
    """
    template = serving.chat_template(facts.config)
    return UNSET if template is None else template


def checkpointing(facts: Facts) -> Any:
    """Return ``activation_checkpointing`` if the user wrote it; engines enable it by default."""
    written = facts.is_written("trainer_common.activation_checkpointing")
    return facts.a.trainer_common.activation_checkpointing if written else UNSET


def corrected(common: TrainerCommon, *types: str | None) -> TrainerCommon:
    """Return ``common`` with `rollout_is` resolved: ``auto`` becomes ``token-truncate`` unless all types are float32.

    :param types: Types of the trainer's passes and of the rollout engine; None is the engine's default.
    """
    if common.algorithm.rollout_is != "auto":
        return common
    found = "none" if all(kind in ("fp32", "float32") for kind in types) else "token-truncate"
    return common.model_copy(update={"algorithm": common.algorithm.model_copy(update={"rollout_is": found})})


def correction_plan(common: TrainerCommon) -> dict[str, str]:
    """Return the plan line about the rollout correction from `corrected`; empty without a correction."""
    algorithm = common.algorithm
    text = f"{algorithm.rollout_is} at {algorithm.rollout_is_threshold:g}, against rounding differences of rollouts"
    return {"correction": text} if is_corrected(algorithm) else {}


def old_need_no_pass(common: TrainerCommon) -> bool:
    """Return whether old log-probabilities need no pass: they come from the rollout or from the only optimizer step."""
    alone = common.mini_batch_num * common.ppo_epochs == 1 and not common.algorithm.use_kl_in_reward
    return alone or not is_corrected(common.algorithm)
