"""Measurements that are alike give way to the one that is kept, across runs; others are kept beside it."""

import json
import stat
from types import SimpleNamespace

import pytest

from sparseallreduce.algorithms.cost import Machine
from sparseallreduce.runtime import setup
from sparseallreduce.runtime.calibration import Calibration

FIRST = Machine(2e-6, 1e-10, 2e-9, 3e-10, 2e-10, 5e-6, 1e-10, 0.7, 4e-9, 0.9, 1e-6, 1e-10, 1e-9)
HOSTS = [b"one", b"one", b"other"]


def settle(folder, machine, hosts=HOSTS, library="MPI 1", cores=2):
    """What a run with this measurement goes by."""
    calibration = Calibration(library, hosts, cores, folder)
    known = calibration.like(machine)
    if known is None:
        calibration.keep(machine)
    return known or machine


def test_what_is_alike_gives_way_to_what_is_kept(tmp_path):
    assert settle(tmp_path, FIRST) == FIRST
    for factor in (0.4, 1.1, 2.5, 9):
        assert settle(tmp_path, FIRST._replace(alpha=factor * FIRST.alpha, gamma=2 * FIRST.gamma)) == FIRST


def test_another_network_is_another(tmp_path):
    slow = FIRST._replace(beta=8e-9)
    assert settle(tmp_path, FIRST) == FIRST
    assert settle(tmp_path, slow) == slow
    assert settle(tmp_path, slow._replace(alpha=3e-6)) == slow
    assert settle(tmp_path, FIRST._replace(alpha=3e-6)) == FIRST


def test_a_wire_of_another_speed_is_another_network(tmp_path):
    gigabit = FIRST._replace(beta=8e-9, beta_dense=1e-8)
    slower = gigabit._replace(beta=4e-8, beta_dense=5e-8)
    assert settle(tmp_path, gigabit) == gigabit
    assert settle(tmp_path, slower) == slower
    inside = [b"one"] * 3
    assert settle(tmp_path, gigabit, inside) == settle(tmp_path, slower, inside) == gigabit


def test_what_was_disturbed_gives_way_to_what_was_not(tmp_path):
    disturbed = FIRST._replace(gamma=4 * FIRST.gamma, beta=2 * FIRST.beta)
    assert settle(tmp_path, disturbed) == disturbed
    assert settle(tmp_path, FIRST) == FIRST
    assert settle(tmp_path, disturbed) == FIRST
    (file,) = tmp_path.iterdir()
    assert len(json.loads(file.read_text())) == 1


def test_what_is_measured_anew_replaces_what_was_kept_of_the_same_network(tmp_path, monkeypatch):
    gigabit = FIRST._replace(beta=8e-9, beta_dense=1e-8)
    settle(tmp_path, FIRST)
    settle(tmp_path, gigabit)
    slower = gigabit._replace(gamma=2 * FIRST.gamma)
    monkeypatch.setattr(Calibration, "renewing", True)
    assert settle(tmp_path, slower) == slower
    monkeypatch.undo()
    assert settle(tmp_path, gigabit) == slower
    assert settle(tmp_path, FIRST) == FIRST


def test_of_several_that_are_alike_the_fastest_counts(tmp_path):
    mixed = FIRST._replace(gamma=4 * FIRST.gamma, beta=FIRST.beta / 2)
    assert settle(tmp_path, mixed) == mixed
    assert settle(tmp_path, FIRST) == FIRST
    assert settle(tmp_path, FIRST._replace(gamma=5 * FIRST.gamma)) == FIRST


def test_what_takes_no_time_is_alike(tmp_path):
    free = FIRST._replace(beta=0.0)
    settle(tmp_path, free)
    assert settle(tmp_path, FIRST._replace(beta=1e-12)) == free


def test_a_layout_is_known_by_who_shares_a_host_not_by_the_hosts(tmp_path):
    settle(tmp_path, FIRST)
    near = FIRST._replace(alpha=3e-6)
    assert settle(tmp_path, near, [b"a", b"a", b"b"]) == FIRST
    assert settle(tmp_path, near, [b"a", b"b", b"b"]) == near
    assert settle(tmp_path, near, library="MPI 2") == near
    assert settle(tmp_path, near, cores=1) == near


def test_what_is_kept_does_not_grow_without_end(tmp_path):
    for power in range(20):
        settle(tmp_path, FIRST._replace(beta=20.0**power * 1e-12, alpha=20.0**-power))
    (file,) = tmp_path.iterdir()
    assert len(json.loads(file.read_text())) == 16


@pytest.mark.parametrize("text", ["", "[", "{}", "[1]", '[{"alpha": 1}]', '[{"alpha": "x"}]'])
def test_a_damaged_file_is_replaced(tmp_path, text):
    settle(tmp_path, FIRST)
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    assert settle(tmp_path, FIRST) == FIRST
    assert len(json.loads(file.read_text())) == 1


def test_what_cannot_be_kept_is_done_without(tmp_path):
    (tmp_path / "file").write_text("")
    assert settle(tmp_path / "file", FIRST) == FIRST
    folder = tmp_path / "closed"
    folder.mkdir()
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert settle(folder, FIRST) == FIRST


def print_machine(noise):
    """The constants that a run goes by whose measurements are so many times longer than others."""
    from mpi4py import MPI

    from sparseallreduce.runtime.communicators import measured

    def measure(rank, ranks, sharing, faster_blocking, **where):
        return Machine(*(constant * float(noise) for constant in FIRST))
        yield

    setup.measure = measure
    machines = set(MPI.COMM_WORLD.allgather(measured(MPI.COMM_WORLD)))
    if MPI.COMM_WORLD.rank == 0:
        print(machines)


