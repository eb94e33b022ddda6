"""What ranks do with streams of a device under numba's simulator, for test_device_streams.py: each check on two ranks, and on three."""

import gc
import os
import sys
import time
import traceback
from contextlib import ExitStack, contextmanager, nullcontext
from unittest import mock

import device_arrays as xp
import device_streams
import numpy as np
import simulated
from device_streams import Device, Stream
from mpi4py import MPI
from mpi_inputs import Inputs, check_usable, raise_what_is_owed
from test_streams import same

import sparseallreduce as sar
from sparseallreduce import MismatchError, SparseAllreduceError
from sparseallreduce.algorithms import staging
from sparseallreduce.algorithms.cost import Machine
from sparseallreduce.runtime import answers, mailbox, setup
from sparseallreduce.runtime.communicators import channel_of
from sparseallreduce.runtime.cuda_mpi import Support
from sparseallreduce.streams import transfers
from sparseallreduce.streams.kernels.devices import Queue
from sparseallreduce.streams.wire import frames

SLOW = Machine(alpha=1e-5, beta=8e-9)  # on which indices are worth to be written as gaps
NAMED = ("ssar_recursive_doubling", "ssar_split_allgather", "ssar_ring", "dsar_split_allgather", "allgather", "dense", "hierarchical")


def inputs_of(comm, seed=0, size=40, entries=None, width=None):
    return Inputs(comm.size, size, "float32", width, seed, entries)


def both(comm, **options):
    """Our stream on the device and on the host."""
    stream = inputs_of(comm, **options).stream(comm.rank)
    return stream.to_device(xp), stream


def check_algorithms(comm):
    for number, name in enumerate(NAMED):
        device, host = both(comm, seed=number)
        same(sar.allreduce(device, comm, algorithm=name), sar.allreduce(host, comm, algorithm=name))
    device, host = both(comm)
    same(sar.allreduce(device, comm, "mean", "ssar_ring"), sar.allreduce(host, comm, "mean", "ssar_ring"))
    same(sar.allreduce(device, comm, "max", "ssar_recursive_doubling"), sar.allreduce(host, comm, "max", "ssar_recursive_doubling"))
    inputs_of(comm).check(sar.allreduce(device, comm).to_host())
    quantised = {"algorithm": "ssar_recursive_doubling", "value_codec": "float16"}
    same(sar.allreduce(device, comm, **quantised), sar.allreduce(host, comm, **quantised))


@contextmanager
def elsewhere(comm):
    """Ranks take each other to be on other hosts: messages are written and read in pieces of few bytes, and so are copies."""
    check_usable(comm)
    channel = channel_of(comm)
    comm.Barrier()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(channel, near=frozenset([comm.rank]), machine=SLOW))
        stack.enter_context(mock.patch.multiple(frames, _SHORTEST=60, _LONGEST=120, _GRAIN=8))
        stack.enter_context(mock.patch.object(transfers, "PIECE", 80))
        stack.enter_context(mock.patch.object(staging, "PIECE", 80))
        yield
        comm.Barrier()


def check_pieces_between_hosts(comm):
    with elsewhere(comm):
        for name in NAMED[:3]:
            device, host = both(comm, size=900, entries=120)
            same(sar.allreduce(device, comm, algorithm=name), sar.allreduce(host, comm, algorithm=name))


def check_one_stream_starts_and_another_waits(comm):
    first, second = Stream(), Stream()
    for progress in ("manual", "thread")[: 1 + (MPI.Query_thread() == MPI.THREAD_MULTIPLE)]:
        with first:
            given = [both(comm, seed=seed) for seed in range(3)]
            several = [sar.iallreduce(device, comm, algorithm="ssar_ring", progress=progress) for device, _ in given]
            listed = sar.iallreduce([device for device, _ in given], comm, algorithm="ssar_recursive_doubling", progress=progress)
        with second:
            for request, (_, host) in reversed(list(zip(several, given, strict=True))):
                same(request.wait(), sar.allreduce(host, comm, algorithm="ssar_ring"))
            expected = sar.allreduce([host for _, host in given], comm, algorithm="ssar_recursive_doubling")
            for ours, theirs in zip(listed.wait(), expected, strict=True):
                same(ours, theirs)


