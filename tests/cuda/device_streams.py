"""Streams, events, pinned memory and asynchronous copies as CuPy has them, for the stand-in of `device_arrays.py`, made to find misuse.

Kernels run at once. A copy on a stream is made as late as can be: when the host, or another stream, waits for an event behind it. Until
then its target holds garbage. And every stream knows what it has waited for: of arrays that a stream touches, what others have done before
has to be known to it. `Misuse` is raised where it is not, and where memory of a copy under way is used for something else.
"""

import contextlib
import threading
import weakref

import numpy as np

GARBAGE = 0xA5
current = threading.local()  # the stream, and the device, of each thread
under_way = []  # copies that have not been made
host = {}  # what the host has waited for: the step of each stream
pinned = {}  # of the page-locked memory that there is: id, and bytes
launching = threading.RLock()  # numba's simulator runs one kernel at a time, and does not wait for the turn of another
limits = {"pinned": 1 << 40, "devices": 1}
_waits = []  # lists of the names of what has waited for the device since, one of each caller that counts


@contextlib.contextmanager
def waits():
    """A list that grows by a name with whatever makes the host wait for a number from the device, or for a copy."""
    counted = []
    _waits.append(counted)
    try:
        yield counted
    finally:
        _waits.remove(counted)


def waited(name):
    for counted in _waits:
        counted.append(name)


class Misuse(AssertionError):
    """What a GPU would have answered with garbage now and then."""