def test_runs_choose_by_the_same_constants(mpi_run, tmp_path):
    env = {"SPARSEALLREDUCE_CACHE": str(tmp_path)}
    runs = {mpi_run(3, print_machine, noise, env=env).stdout.strip() for noise in (1, 1.5, 0.7)}
    assert runs == {repr({FIRST})}
    (file,) = (tmp_path / "calibration").iterdir()
    assert len(json.loads(file.read_text())) == 1


def test_a_network_is_measured_with_care_before_it_is_kept(mpi_run, tmp_path):
    mpi_run(
        2,
        "-c",
        "from mpi4py import MPI\nfrom sparseallreduce.runtime.communicators import measured\nassert measured(MPI.COMM_WORLD).alpha > 0",
        env={"SPARSEALLREDUCE_CACHE": str(tmp_path)},
    )
    (file,) = (tmp_path / "calibration").iterdir()
    (kept,) = json.loads(file.read_text())
    assert all(kept[name] > 0 for name in ("alpha", "beta", "gamma", "gamma_dense", "beta_dense", "alpha_dense"))


class Gpu:
    """What is asked of CuPy before a GPU is measured."""

    def __init__(self, bus):
        self.cuda = SimpleNamespace(
            Device=lambda: SimpleNamespace(id=0, pci_bus_id=bus), runtime=SimpleNamespace(getDeviceProperties=lambda _: {"name": b"A GPU"})
        )


def calibrate(monkeypatch, gpus, exchanges=((1.0, 2.0),)):
    """The constants of three ranks, of which the first two are on one host, and what was measured of whose GPU.

    An exchange in whole messages and in pieces takes the seconds of ``exchanges``, attempt by attempt.
    """
    measured, memories = [], [b"here", b"here", b"there"]

    def measure(rank, ranks, sharing, faster_blocking, *, gpu=None, **_):
        measured.append(None if gpu is None else gpu[1])
        return FIRST if gpu is None else FIRST._replace(alpha_to_host=7e-6)
        yield

    monkeypatch.setattr(setup, "measure", measure)
    attempts = [0] * 3

    def exchange_times(channel):
        attempts[channel.rank] += 1
        return exchanges[(attempts[channel.rank] - 1) % len(exchanges)]
        yield

    monkeypatch.setattr(setup, "exchange_times", exchange_times)
    monkeypatch.setattr(setup, "same_host", lambda _, rank: [0, 1] if rank < 2 else [2])
    group = setup.Group([SimpleNamespace(memory=memory) for memory in memories], [], b"three processes")
    schedules, records, results = [], [None] * 3, [None] * 3
    for rank in range(3):
        channel = SimpleNamespace(rank=rank, ranks=3, near={0, 1} if rank < 2 else {2}, cores=4)
        schedules.append(setup.calibrated(channel, group))
    while None in results:
        shared = []
        for rank, schedule in enumerate(schedules):
            monkeypatch.setattr(setup, "module_in_use", lambda rank=rank: gpus[rank])
            try:
                shared.append(schedule.send(records[rank]).record)
            except StopIteration as stop:
                results[rank] = stop.value
        assert len({len(record) for record in shared}) <= 1
        records = [shared] * 3
    assert len(set(results)) == 1
    return results[0], measured


def test_gpus_are_measured_where_all_ranks_use_one_and_kept_apart(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARSEALLREDUCE_CACHE", str(tmp_path))
    remembered = {}
    monkeypatch.setattr(setup, "_remembered", remembered)
    gpus = [Gpu("0000:01"), Gpu("0000:01"), Gpu("0000:01")]
    machine, measured = calibrate(monkeypatch, [gpus[0], None, gpus[2]])
    assert machine == FIRST._replace(codec=0.0, overlap=0.0) and set(measured) == {None}
    remembered.clear()  # which the three have in common here
    machine, measured = calibrate(monkeypatch, gpus)
    assert machine.alpha_to_host == 7e-6 and sorted(set(measured)) == [1.0, 2.0]  # the third is on another host
    assert len(list((tmp_path / "calibration").iterdir())) == 2
    again, measured = calibrate(monkeypatch, gpus)
    assert again == machine and measured == []
    remembered.clear()
    again, measured = calibrate(monkeypatch, [None] * 3)
    assert again == FIRST._replace(codec=0.0, overlap=0.0) and set(measured) == {None}


def test_one_attempt_that_other_programs_disturb_does_not_keep_messages_from_being_encoded(monkeypatch, tmp_path):
    """Nor does it make another entry of what is kept."""
    monkeypatch.setenv("SPARSEALLREDUCE_CACHE", str(tmp_path))
    remembered = {}
    monkeypatch.setattr(setup, "_remembered", remembered)
    disturbed, fine = (1.0, 5.0), (1.0, 0.8)
    for exchanges in ((disturbed, fine, fine), (fine, disturbed, fine), (disturbed, fine, fine)):
        remembered.clear()
        machine, _ = calibrate(monkeypatch, [None] * 3, exchanges)
        assert machine == FIRST
    (file,) = (tmp_path / "calibration").iterdir()
    assert len(json.loads(file.read_text())) == 1
    remembered.clear()
    assert calibrate(monkeypatch, [None] * 3, (disturbed,))[0] == FIRST._replace(codec=0.0, overlap=0.0)
