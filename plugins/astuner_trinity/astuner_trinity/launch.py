"""Create, monitor, save and end Trinity's actors for one run.

A failure in one of them ends the run with its cause, and so does the death of an actor or a silence longer than the
timeout.  Invariant: `run` returns only after the last step was trained and its weights were measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from trinity.common.config import Config
from trinity.common.constants import SyncMethod
from trinity.manager.synchronizer import Synchronizer

from astuner.contracts.errors import AstunerError, RunError
from astuner.contracts.events import Note
from astuner.contracts.run import Run
from astuner_ray.cluster import last_words
from astuner_ray.redirect import Redirect
from astuner_trinity import mailbox
from astuner_trinity.lending import Borrower, Lent
from astuner_trinity.session import OF_TRAINER, Request, Session
from astuner_trinity.stages import RunExplorer, RunTrainer

_SYNCHRONIZER = "synchronizer"
"""Trinity's name of its actor between explorer and trainer, which outlives all processes of a run."""
_END_SECONDS = 10.0
"""Seconds that a part has to stop."""


def rewind(job: Path, done: int) -> None:
    """Reset Trinity's folder to the state after ``done`` steps, whatever a killed run has left there."""
    for state in job.glob("global_step_*"):
        if state.name != f"global_step_{done}":
            shutil.rmtree(state)
    for left in (*job.glob("latest_*_iteration.txt"), *job.glob("*_meta.json")):
        left.unlink()
    if done:
        job.mkdir(parents=True, exist_ok=True)
        (job / "latest_checkpointed_iteration.txt").write_text(str(done))
        (job / "explorer_meta.json").write_text(json.dumps({"latest_iteration": done}))
        (job / "trainer_meta.json").write_text(json.dumps({"latest_iteration": done}))


def run(
    session: Session, config: Config, redirect: Redirect, *, mini_batches: int, borrower: Borrower | None = None
) -> None:
    """Train to the end; completed work is saved however it ends, if a trainer is still available.

    :param mini_batches: Optimizer steps per batch.
    :param borrower: Gets the trainer from another command; None: create it here.
    :raises Interrupted: The user stopped the run.
    :raises RunError: A part failed, died or stalled; the message names it and the reason.
    """
    stage, loop = _Stage(session, config, redirect, borrower), asyncio.new_event_loop()
    try:
        _drive(loop, stage.run(mini_batches), session.training)
    except AstunerError:
        try:
            loop.run_until_complete(stage.save())
        except RunError as e:
            text = f"training since step {session.saved_step} could not be saved: {e}"
            session.training.publish(Note(text=text))
        raise
    finally:
        loop.run_until_complete(stage.end())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def _drive(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None], training: Run) -> None:
    """Run ``work`` until it ends or the user interrupts.

    :raises Interrupted: The user stopped the run; ``work`` was cancelled.
    """
    task = loop.create_task(work)

    def cancel() -> None:
        loop.call_soon_threadsafe(task.cancel)

    with training.interrupt.cancels(cancel):
        try:
            loop.run_until_complete(task)
        except asyncio.CancelledError:
            training.check_stop()
            raise


