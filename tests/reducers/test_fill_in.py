"""The measurement of fill-in: its bounds hold on real gradients."""

import fill_in
import pytest
from lossy_tasks import Digits


@pytest.mark.parametrize("ranks", [1, 4])
def test_fill_in_lies_between_the_same_places_and_random_ones(ranks):
    row = fill_in.measure("digits", Digits(batch=16 * ranks), ranks, 0.01, steps=10)
    assert row.size == 50_826
    assert row.sent == pytest.approx(0.01, rel=0.01)
    assert row.sent <= row.result <= row.random * 1.001
    assert (1 <= row.fill_in <= ranks) and (row.least * 0.98 <= row.words <= row.most)
    assert (row.fill_in > 2) == (ranks > 1)
