"""Split one run into two commands: one owns the run and rolls out, the other lends it a trainer on another machine.

They meet at a board, an actor of the run in Ray's namespace of the experiment; either may start first:

    the run (`Borrower`)                            the lender (`lend`)
      how to create the trainer     ── offer ──▶      compares it with its own, creates the trainer
      uses the trainer              ◀── lent ──       describes where it is
                                    ◀── left ──       was asked to stop: the run saves and ends
      how the run ended             ── ended ─▶       ends in the same way
      disconnects from Ray          ◀── read ──

Invariant: neither waits for the other forever: if a notice does not arrive within its limit, or the other command has
died, the waiting command ends with an error that names the notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from astuner.contracts.errors import Interrupted, RunError
from astuner.contracts.interrupt import Interrupt
from astuner.contracts.secrets import is_secret
from astuner_ray.cluster import Cluster
from astuner_ray.native.keys import flat
from astuner_trinity.stages import LentTrainer

BOARD = "astuner-board"
_LOOK = 0.5
"""Seconds between polls for the other command and for an interrupt."""
_LAST_WORDS = 10.0
"""Seconds that an ended run waits until the lender is informed."""


@dataclass(frozen=True, kw_only=True)
class Lent:
    """A lent trainer and its location."""

    actor: Any
    host: str
    """Machine of the lender, for messages."""
    log: str
    """File with the output of the lender's Ray workers."""


def fingerprints(values: Mapping[str, Any]) -> dict[str, str]:
    """Return a hash of each value by dotted key: enough to compare, without revealing secrets."""
    return {key: hashlib.sha256(repr(value).encode()).hexdigest() for key, value in flat(values)}


def limit_of(values: Mapping[str, Any]) -> float:
    """Return the seconds that one of the two commands waits for the other."""
    return float(values["synchronizer"]["sync_timeout"])


class _Board:
    """Actor on which a notice is pinned once; readers wait until it is there."""

    def __init__(self) -> None:
        self._notices: dict[str, asyncio.Future[bytes]] = {}

    async def pin(self, what: str, text: bytes) -> None:
        if not (notice := self._notice(what)).done():
            notice.set_result(text)

    async def read(self, what: str) -> bytes:
        return await asyncio.shield(self._notice(what))

    def _notice(self, what: str) -> asyncio.Future[bytes]:
        if what not in self._notices:
            self._notices[what] = asyncio.get_running_loop().create_future()
        return self._notices[what]


# ------------------------------------------------------------------------------------------------------------ the run


class Borrower:
    """The run's side; on exit, the lender is informed how the run ended."""

    def __init__(self, values: Mapping[str, Any], config: Any, mini_batches: int, done: Callable[[], str]) -> None:
        """Prepare an offer.

        :param values: Trinity's configuration according to this command.
        :param config: Trinity's `Config`, completed by Trinity.
        :param mini_batches: Optimizer steps per batch.
        :param done: Returns a description of the completed work when the run has ended.
        """
        self.limit = limit_of(values)
        self._offer, self._done = (fingerprints(values), config, mini_batches), done
        self._lent = False

    def __enter__(self) -> Borrower:
        self._board: Any = ray.remote(_Board).options(name=BOARD, num_cpus=0).remote()
        self._board.pin.remote("offer", cloudpickle.dumps(self._offer))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        stopped = kind is not None and issubclass(kind, (Interrupted, KeyboardInterrupt))
        how = "done" if kind is None else "stopped" if stopped else "failed"
        text = self._done() if kind is None else str(error) or kind.__name__
        with contextlib.suppress(RayError):  # the lender, or the board with Ray itself, is gone
            ray.get(self._board.pin.remote("ended", cloudpickle.dumps((how, text))), timeout=_LAST_WORDS)
            if self._lent:
                ray.get(self._board.read.remote("read"), timeout=_LAST_WORDS)

    async def trainer(self) -> Lent:
        """Return the lent trainer.

        :raises RunError: No trainer was lent in time.
        """
        try:
            text: bytes = await asyncio.wait_for(self._board.read.remote("lent"), self.limit)
        except asyncio.TimeoutError:
            raise RunError(
                f"no trainer was lent within {self.limit:g} s (trinity.synchronizer.sync_timeout): on the training "
                "machine, run the same command with trinity.mode=train and RAY_ADDRESS="
                f"{ray.get_runtime_context().gcs_address}"
            ) from None
        self._lent = True
        lent: Lent = cloudpickle.loads(text)
        return lent

    async def left(self) -> None:
        """Wait until the lender withdraws its trainer.

        :raises RunError: It did.
        """
        host = cloudpickle.loads(await self._board.read.remote("left"))
        raise RunError(
            f"the trainer was withdrawn: its command on {host} was stopped. Completed training is saved; run both "
            "commands again to continue"
        )


# --------------------------------------------------------------------------------------------------------- the lender


