"""One run as two commands: the one with the log rolls out, the other lends it a trainer, on a machine of its own.

They meet at a board, an actor of the run's in Ray's namespace of the experiment, whichever of them is there first:

    the run (`Borrower`)                            the lender (`lend`)
      how a trainer is made         ── offer ──▶      compares it with its own, makes the trainer
      takes the trainer             ◀── lent ──       says where it is
                                    ◀── left ──       was asked to stop: the run saves, and ends
      how it ended                  ── ended ─▶       ends likewise
      lets go of Ray                ◀── read ──

Invariant: neither waits for the other without end: a notice that does not come within its limit, or not any more
because the other has died, ends the command that waits for it, with what it waited for.
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
"""Seconds between looks at whether the other command is there, or the person asks to stop."""
_LAST_WORDS = 10.0
"""Seconds that a run which has ended waits until the lender knows."""


@dataclass(frozen=True, kw_only=True)
class Lent:
    """A trainer, and whose it is."""

    actor: Any
    host: str
    """The lender's machine, for messages."""
    log: str
    """Where the lender keeps what its Ray workers say."""


def fingerprints(values: Mapping[str, Any]) -> dict[str, str]:
    """Dotted key -> hash of its value: enough to compare, and no secret can be read from it."""
    return {key: hashlib.sha256(repr(value).encode()).hexdigest() for key, value in flat(values)}


def limit_of(values: Mapping[str, Any]) -> float:
    """Seconds that one of the two commands waits for the other."""
    return float(values["synchronizer"]["sync_timeout"])


class _Board:
    """The actor: a notice is pinned once, and whoever reads it waits until it is there."""

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
    """The run's side; on leaving the block the lender is told how the run ended."""

    def __init__(self, values: Mapping[str, Any], config: Any, mini_batches: int, done: Callable[[], str]) -> None:
        """:param values: what this command would tell Trinity.
        :param config: Trinity's `Config`, completed by Trinity.
        :param mini_batches: optimizer steps of each batch.
        :param done: says what was done, when the run has come to its end.
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
        with contextlib.suppress(RayError):  # the lender is gone, or the board with Ray itself: nobody is to be told
            ray.get(self._board.pin.remote("ended", cloudpickle.dumps((how, text))), timeout=_LAST_WORDS)
            if self._lent:
                ray.get(self._board.read.remote("read"), timeout=_LAST_WORDS)

    async def trainer(self) -> Lent:
        """The trainer that somebody lends.

        :raises RunError: nobody does.
        """
        try:
            text: bytes = await asyncio.wait_for(self._board.read.remote("lent"), self.limit)
        except asyncio.TimeoutError:
            raise RunError(
                f"nobody lent a trainer within {self.limit:g} s (trinity.synchronizer.sync_timeout): on the machine "
                "that trains type the same command with trinity.mode=train, and RAY_ADDRESS="
                f"{ray.get_runtime_context().gcs_address}"
            ) from None
        self._lent = True
        lent: Lent = cloudpickle.loads(text)
        return lent

    async def left(self) -> None:
        """Wait until the lender wants its trainer back.

        :raises RunError: it does.
        """
        host = cloudpickle.loads(await self._board.read.remote("left"))
        raise RunError(
            f"the trainer left: its command on {host} was asked to stop; what was trained is saved, and both commands "
            "typed again go on from there"
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
    """Lend a trainer to the run of the same namespace, until that ends; what it came to, in a line.

    :param values: what this command would tell Trinity.
    :param gpus: how many the trainer takes on this machine; 0: Ray places it, on several.
    :param log: where the output of the trainer's processes goes.
    :raises Interrupted: the person asked to stop, here or there.
    :raises RunError: there is no run, or it is another one than this command means, or it failed.
    """
    namespace, limit = str(values["ray_namespace"]), limit_of(values)
    _check_gpus(gpus)
    note(f"waits for the command with trinity.mode=explore at {cluster}, for at most {limit:g} s")
    board = _find(namespace, limit, cluster, interrupt)
    theirs, told, mini_batches = cloudpickle.loads(_awaited(board, "offer", interrupt))
    compare(fingerprints(values), theirs)
    trainer = _make(told, mini_batches, pinned=bool(gpus))
    host = socket.gethostname()
    ray.get(board.pin.remote("lent", cloudpickle.dumps(Lent(actor=trainer, host=host, log=str(log)))))
    note(f"lends a trainer to {namespace.removeprefix('astuner/')}")
    try:
        how, text = cloudpickle.loads(_awaited(board, "ended", interrupt, leaves=host))
        board.pin.remote("read", b"")
    except RayActorError:
        raise RunError(
            "the command with trinity.mode=explore, which has the run, has died; type both again: they go on from what "
            "was saved"
        ) from None
    if interrupt.requested:
        raise Interrupted(f"stopped on request; the run has ended, and says: {text}")
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
        except ValueError:  # Ray's word for: there is none
            time.sleep(_LOOK)
    raise RunError(
        f"no run of {namespace.removeprefix('astuner/')} has come to {cluster} within {limit:g} s "
        "(trinity.synchronizer.sync_timeout): on the machine that rolls out type the same command with "
        f"trinity.mode=explore, and RAY_ADDRESS={cluster.address}"
    )


def _awaited(board: Any, what: str, interrupt: Interrupt, *, leaves: str = "") -> bytes:
    """The notice.

    :param leaves: this machine's name, if the run is to be told of Ctrl-C, and to be waited for then; empty: nothing
        was begun that would have to be saved.
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
    """:raises Interrupted: the person asked to stop."""
    if interrupt.requested:
        raise Interrupted("stopped on request; nothing was lent yet")


def compare(mine: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Whether the `fingerprints` of both commands are the same.

    :raises RunError: they mean different things; names the first.
    """
    differ = sorted(key for key in {*mine, *theirs} if mine.get(key) != theirs.get(key))
    if differ:
        more = f", and {len(differ) - 1} more" if len(differ) > 1 else ""
        raise RunError(
            f"this command and the one with trinity.mode=explore are to be the same but for trinity.mode, and make "
            f"something else of Trinity's {differ[0]}{more}; compare them with: astuner config show FILE --backbone "
            "trinity --native"
        )


def _check_gpus(wanted: int) -> None:
    """:raises RunError: the trainer does not fit onto this machine."""
    here = ray.get_runtime_context().get_node_id()
    resources: Mapping[str, float] = next((node["Resources"] for node in ray.nodes() if node["NodeID"] == here), {})
    if (there := int(resources.get("GPU", 0))) < wanted:
        raise RunError(
            f"the trainer takes {wanted} GPUs, and Ray has {there} of this machine; type this command where there are "
            "enough, or write another trinity.explorer.rollout_model.engine_num: what does not roll out trains"
        )


def _make(told: Any, mini_batches: int, *, pinned: bool) -> Any:
    """The trainer, on this machine.

    :raises RunError: the run has one already.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    # what Trinity's own launcher sets in every process of a run; those below the trainer inherit it
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
    except ValueError as e:  # Ray's word for: the name is taken
        raise RunError(
            f"the run of {told.ray_namespace.removeprefix('astuner/')} has a trainer already; one is enough: {e}"
        ) from e
