"""From ``astuner.*`` to an engine's keys, as the ``keys.yaml`` of its backbone says.

::

    words:     texts and lists that several keys share
    told:      one row for each key of the engine that ASTuner sets; a leading ``+`` adds one that its files lack
      KEY:
        ours:    the keys below ``astuner.`` that decide it
        always:  its value, where that is the same in every experiment
        fact:    or one of the backbone's `Facts`
        unset:   the value that leaves the engine's own default as it is
        says:    what the value is, in words or the engine's; without: that of the one key of ours
        why:
        free:    true: a person may write it below the engine's section
    locked:    further keys and sections that a person may not write, and what instead
    honours:   keys below ``astuner.`` that the backbone acts on itself, and where
    refused:   those that it takes with certain values only (``but``) or not at all, and what instead

ASTuner acts on most of what it tells an engine, so the engine's key alone would make the two disagree: unless a row is
free, a person writes the key of ours.
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
    """`UNSET`: the engine's own default stays."""

    def __repr__(self) -> str:
        return "the engine's default"


UNSET: Final = _Unset()


@dataclass(frozen=True, kw_only=True)
class Row(Generic[_F]):
    """One key of the engine."""

    native: str
    """Dotted; a leading ``+`` adds a key that the engine's own files do not have."""
    ours: tuple[str, ...] = ()
    """The keys below ``astuner.`` that decide it; none: it is the same in every experiment."""
    value: Callable[[_F], Any]
    """Its value, or `UNSET`."""
    says: str = ""
    """What the value is, in words or the engine's; empty: that of the one key of ours."""
    why: str = ""
    locked: bool = True


class Table(Generic[_F]):
    """What a backbone tells its engine, and which keys of ours that honours."""

    def __init__(self, file: Path, values: Mapping[str, Callable[[_F], Any]]) -> None:
        """:param file: ``keys.yaml``.
        :param values: of the rows that say neither, and have not the value of one key of ours.
        """
        said = yaml.load(file.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        self.rows: tuple[Row[_F], ...] = tuple(_row(key, row, values.get(key)) for key, row in said["told"].items())
        self.locked: Mapping[str, str] = said["locked"]
        self.converted = frozenset(key for row in self.rows for key in row.ours)
        """Keys of ours that reach the engine's configuration."""
        self.own = frozenset(said["honours"])
        """Those that the backbone acts on itself."""
        refused = said["refused"].items()
        self.capabilities = Capabilities(
            in_process=False,
            honours=self.converted | self.own,
            only={key: tuple(found["but"]) for key, found in refused if "but" in found},
            instead={key: found["instead"] for key, found in refused},
        )

    def why_locked(self, native: str) -> str:
        """Why a person may not write the engine's key ``native`` (without ``+``); empty if it is free."""
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
    """One key, or a list of keys and of such lists."""
    if isinstance(keys, str):
        yield keys
    else:
        for below in keys:
            yield from _flat(below)


def _fact(dotted: str) -> Callable[[Facts], Any]:
    """What reads it, plain as YAML has it."""
    read = operator.attrgetter(dotted)

    def value(facts: Facts) -> Any:
        found = read(facts)
        return list(found) if isinstance(found, tuple) else found

    return value


def _unless(unset: Any, value: Callable[[_F], Any]) -> Callable[[_F], Any]:
    return lambda facts: UNSET if (found := value(facts)) == unset else found


# ------------------------------------------------------------------------------------------- values on several engines

PASSED = tuple(name for name in Optim.model_fields if name not in ("lr", "weight_decay", "grad_clip"))
"""The settings below ``trainer_common.optim`` that go to the optimizer itself: VERL passes the rate and the decay from
keys of its own, and clips by itself."""


def kwargs_for(optim: Optim, *, total_steps: int | None, updates_per_step: int, vocab_size: int) -> dict[str, Any]:
    """VERL's ``override_optimizer_config`` for `astuner_ray.training.optim.PolicyOptimizer`, as YAML has it.

    VERL makes the optimizer with ``lr``, ``weight_decay`` and these.  Its own schedule must stay constant and without a
    warm-up, for the optimizer has the schedule.  Trinity's trainer passes all of it on to VERL.

    :param total_steps: Training steps of the run.
    :param updates_per_step: Optimizer steps of a training step: `mini_batch_num` x `ppo_epochs`.
    :param vocab_size: rows of the model's embedding, which is ``vocab_size`` in its ``config.json``: a tokenizer often
        has fewer tokens.
    """
    return {
        **optim.model_dump(mode="json", include=set(PASSED)),
        "total_steps": None if total_steps is None else total_steps * updates_per_step,
        "updates_per_step": updates_per_step,
        "vocab_size": vocab_size,
    }


def optimizer(facts: Facts) -> dict[str, Any]:
    """`kwargs_for` the run."""
    return kwargs_for(
        facts.a.trainer_common.optim,
        total_steps=facts.total_steps,
        updates_per_step=facts.updates_per_step,
        vocab_size=facts.vocab_size,
    )


def precision(facts: Facts) -> Any:
    """``model.dtype`` as VERL's FSDP spells the type of the passes."""
    return {"auto": UNSET, "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[facts.a.model.dtype]


def chat_template(facts: Facts) -> Any:
    """The text that replaces the tokenizer's own template.

    :raises ConfigError: it cannot be read.
    """
    template = serving.chat_template(facts.config)
    return UNSET if template is None else template


def checkpointing(facts: Facts) -> Any:
    """``activation_checkpointing`` where it is written; the engines turn it on themselves."""
    written = facts.is_written("trainer_common.activation_checkpointing")
    return facts.a.trainer_common.activation_checkpointing if written else UNSET


def corrected(common: TrainerCommon, *types: str | None) -> TrainerCommon:
    """``common`` with a `rollout_is` that is decided: ``auto`` is ``token-truncate`` unless all is in float32.

    :param types: of the trainer's passes and of the rollout engine, as they are told; None is the engine's own default.
    """
    if common.algorithm.rollout_is != "auto":
        return common
    found = "none" if all(kind in ("fp32", "float32") for kind in types) else "token-truncate"
    return common.model_copy(update={"algorithm": common.algorithm.model_copy(update={"rollout_is": found})})


def correction_plan(common: TrainerCommon) -> dict[str, str]:
    """A line of the plan: how what `corrected` gives corrects the loss; none where it does not."""
    algorithm = common.algorithm
    text = f"{algorithm.rollout_is} at {algorithm.rollout_is_threshold:g}, of what rounding makes of rollouts"
    return {"correction": text} if is_corrected(algorithm) else {}


def old_need_no_pass(common: TrainerCommon) -> bool:
    """Whether nobody need compute old log-probabilities: they are the rollout's, or those of an only optimizer step."""
    alone = common.mini_batch_num * common.ppo_epochs == 1 and not common.algorithm.use_kl_in_reward
    return alone or not is_corrected(common.algorithm)