def lend(
    values: Mapping[str, Any],
    *,
    gpus: int,
    cluster: Cluster,
    interrupt: Interrupt,
    note: Callable[[str], None],
    log: Path,
) -> str:
    """Lend a trainer to the run of the same namespace until it ends; return a summary of the run.

    :param values: Trinity's configuration according to this command.
    :param gpus: GPUs of this machine for the trainer; 0: Ray places it on several machines.
    :param log: File for the output of the trainer's processes.
    :raises Interrupted: The user stopped one of the two commands.
    :raises RunError: There is no run, its configuration differs, or it failed.
    """
    namespace, limit = str(values["ray_namespace"]), limit_of(values)
    _check_gpus(gpus)
    note(f"waiting for the command with trinity.mode=explore at {cluster}, for at most {limit:g} s")
    board = _find(namespace, limit, cluster, interrupt)
    theirs, told, mini_batches = cloudpickle.loads(_awaited(board, "offer", interrupt))
    compare(fingerprints(values), theirs)
    trainer = _make(told, mini_batches, pinned=bool(gpus))
    host = socket.gethostname()
    ray.get(board.pin.remote("lent", cloudpickle.dumps(Lent(actor=trainer, host=host, log=str(log)))))
    note(f"lending a trainer to {namespace.removeprefix('astuner/')}")
    try:
        how, text = cloudpickle.loads(_awaited(board, "ended", interrupt, leaves=host))
        board.pin.remote("read", b"")
    except RayActorError:
        raise RunError(
            "the command with trinity.mode=explore, which owns the run, died; run both commands again to continue from "
            "the saved state"
        ) from None
    if interrupt.requested:
        raise Interrupted(f"stopped on request; the run has ended: {text}")
    if how == "stopped":
        raise Interrupted(f"the run was stopped: {text}")
    if how == "failed":
        raise RunError(f"the run failed: {text}")
    return str(text)


def _find(namespace: str, limit: float, cluster: Cluster, interrupt: Interrupt) -> Any:
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        _check(interrupt)
        try:
            return ray.get_actor(BOARD, namespace=namespace)
        except ValueError:  # raised by Ray if there is no such actor
            time.sleep(_LOOK)
    raise RunError(
        f"no run of {namespace.removeprefix('astuner/')} appeared on {cluster} within {limit:g} s "
        "(trinity.synchronizer.sync_timeout): on the rollout machine, run the same command with "
        f"trinity.mode=explore and RAY_ADDRESS={cluster.address}"
    )


def _awaited(board: Any, what: str, interrupt: Interrupt, *, leaves: str = "") -> bytes:
    """Wait for a notice and return it.

    :param leaves: Name of this machine, to inform the run of Ctrl-C and wait until it has saved; empty: nothing was
        started that would have to be saved.
    """
    reference, said = board.read.remote(what), False
    while not ray.wait([reference], timeout=_LOOK)[0]:
        if leaves and interrupt.requested and not said:
            board.pin.remote("left", cloudpickle.dumps(leaves))
            said = True
        elif not leaves:
            _check(interrupt)
    text: bytes = ray.get(reference)
    return text


def _check(interrupt: Interrupt) -> None:
    """Raise an error if the user asked to stop.

    :raises Interrupted: The user did.
    """
    if interrupt.requested:
        raise Interrupted("stopped on request; no trainer was lent yet")


def compare(mine: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Check that the `fingerprints` of both commands are equal.

    :raises RunError: They differ; the message names the first key.
    """
    differ = sorted(key for key in {*mine, *theirs} if mine.get(key) != theirs.get(key))
    if differ:
        more = f", and {len(differ) - 1} more" if len(differ) > 1 else ""
        raise RunError(
            f"this command and the command with trinity.mode=explore may differ only in trinity.mode, but Trinity's "
            f"{differ[0]} differs{more}. Compare them with: astuner config show FILE --backbone trinity --native"
        )


def _check_gpus(wanted: int) -> None:
    """Check that the trainer fits on this machine.

    :raises RunError: It does not.
    """
    here = ray.get_runtime_context().get_node_id()
    resources: Mapping[str, float] = next((node["Resources"] for node in ray.nodes() if node["NodeID"] == here), {})
    if (there := int(resources.get("GPU", 0))) < wanted:
        raise RunError(
            f"the trainer needs {wanted} GPUs, but Ray has {there} on this machine. Run this command on a machine with "
            "enough GPUs, or change trinity.explorer.rollout_model.engine_num: the remaining GPUs train"
        )


def _make(told: Any, mini_batches: int, *, pinned: bool) -> Any:
    """Create the trainer on this machine.

    :raises RunError: The run already has a trainer.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    # variables that Trinity's own launcher sets in every process of a run; children of the trainer inherit them
    switches = {name: value for name, value in told.get_envs().items() if not is_secret(name)}
    options = {
        "name": told.trainer.name,
        "namespace": told.ray_namespace,
        "num_cpus": 0,
        "runtime_env": {"env_vars": switches},
        "scheduling_strategy": here,
    }
    try:
        return ray.remote(LentTrainer).options(**options).remote(told, mini_batches, pinned=pinned)
    except ValueError as e:  # raised by Ray if the name is taken
        raise RunError(f"the run of {told.ray_namespace.removeprefix('astuner/')} already has a trainer: {e}") from e
