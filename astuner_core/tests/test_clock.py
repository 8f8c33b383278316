"""Remaining time of a run, with a clock under the test's control."""

from __future__ import annotations

import pytest

from astuner.contracts.events import Progressed, RunResumed, SamplesCredited, Saving, StepEnded, ValidationEnded
from astuner.runs.clock import RunClock, Schedule, Timing, duration_text, timing_of
from astuner.runs.estimate import time_plan

SCHEDULE = Schedule(steps=4, validation_freq=2, save_freqs=(10**9, 10**9), groups=2, repeat=4, validation_tasks=16)
ROLLOUT, UPDATE, VALIDATION = 10.0, 30.0, 20.0


class Driver:
    """A run of `SCHEDULE` whose phases take a known time."""

    def __init__(self, earlier: Timing | None = None) -> None:
        self.now = 0.0
        self.clock = RunClock(SCHEDULE, earlier, clock=lambda: self.now)
        self.seen: list[tuple[float, float | None]] = []
        """Time and estimated remaining time after each event."""

    def phase(self, step: int, what: str, seconds: float, total: int = 0) -> None:
        for done in range(5):
            event = Progressed(step=step, total_steps=4, what=what, done=done * total // 4, total=total)
            self.seen.append((self.now, self.clock.progress(event).remaining))
            self.now += seconds / 4 if done < 4 else 0.0

    def validate(self, step: int) -> None:
        self.phase(step, "validation", VALIDATION, 16)
        self.clock.observe(ValidationEnded(step=step, metrics={}))
        self.seen.append((self.now, self.clock.remaining()))

    def run(self, first: int = 1) -> None:
        if first == 1:
            self.validate(0)
        for step in range(first, 5):
            self.phase(step, "rollout", ROLLOUT, 8)
            assert self.clock.observe(SamplesCredited(step=step, samples=())) == "update"
            self.phase(step, "update", UPDATE, 8)
            self.clock.observe(StepEnded(step=step, metrics={}))
            self.seen.append((self.now, self.clock.remaining()))
            if step % 2 == 0:
                self.validate(step)


def test_the_remaining_time_is_exact_once_every_phase_was_measured_and_never_zero() -> None:
    run = Driver()
    run.run()
    measured = [(end, left) for end, left in run.seen if end >= VALIDATION + ROLLOUT + UPDATE]
    assert measured
    for now, left in measured:
        assert left == pytest.approx(max(run.now - now, 1.0), abs=0.1)
    assert all(left is None or left >= 1.0 for _, left in run.seen)


def test_the_first_estimate_comes_during_the_first_validation_and_improves() -> None:
    run = Driver()
    run.run()
    assert run.seen[0][1] is None  # nothing has ended yet
    first = next((now, left) for now, left in run.seen if left is not None)
    assert first[0] < VALIDATION
    in_update = next(left for now, left in run.seen if now > VALIDATION + ROLLOUT + UPDATE / 4)
    assert in_update == pytest.approx(run.now - VALIDATION - ROLLOUT - UPDATE / 2, rel=0.1)


def test_an_earlier_run_gives_the_estimate_from_the_start() -> None:
    run = Driver(Timing(rollout=ROLLOUT, update=UPDATE, validation=VALIDATION, steps=4))
    assert run.clock.remaining() == 4 * (ROLLOUT + UPDATE) + 3 * VALIDATION
    run.run()
    for now, left in run.seen:
        assert left == pytest.approx(max(run.now - now, 1.0), abs=0.1)


def test_a_resumed_run_counts_only_what_is_left() -> None:
    run = Driver(Timing(rollout=ROLLOUT, update=UPDATE, validation=VALIDATION, steps=4))
    run.clock.observe(RunResumed(step=2, state={}))
    assert run.clock.remaining() == 2 * (ROLLOUT + UPDATE) + VALIDATION
    run.run(first=3)
    assert run.now == 2 * (ROLLOUT + UPDATE) + VALIDATION


def test_saving_and_a_validation_after_it_are_included() -> None:
    run = Driver(Timing(rollout=ROLLOUT, update=UPDATE, validation=VALIDATION, saving=5.0, steps=4))
    assert run.clock.remaining() == 4 * (ROLLOUT + UPDATE) + 3 * VALIDATION + 2 * 5.0
    assert run.clock.observe(Saving(step=2)) == "saving"
    run.clock.progress(Progressed(step=2, total_steps=4, what="saving"))
    run.now += 2.0
    assert run.clock.remaining() == 3.0 + 2 * (ROLLOUT + UPDATE) + 2 * VALIDATION + 2 * 5.0


def test_a_run_that_does_not_train_has_no_estimate() -> None:
    clock = RunClock(Schedule(steps=0, validation_freq=1, save_freqs=(1,), groups=1, repeat=1, validation_tasks=0))
    assert clock.progress(Progressed(step=0, total_steps=0, what="rollout", done=1, total=2)).remaining is None


def _row(step: int, seconds: float) -> dict[str, float]:
    return {"step": step, "time/rollout": 0.25 * seconds, "time/step": seconds, "helper/judge/cost": 0.5}


def test_the_plan_has_total_time_range_and_cost_of_an_earlier_run() -> None:
    rows = [
        {"step": 0, "time/validation": 5.0, "val/tasks": 4.0, "helper/judge/cost": 1.0},
        _row(1, 30.0),
        _row(2, 50.0),
    ]
    timing = timing_of(rows, SCHEDULE, elapsed=95.0, source="math.probe")
    assert (timing.start, timing.rollout, timing.update, timing.validation) == (10.0, 10.0, 30.0, 20.0)
    plan = time_plan(timing, SCHEDULE, probe_command="")
    assert plan["time"] == (
        "about 3 min 50 s (3 min 04 s to 4 min 36 s): 4 steps of 40.0 s (10.0 s rollout, 30.0 s update), "
        "3 validations of 20.0 s; measured in 2 steps of math.probe"
    )
    assert plan["cost"] == "about 14.00 for helper models, measured in 2 steps of math.probe"
    assert "astuner run x.yaml --probe" in time_plan(None, SCHEDULE, probe_command="astuner run x.yaml --probe")["time"]


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.9, "59 s"), (61, "1 min 01 s"), (7261, "2 h 01 min")])
def test_durations_are_readable(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
