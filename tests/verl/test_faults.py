"""What goes wrong in episodes, on VERL: it is counted, never scored, and training goes on or says why it cannot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from ..fsdp import faults
from ..fsdp.runs import Run, running

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Run]]:
    with faults.two_runs("verl", tmp_path_factory) as found:
        yield found


def test_what_fails_is_counted_and_never_scored_until_too_much_fails(runs: Mapping[str, Run]) -> None:
    faults.check_counted_and_never_scored(runs["faulty"])
    log = (runs["faulty"].folder / "run.log").read_text()
    for text in (runs["faulty"].said(), log):  # also of the one whose episodes were then done by another
        assert text.count("an episode worker died; its ") >= 3, text


def test_an_agent_that_cannot_be_imported_in_a_worker_stops_the_run_and_says_so(runs: Mapping[str, Run]) -> None:
    faults.check_says_what_cannot_be_imported(runs["broken"])


def test_a_run_takes_what_was_planned_and_a_worker_that_dies_ends_it_named_in_its_log_too(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("dies")
    file = faults.write(folder, steps=(("fine", "fine", "fine", "fine"),))
    with running("verl", file, folder / "run", "--no-resume", "astuner.trainer_common.total_steps=200") as run:
        run.until(lambda: "step    1/" in run.said())
        print(run.planned())
        titles = {p: " ".join(p.cmdline()) for p in run.processes()}
        (victim,) = [p for p, title in titles.items() if title.startswith("ray::WorkerDict")]
        victim.kill()
        assert run.ends() == 1, run.said()
    last = run.said().strip().splitlines()[-1]
    assert last.startswith(f"astuner: WorkerDict (pid {victim.pid} on 127.0.0.1) died: "), run.said()
    assert "because memory ran out" in last
    assert f"the run stopped: RunError: WorkerDict (pid {victim.pid} " in (folder / "run" / "run.log").read_text()