class _Stage:
    """Trinity's actors and the mailbox."""

    def __init__(self, session: Session, config: Config, redirect: Redirect, borrower: Borrower | None) -> None:
        self._session, self._config, self._redirect, self._borrower = session, config, redirect, borrower
        self._lent: Lent | None = None
        self._mailbox = mailbox.Mailbox()
        self._explorer: Any = None
        self._trainer: Any = None

    async def run(self, mini_batches: int) -> None:
        if self._borrower is not None:
            await self._borrow(self._borrower)
        parts = [self._mailbox.answer_requests(self._answer), self._train(mini_batches), self._watch()]
        if self._borrower is not None:
            parts.append(self._borrower.left())
        tasks = [asyncio.ensure_future(part) for part in parts]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:  # report ASTuner's own error before an actor's error that it caused
                if task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def save(self) -> None:
        """Let the trainer finish its step, and save it.

        :raises RunError: It cannot.
        """
        if self._trainer is None or not self._session.trained:
            return
        answering = asyncio.ensure_future(self._mailbox.answer_requests(self._answer_trainer))
        saving = asyncio.ensure_future(self._save())
        try:
            limit = float(self._config.synchronizer.sync_timeout)
            done, _ = await asyncio.wait({answering, saving}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise RunError(f"the trainer did not answer within {limit:g} s")
            done.pop().result()
        finally:
            answering.cancel()
            saving.cancel()

    async def end(self) -> None:
        """Stop the engines; a trainer has nothing to stop."""
        for actor in (self._explorer, self._trainer):
            if actor is not None:
                with contextlib.suppress(RayError, asyncio.TimeoutError):  # dead or unresponsive
                    await asyncio.wait_for(actor.stop.remote(), _END_SECONDS)
                ray.kill(actor)

    async def _borrow(self, borrower: Borrower) -> None:
        self._note(f"waiting for the command with trinity.mode=train, for at most {borrower.limit:g} s")
        self._lent = await borrower.trainer()
        self._trainer = self._lent.actor
        self._session.hear()
        self._note(f"the trainer is on {self._lent.host}; its log there: {self._lent.log}")

    def _note(self, text: str) -> None:
        with self._redirect.ours():
            self._session.training.publish(Note(text=text))

    async def _train(self, mini_batches: int) -> None:
        config = self._config
        self._session.doing = {"explorer": ("starts", 0.0), "trainer": ("starts", 0.0)}
        named = {"namespace": config.ray_namespace, "num_cpus": 0}
        if self._trainer is None:
            trainer = ray.remote(RunTrainer).options(name=config.trainer.name, **named)
            self._trainer = trainer.remote(config, mini_batches)
        else:  # it reserves its GPUs on its machine when created; the rollout engines use the others
            await self._named("trainer", self._trainer.is_alive.remote())
        self._explorer = ray.remote(RunExplorer).options(name=config.explorer.name, **named).remote(config)
        await self._both(self._explorer.prepare.remote(), self._trainer.prepare.remote())
        if config.synchronizer.sync_method == SyncMethod.NCCL:
            await Synchronizer.get_actor(namespace=config.ray_namespace).coordinate_weight_sync_setup.remote()
            await self._both(self._explorer.begin.remote(), self._trainer.sync_weight.remote())
        else:
            await self._named("trainer", self._trainer.sync_weight.remote())
            await self._named("explorer", self._explorer.begin.remote())
        await self._both(self._explorer.explore.remote(), self._trainer.train.remote())

    async def _save(self) -> None:
        await self._named("trainer", self._trainer.stop.remote())
        if self._session.trained:
            await self._named("trainer", self._trainer.save.remote())

    async def _both(self, explorer: Any, trainer: Any) -> None:
        """Wait for both; raise the first error without waiting for the other."""
        await _all(self._named("explorer", explorer), self._named("trainer", trainer))

    async def _named(self, who: str, reference: Any) -> None:
        """Wait for an actor.

        :raises RunError: The actor raised an error or died.
        """
        try:
            await reference
        except RayTaskError as e:
            if isinstance(e.cause, AstunerError):
                raise e.cause from None
            raise RunError(f"Trinity's {who} failed: {last_words(e)}; {self._where(who)}") from e
        except RayActorError as e:
            raise RunError(f"Trinity's {who} died: {last_words(e)}; {self._where(who)}") from e

    async def _watch(self) -> None:
        """Check that Trinity reports progress.

        :raises RunError: It has been silent for too long.
        """
        limit = float(self._config.synchronizer.sync_timeout)
        while (silence := self._session.silent_for) < limit:
            await asyncio.sleep(min(limit - silence, _END_SECONDS))
        waits = "; ".join(f"{who}: {what}" for who, (what, _) in self._session.doing.items())
        raise RunError(
            f"Trinity reported no progress for {limit:g} s (trinity.synchronizer.sync_timeout): {waits}; "
            f"see {self._redirect.log}"
        )

    def _where(self, who: str) -> str:
        what, _ = self._session.doing.get(who, ("not started", 0.0))
        lent = None if who == "explorer" else self._lent
        log = self._redirect.log if lent is None else f"{lent.log} on {lent.host}"
        return f"last activity: {what}; see {log} and {self._config.log.save_dir}"

    def _answer(self, request: Request) -> Any:
        with self._redirect.ours():
            return self._session.answer(request)

    def _answer_trainer(self, request: Request) -> Any:
        """Answer the trainer's requests only; the explorer is no longer needed."""
        return self._answer(request) if request.method in OF_TRAINER else None


def check_free(config: Config) -> None:
    """Check that the cluster is free before any part of a run starts.

    :raises RunError: Another run of the same experiment is on the cluster.
    """
    with contextlib.suppress(ValueError):  # raised by Ray if there is no such actor
        ray.get_actor(mailbox.NAME, namespace=config.ray_namespace)
        raise RunError(
            f"a run of {config.ray_namespace.removeprefix('astuner/')} is already on this Ray cluster. Wait until it "
            "ends, or set another astuner.experiment_name"
        )
    with contextlib.suppress(ValueError):  # Trinity leaves it for a while, with the version of its last weights
        ray.kill(ray.get_actor(_SYNCHRONIZER, namespace=config.ray_namespace))


async def _all(*parts: Coroutine[Any, Any, None]) -> None:
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        for task in asyncio.as_completed(tasks):
            await task
    finally:
        for left in tasks:
            left.cancel()