class Stream:
    """Its clock has, for each stream, up to which of its steps this one has waited."""

    count = 0

    def __init__(self, null=False, non_blocking=False):
        Stream.count += 1
        self.ptr, self.device_id = Stream.count, get_device()
        self.clock = {}
        self.copies = []

    def step(self):
        self.clock[self.ptr] = self.clock.get(self.ptr, 0) + 1
        return self.clock[self.ptr]

    def knows(self, ptr, step):
        return ptr == self.ptr or max(self.clock.get(ptr, 0), host.get(ptr, 0)) >= step

    def record(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        event.make()
        learn(self.clock, event.clock)

    def synchronize(self):
        waited("stream")
        self.reach()

    def reach(self):
        make(self.copies)
        learn(host, self.clock)

    def __enter__(self):
        assert self.device_id == get_device(), "the device that the stream is created on does not match with the current device"
        stack().append(self)
        return self

    def __exit__(self, *args):
        stack().pop()

    def __eq__(self, other):
        return isinstance(other, Stream) and self.ptr == other.ptr

    __hash__ = None


def learn(clock, other):
    for ptr, step in other.items():
        clock[ptr] = max(clock.get(ptr, 0), step)


class Event:
    def __init__(self, block=False, disable_timing=False):
        self.clock, self.copies, self._asked = {}, [], False

    def record(self, stream=None):
        stream = stream or get_current_stream()
        stream.step()
        self.clock, self.copies = dict(stream.clock), list(stream.copies)

    def make(self):
        make(self.copies)

    def synchronize(self):
        waited("event")
        self.reach()

    def reach(self):
        self.make()
        learn(host, self.clock)

    @property
    def done(self):
        """Not when it is asked for the first time, unless there is nothing to wait for."""
        asked, self._asked = self._asked, True
        if asked or not any(copy in under_way for copy in self.copies):
            self.reach()
            return True
        return False


def stack():
    if not hasattr(current, "streams"):
        current.streams, current.device = {}, 0
    return current.streams.setdefault(current.device, [null_stream(current.device)])


nulls = {}


def null_stream(device):
    if device not in nulls:
        nulls[device] = Stream.__new__(Stream)
        nulls[device].ptr, nulls[device].device_id, nulls[device].clock, nulls[device].copies = -1 - device, device, {}, []
    return nulls[device]


def get_device():
    return getattr(current, "device", 0)


def get_current_stream():
    return stack()[-1]


class Device:
    def __init__(self, number=None):
        self.id = get_device() if number is None else number
        self._before = []

    @property
    def pci_bus_id(self):
        return f"0000:{self.id:02x}:00.0"

    def use(self):
        stack()
        current.device = self.id

    def __enter__(self):
        stack()
        self._before.append(current.device)
        current.device = self.id
        return self

    def __exit__(self, *args):
        current.device = self._before.pop()

    def __eq__(self, other):
        return isinstance(other, Device) and self.id == other.id

    __hash__ = None

    def synchronize(self):
        waited("device")
        make(list(under_way))
        for memory in list(memories.values()):
            learn(host, dict([memory.writer, *memory.readers.items()]))


class runtime:
    @staticmethod
    def getDeviceCount():
        return limits["devices"]


class PinnedMemory:
    def __init__(self, size):
        if sum(pinned.values()) + size > limits["pinned"]:
            raise RuntimeError("cudaErrorMemoryAllocation: out of memory")
        self.array = np.full(size, GARBAGE, np.uint8)
        pinned[id(self.array)] = size
        weakref.finalize(self.array, forget, id(self.array), self.array.ctypes.data, size)


def forget(key, address, size):
    del pinned[key]
    for copy in under_way:
        if address <= copy.host.ctypes.data < address + size:
            raise Misuse("page-locked memory is given back while a copy is under way")


def PinnedMemoryPointer(memory, offset):
    return memory.array[offset:]


class Memory:
    """Of an array and its views: who wrote to it last, and who has read since."""

    def __init__(self):
        stream = get_current_stream()
        self.writer = stream.ptr, stream.step()
        self.readers = {}

    def read(self, stream=None):
        stream = stream or get_current_stream()
        if not stream.knows(*self.writer):
            raise Misuse(f"stream {stream.ptr} reads what stream {self.writer[0]} writes, without waiting for it")
        self.readers[stream.ptr] = stream.step()

    def write(self, stream=None):
        stream = stream or get_current_stream()
        for ptr, step in (self.writer, *self.readers.items()):
            if not stream.knows(ptr, step):
                raise Misuse(f"stream {stream.ptr} writes to what stream {ptr} uses, without waiting for it")
        self.writer, self.readers = (stream.ptr, stream.step()), {}


memories = {}  # by the id of the NumPy array that has the memory, for as long as it lives


def memory_of(array):
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    found = memories.get(id(root))
    if found is None:
        found = memories[id(root)] = Memory()
        weakref.finalize(root, memories.pop, id(root), None)
    return found


class Copy:
    """One that is under way: of a device array and one of the host, in memory that no other copy may use meanwhile."""

    def __init__(self, source, target, host, stream):
        self.source, self.target, self.host = source, target, host
        for other in under_way:
            if np.may_share_memory(other.host, host) and (other.target is not None or target is not None) and _overlap(other.host, host):
                raise Misuse("memory of the host is used again while a copy is under way")
        self.before = source.tobytes()
        if host is target:
            address = target.ctypes.data
            _bytes_at(address, target.nbytes)[:] = GARBAGE
        under_way.append(self)
        stream.copies.append(self)

    def make(self):
        if self.source.tobytes() != self.before:
            raise Misuse("what a copy reads has been changed while it was under way")
        _bytes_at(self.target.ctypes.data, self.target.nbytes)[:] = np.frombuffer(self.before, np.uint8)
        self.source = self.target = self.host = None


class _Bytes:
    def __init__(self, address, nbytes):
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


def _bytes_at(address, nbytes):
    return np.asarray(_Bytes(address, nbytes))


def _overlap(first, second):
    low, high = first.ctypes.data, second.ctypes.data
    return low < high + second.nbytes and high < low + first.nbytes


def make(copies):
    for copy in list(copies):
        if copy in under_way:
            under_way.remove(copy)
            copy.make()
        with contextlib.suppress(ValueError):
            copies.remove(copy)


def watched(launch):
    """As the function that starts kernels, which tells what they read and write."""

    def launch_watched(function, threads, block, xp, *arguments):
        with launching:
            launched(function, threads, block, xp, *arguments)

    def launched(function, threads, block, xp, *arguments):
        arrays = [each._array for each in arguments if hasattr(each, "_array")]
        for array in arrays:
            memory_of(array).read()
        before = [array.tobytes() for array in arrays]
        launch(function, threads, block, xp, *arguments)
        for array, was in zip(arrays, before, strict=True):
            if array.tobytes() != was:
                memory_of(array).write()

    return launch_watched
