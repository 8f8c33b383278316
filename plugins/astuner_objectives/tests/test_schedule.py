"""The learning rate of each optimizer step."""

import pytest

from astuner.config.schema import Optim
from astuner.contracts.errors import ConfigError
from astuner_objectives.schedule import learning_rate

WARM = {"lr": 1.0, "lr_warmup_steps": 4, "min_lr_ratio": 0.2}


def rates(steps, total_steps=14, **changes):
    return [learning_rate(Optim(**WARM, **changes), step, total_steps) for step in steps]


def test_the_rate_rises_linearly_and_reaches_its_peak_with_the_last_step_of_the_warmup():
    for scheduler in ("constant", "linear", "cosine"):
        assert rates((0, 1, 3), lr_scheduler=scheduler) == [0.25, 0.5, 1.0]


def test_after_the_warmup_it_takes_the_schedules_shape_down_to_its_share():
    assert rates((4, 9, 50)) == [1.0, 1.0, 1.0]
    assert rates((4, 9, 14, 50), lr_scheduler="linear") == pytest.approx([1.0, 0.6, 0.2, 0.2])
    assert rates((4, 9, 14, 50), lr_scheduler="cosine") == pytest.approx([1.0, 0.6, 0.2, 0.2])
    quarters = rates((6, 12), total_steps=14, lr_scheduler="cosine")
    assert quarters == pytest.approx([0.2 + 0.8 * 0.904508497, 0.2 + 0.8 * 0.095491503])  # (1 + cos 36°) / 2, 144°


def test_a_warmup_of_the_whole_run_ends_at_the_peak():
    assert rates((3, 4), total_steps=4, lr_scheduler="linear") == [1.0, 1.0]


def test_a_schedule_that_decays_must_know_the_end():
    assert rates((0, 9), total_steps=None) == [0.25, 1.0]
    for scheduler in ("linear", "cosine"):
        with pytest.raises(ConfigError, match=rf"lr_scheduler is {scheduler}.*total_steps"):
            rates((4,), total_steps=None, lr_scheduler=scheduler)
