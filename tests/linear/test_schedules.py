"""Learning rates: their formulas, and that reactive ones go on from what they remember."""

import math

import pytest

from sparseallreduce.linear.training.schedules import (
    SCHEDULES,
    BoldDriver,
    Constant,
    InverseScaling,
    InverseTime,
    LargeBatch,
    Plateau,
    Reactive,
    StepDecay,
)

LOSSES = [0.7, 0.6, 0.59, 0.65, 0.6, 0.58, 0.58, 0.58, 0.58, 0.58, 0.58, 0.4]


@pytest.mark.parametrize("name", SCHEDULES)
def test_all_begin_at_the_given_rate_and_stay_above_zero(name):
    schedule = SCHEDULES[name](0.3)
    assert schedule(0) == 0.3
    assert all(0 < schedule(step) <= 0.3 for step in (1, 10, 10_000))


def test_rates_are_those_of_the_formulas():
    for step in (0, 1, 7, 1000):
        assert InverseScaling(0.5, 0.75)(step) == pytest.approx(0.5 / (step + 1) ** 0.75)
        assert StepDecay(0.5, 0.5, 4)(step) == pytest.approx(0.5 * 0.5 ** (step // 4))
        l2 = 0.01
        assert InverseTime(0.5, 1 / (0.5 * l2))(step) == pytest.approx(0.5 / (1 + 0.5 * l2 * step))  # Bottou
    assert InverseTime(100, 1 / (100 * l2))(10**9) == pytest.approx(1 / (l2 * 10**9), rel=1e-3)  # Pegasos


def test_a_bold_driver_grows_on_success_and_halves_on_failure():
    schedule, rates = BoldDriver(1.0), []
    for loss in (5.0, 4.0, 3.0, 3.5, 3.5, 3.4):
        schedule.react(loss)
        rates.append(schedule(0))
    assert rates == pytest.approx([1, 1.05, 1.05**2, 1.05**2 / 2, 1.05**2 / 4, 1.05**3 / 4])


def test_a_bold_driver_stays_where_growth_would_reach_its_limit():
    schedule = BoldDriver(1.0, growth=2.0)
    schedule.limit(5.0)
    rates = []
    for loss in (5.0, 4.0, 3.0, 2.0, 1.0, 2.0):
        schedule.react(loss)
        rates.append(schedule(0))
    assert rates == [1, 2, 4, 4, 4, 2]
    assert repr(BoldDriver(1.0)) == "BoldDriver(rate=1.0, growth=1.05, cut=0.5, last=inf)"  # part of what a checkpoint is of


def test_a_plateau_is_waited_for_and_cut():
    schedule, rates = Plateau(1.0, factor=0.5, patience=3, tolerance=0.01), []
    for loss in (0.5, 0.4, 0.395, 0.395, 0.395, 0.3, 0.3, 0.3, 0.3):
        schedule.react(loss)
        rates.append(schedule(0))
    assert rates == [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.25]


def test_a_larger_batch_climbs_to_its_rate_and_follows_the_schedule_beneath():
    schedule = LargeBatch(StepDecay(0.1, 0.5, 100), factor=8, steps=10)
    assert [schedule(step) for step in (0, 5, 10, 99, 100)] == pytest.approx([0.1, 0.45, 0.8, 0.8, 0.4])
    assert LargeBatch(Constant(0.1), 4)(0) == pytest.approx(0.4)
    driver = LargeBatch(BoldDriver(0.1), 2)
    for loss in (0.5, 0.6):
        driver.react(loss)
    assert driver(0) == pytest.approx(0.1)


@pytest.mark.parametrize("make", [BoldDriver, lambda rate: Plateau(rate, patience=2), lambda rate: LargeBatch(BoldDriver(rate), 3, 5)])
def test_a_restored_schedule_goes_on_as_if_nothing_had_been(make):
    whole, again = make(0.3), make(0.3)
    assert isinstance(whole, Reactive)
    for epoch, loss in enumerate(LOSSES):
        whole.react(loss)
        if epoch == 5:
            again.restore(whole.state())
        if epoch > 5:
            again.react(loss)
    assert again(7) == whole(7) != 0.3
    assert math.isfinite(whole(7))


@pytest.mark.parametrize(
    "make",
    [
        lambda: InverseScaling(1, -1),
        lambda: InverseTime(1, 0),
        lambda: StepDecay(1, 1.5),
        lambda: StepDecay(1, 0.5, 0),
        lambda: BoldDriver(1, growth=0.9),
        lambda: BoldDriver(1, cut=1.0),
        lambda: Plateau(1, factor=0),
        lambda: Plateau(1, patience=0),
        lambda: LargeBatch(Constant(1), 0),
        lambda: LargeBatch(Constant(1), 1, -1),
    ],
)
def test_parameters_out_of_range_are_refused(make):
    with pytest.raises(ValueError, match="must"):
        make()
