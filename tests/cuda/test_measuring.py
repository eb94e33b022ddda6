"""What is measured of a device, and what predictions make of it."""

from time import perf_counter
from types import SimpleNamespace

import device_arrays as xp
import numpy as np
import pytest
from simulated import stand_in

import sparseallreduce as sar
from sparseallreduce.algorithms import Hosts
from sparseallreduce.algorithms.allreduce import make_call
from sparseallreduce.algorithms.device_measuring import measure_device
from sparseallreduce.algorithms.steps import Clock
from sparseallreduce.reducers.cost import Case, Predicted, predicted
from sparseallreduce.runtime import explaining


def timed(schedule):
    """What a schedule comes to that asks for nothing but the time."""
    answer = None
    while True:
        try:
            assert isinstance(schedule.send(answer), Clock)
        except StopIteration as stop:
            return stop.value
        answer = perf_counter()


@stand_in
def test_copies_and_kernels_are_timed_on_the_device(monkeypatch):
    waits = []
    monkeypatch.setattr(xp.cuda.Device, "synchronize", lambda self: waits.append(1))
    measured = timed(measure_device(xp, 2.0, entries=40, size=300, nbytes=1000))
    assert set(measured) == set(sar.Machine._fields[-7:])
    assert all(seconds >= 0 for seconds in measured.values())
    assert min(measured[name] for name in ("alpha_device", "alpha_to_host", "alpha_to_device")) > 0
    assert len(waits) == 2 * 7 * 5


def test_a_choice_among_reducers_knows_where_gradients_lie(monkeypatch):
    asked = []
    right = sar.Machine()
    monkeypatch.setattr("sparseallreduce.reducers.auto.predicted", lambda case, names: asked.append(case) or _all_alike(names))
    monkeypatch.setattr("sparseallreduce.runtime.simulator.engine.machine_of", lambda *_: right)
    vector = np.float32([1, 2, 3, 4])
    for moved in (xp.asarray, np.asarray):
        sar.simulate([moved(vector)] * 2, [sar.Auto(4, 1, candidates=["topka"]) for _ in range(2)])
    assert [case.on_device for case in asked] == 2 * [True] + 2 * [False]


def _all_alike(names):
    return {name: Predicted(1.0, 0.0, 0.0, 0.0, 0.0) for name in names}


def test_an_explanation_has_a_column_of_copies_and_no_shortcuts(monkeypatch):
    hosts, machine = Hosts(((0, 1),)), sar.Machine()
    near = {"near": {0, 1}, "shares_memory": True, "sparse_memory": SimpleNamespace(capacity=1 << 30)}
    monkeypatch.setattr(explaining, "channel_of", lambda _: SimpleNamespace(machine=machine, rank=0, ranks=2, hosts=hosts, **near))

    def explained(stream):
        call, _ = make_call(stream, "sum", "auto", {})
        schedule = explaining._explained(call, None, 2)
        record = next(schedule).record
        with pytest.raises(StopIteration) as stop:
            schedule.send([record, record])
        return stop.value.value

    stream = sar.SparseStream(np.arange(0, 80_000, 8), np.ones(10_000, np.float32), 1 << 20)
    host, device = explained(stream), explained(stream.to_device(xp))
    assert host.copies == {} and "copies" not in str(host)
    assert device.choice in sar.algorithms() and set(device.predicted) < set(sar.algorithms())  # in no memory that ranks share
    assert device.copies.keys() == device.predicted.keys() == device.bytes.keys() and device.union == host.union
    assert all(0 < device.copies[name] < device.predicted[name] for name in device.predicted)
    lines = str(device).splitlines()
    assert lines[1].split() == ["way", "expected", "copies", "bytes", "in"]
    assert f"{1e3 * device.copies['dense']:.3f} ms" in next(line for line in lines if " dense " in line)


def test_an_explanation_of_reducers_has_a_column_of_copies(monkeypatch):
    alone, on_gpus = (sar.explain_reducer(1000, 10, sar.SERIAL, on_device=where) for where in (False, True))
    assert "copies" not in str(alone) and "copies" in str(on_gpus) and "on GPUs" in str(on_gpus)
    case = Case(1 << 20, 1000, 4, Hosts(((0, 1), (2, 3))), sar.Machine(), True)
    for name, parts in predicted(case).items():
        assert 0 < parts.copies < parts.seconds, name
        assert parts.seconds == pytest.approx(parts.select + parts.latency + parts.wire + parts.sums + parts.copies)
        assert parts.bytes == predicted(case._replace(on_device=False))[name].bytes