def check_plans(comm):
    for algorithm, fixed in (("ssar_ring", False), ("auto", True), ("ssar_recursive_doubling", True), ("ssar_split_allgather", True)):
        lists = list(zip(*[both(comm, seed=seed, entries=(3, 0, 7)) for seed in range(2)], strict=True))
        plans = [sar.allreduce_init(list(streams), comm, "sum", algorithm, fixed) for streams in lists]
        for _ in range(2):
            results = []
            for plan, streams in zip(plans, lists, strict=True):
                plan.start(list(streams))
                results.append(plan.wait())
            for ours, theirs in zip(*results, strict=True):
                same(ours, theirs)
    device, host = both(comm)
    plan = sar.allreduce_init(device, comm, fixed_indices=True)
    plan.start(host if comm.rank == 0 else device)
    with raises_on_all(comm, SparseAllreduceError, "on the host"):
        plan.wait()
    plan.start(device)
    inputs_of(comm).check(plan.wait().to_host())


def check_reducers(comm):
    rng = np.random.default_rng(comm.rank)
    ours, theirs = (sar.ErrorFeedback(sar.OkTopk(60, 6)) for _ in range(2))
    for _ in range(3):
        gradient = rng.integers(-9, 9, 60).astype(np.float32)
        same(ours.step(xp.asarray(gradient), comm), theirs.step(gradient, comm))
        simulated.same_bits(ours.residual.get(), theirs.residual)
    with Stream():
        accumulator = xp.asarray(gradient)
        request = sar.OkTopk(60, 6).iallreduce(accumulator, comm)
    device, host = request.wait(), sar.OkTopk(60, 6).allreduce(gradient, comm)
    same(device.update, host.update)
    assert device.contributed.tolist() == host.contributed.tolist()


@contextmanager
def raises_on_all(comm, kind, text):
    """The same error on all ranks, and the communicator fit for use."""
    try:
        yield
    except kind as error:
        said = str(error)
    else:
        raise AssertionError("no error was raised")
    assert text in said, said
    assert len(set(comm.allgather(said))) == 1
    device, host = both(comm, seed=7)
    same(sar.allreduce(device, comm, algorithm="ssar_ring"), sar.allreduce(host, comm, algorithm="ssar_ring"))


def check_mpi_that_takes_memory_of_a_device(comm):
    """Under the simulator any MPI does: what it is given is memory of the host."""
    for where in (nullcontext, elsewhere):
        with where(comm), ExitStack() as stack:
            stack.enter_context(mock.patch.object(answers, "cuda_support", return_value=Support(True, "")))
            stack.enter_context(mock.patch.object(staging, "DIRECT_BYTES", 64))
            stack.enter_context(mock.patch.object(mailbox, "INLINE_BYTES", 64))
            coming = stack.enter_context(mock.patch.object(staging.StagedStream, "of", wraps=staging.StagedStream.of))
            for name, op in (("ssar_recursive_doubling", "max"), ("ssar_split_allgather", "sum"), ("ssar_ring", "sum")):
                device, host = both(comm, size=200, entries=60)
                same(sar.allreduce(device, comm, op, name), sar.allreduce(host, comm, op, name))
                large = [call.args[0] for call in coming.call_args_list if call.args[0].nbytes > 64]
                assert not large, (name, large)
            said = []  # who has the result before another fails keeps it
            while not any(said):
                raised = ""
                with mock.patch.object(Queue, "room", side_effect=MemoryError("the device is full")) if comm.rank == 0 else nullcontext():
                    try:
                        sar.allreduce(device, comm, algorithm="ssar_ring")
                    except SparseAllreduceError as error:
                        raised = str(error)
                said = comm.allgather(raised)
            assert said[0] and set(filter(None, said)) == {said[0]} and "the device is full" in said[0]
            raise_what_is_owed(comm, SparseAllreduceError(said[0]) if said[comm.rank] else None)
            same(sar.allreduce(device, comm, algorithm="ssar_ring"), sar.allreduce(host, comm, algorithm="ssar_ring"))


