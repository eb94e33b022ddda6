"""The measurements of ``bench`` with streams of the device."""

import device_arrays as xp
import pytest

import sparseallreduce as sar
from sparseallreduce.cli.bench import Setting, measure


@pytest.mark.parametrize("non_blocking", [False, True])
def test_streams_are_made_on_the_device_and_results_are_right(monkeypatch, non_blocking):
    seen = []
    name = "iallreduce" if non_blocking else "allreduce"
    right = getattr(sar, name)
    monkeypatch.setattr(sar, name, lambda stream, *rest, **options: seen.append(stream.on_device) or right(stream, *rest, **options))
    setting = Setting(50, 0.2, "float32", "sum", 2, 2, 0, non_blocking, False)

    measured = measure(setting, ["auto", "dense"], sar.SERIAL, xp=xp)

    assert seen == [True] * 12
    assert [measured[name].faults for name in ("auto", "dense")] == [[], []]
    assert measured["dense"].density == 0.2
