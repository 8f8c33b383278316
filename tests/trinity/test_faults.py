"""What goes wrong on Trinity: in episodes it is counted, never scored; in its parts it ends the run, named and soon."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from ..fsdp import faults
from ..fsdp.runs import Run, running

pytestmark = pytest.mark.timeout(1800)

FINE = (("fine", "fine", "fine", "fine"),)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Run]]:
    with faults.two_runs("trinity", tmp_path_factory) as found:
        yield found


def test_what_fails_is_counted_and_never_scored_until_too_much_fails(runs: Mapping[str, Run]) -> None:
    faults.check_counted_and_never_scored(runs["faulty"])


def test_an_agent_that_cannot_be_imported_in_a_worker_stops_the_run_and_says_so(runs: Mapping[str, Run]) -> None:
    faults.check_says_what_cannot_be_imported(runs["broken"])


@pytest.mark.parametrize(
    ("process", "says"),
    [
        ("RunTrainer", "Trinity's trainer died"),
        pytest.param("RunExplorer", "Trinity's explorer died", marks=pytest.mark.engines),
    ],
)
def test_a_run_takes_what_was_planned_and_a_part_that_dies_ends_it_so_that_it_can_be_continued(
    process: str, says: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("dies")
    file = faults.write(folder, steps=FINE)
    more = ["astuner.trainer_common.save_freq=1", "astuner.trainer_common.total_steps=200"]
    with running("trinity", file, folder / "run", "--no-resume", *more) as run:
        run.until(lambda: run.resumable_at() >= 2)
        print(run.planned())
        titles = {p: " ".join(p.cmdline()) for p in run.processes()}
        (victim,) = [p for p, title in titles.items() if title.startswith("ray::") and process in title]
        victim.kill()
        assert run.ends() == 1, run.said()
    assert says in run.said()
    assert run.resumable_at() >= 2
    print(run.planned_disk())
