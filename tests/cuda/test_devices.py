"""Which GPU is whose: with more GPUs than one, and more ranks than GPUs."""

import sys

import device_arrays as xp
import device_streams
import pytest
from device_streams import Device

import sparseallreduce as sar
from sparseallreduce.streams.kernels import backend
from sparseallreduce.streams.kernels.devices import LOCAL_RANKS, local_rank

STREAM = sar.SparseStream([1], [2.0], 4)


@pytest.fixture
def two_devices(monkeypatch):
    for name in LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(device_streams.limits, "devices", 2)
    with Device(0):
        yield monkeypatch


def importing(monkeypatch):
    """CuPy, which nobody has imported yet."""
    backend.cuda_kernels()  # which are imported by the same name, and kept
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(backend, "import_module", lambda name: xp)


@pytest.mark.parametrize("place, device", [("", 0), ("0", 0), ("1", 1), ("2", 0), ("5", 1), ("x", 0)])
def test_ranks_take_the_devices_in_turn(two_devices, place, device):
    two_devices.setenv("OMPI_COMM_WORLD_LOCAL_RANK", place)
    assert sar.local_device(xp=xp) == device
    importing(two_devices)
    moved = STREAM.to_device()
    assert device_streams.get_device() == device
    assert moved.on_device


def test_who_has_imported_cupy_chooses_himself(two_devices):
    two_devices.setenv("MPI_LOCALRANKID", "1")
    importing(two_devices)
    two_devices.setitem(sys.modules, "cupy", xp)
    STREAM.to_device()
    assert device_streams.get_device() == 0
    with Device(1):
        STREAM.to_device()
        assert device_streams.get_device() == 1
    assert sar.local_device() == 1


def test_ranks_of_a_communicator_count_those_of_their_host(two_devices, monkeypatch):
    class Four:
        size = 4

        def __init__(self, rank):
            self.rank = rank

        def allgather(self, host):
            return [b"elsewhere", host, b"elsewhere", host]

    monkeypatch.setenv("MPI_LOCALRANKID", "3")
    assert [sar.local_device(Four(rank), xp) for rank in (1, 3)] == [0, 1]
    assert sar.local_device(sar.SERIAL, xp) == 0


def test_the_launcher_of_the_mpi_library_is_asked_before_slurm():
    assert local_rank({"SLURM_LOCALID": "3", "MPI_LOCALRANKID": "1"}) == 1
    assert local_rank({"SLURM_LOCALID": "3"}) == 3


def test_an_operation_keeps_to_its_device(two_devices):
    with Device(1):
        device = STREAM.to_device(xp)
        request = sar.iallreduce(device, sar.SERIAL)
    result = request.wait()  # where another device is current
    with Device(1):
        assert result.values.tolist() == [2.0]