def check_errors_are_those_of_all(comm):
    device, host = both(comm)
    for given in (device if comm.rank else host, [device] if comm.rank else [host]):
        with raises_on_all(comm, MismatchError, "memory of the streams: the host's on rank 0; a GPU's on rank"):
            sar.allreduce(given, comm)
    with raises_on_all(comm, SparseAllreduceError, "memory of the accumulators"):
        sar.OkTopk(60, 6).allreduce(xp.zeros(60, np.float32) if comm.rank else np.zeros(60, np.float32), comm)
    for where in (elsewhere, nullcontext):
        for made, failing in ((transfers.Transfers, "download"), (transfers.Upload, "take")):
            raised = None
            with where(comm):
                hit = mock.patch.object(made, failing, side_effect=MemoryError("the device is full"))
                with hit if comm.rank == comm.size - 1 else nullcontext():
                    try:
                        sar.allreduce(device, comm, algorithm="ssar_ring")
                    except SparseAllreduceError as error:
                        raised = str(error)
            with raises_on_all(comm, SparseAllreduceError, "the device is full"):
                raise SparseAllreduceError(raised)


def check_devices(comm):
    with mock.patch.dict(device_streams.limits, devices=2):
        assert sar.local_device(comm, xp) == comm.rank % 2
        told = MPI.COMM_WORLD.allgather(sar.local_device(xp=xp)) if comm == MPI.COMM_WORLD else [0, 1]
    assert sorted(told) == sorted(rank % 2 for rank in range(comm.size))  # by Open MPI in another order than that of the ranks


CHECKS = [
    check_devices,
    check_algorithms,
    check_pieces_between_hosts,
    check_one_stream_starts_and_another_waits,
    check_plans,
    check_reducers,
    check_mpi_that_takes_memory_of_a_device,
    check_errors_are_those_of_all,
]


def main():
    world = MPI.COMM_WORLD
    pair = world.Split(0 if world.rank < 2 else MPI.UNDEFINED)
    start = time.perf_counter()
    for check in CHECKS:
        for comm in (pair, world):
            if comm == MPI.COMM_NULL:
                continue
            try:
                check(comm)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                world.Abort(1)
        world.Barrier()
        if world.rank == 0:
            print(f"{check.__name__}: passed after {time.perf_counter() - start:.1f} s", flush=True)
    gc.collect()
    Device().synchronize()
    for made in transfers._known.values():
        made.tidy()
        assert made.pool.allocated and not device_streams.under_way
        print(f"rank {world.rank} has {made.pool.in_use} bytes in use", flush=True)


def wrong_setting(name):
    """What is read where it is first needed is wrong on one rank, and then mended."""
    comm = MPI.COMM_WORLD
    indices, values = xp.asarray(np.uint32([1, 3, 7])), xp.asarray(np.float32([1, 2, 3]))
    with mock.patch.object(setup, "module_in_use", return_value=None):
        for wrong in (True, False):
            with mock.patch.dict(os.environ, {name: "x"} if wrong and comm.rank == 1 else {}):
                try:
                    total = sar.allreduce(sar.SparseStream(indices, values, 40), comm, algorithm="ssar_recursive_doubling")
                    said = f"mean {float(total.values.get().sum()) / comm.size}"
                except SparseAllreduceError as error:
                    said = f"{type(error).__name__}: {error}"
            print(said, flush=True)
