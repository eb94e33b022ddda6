"""A stand-in for ``mpi4py.MPI`` between ranks of one process, with MPI's semantics as far as the library relies on them.

Messages of one sender, context and tag arrive in the order in which they were sent. A message of at most ``eager`` bytes is copied and
its send complete at once; a longer one is read from the sender's memory when a receive matches it. A receive that is too short for its
message raises when it is tested. Collectives are matched in the order of the calls on a communicator; ranks that enter different ones
are reported at once. A rank inside a blocking call does nothing else until the others have done their part.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

ANY_SOURCE, ANY_TAG, PROC_NULL = -2, -1, -3
TAG_UB_KEY, UNDEFINED = 9001, -32766
TAG_LIMIT = 1 << 22
IN_PLACE, SUM, MAX, MIN, BYTE = (SimpleNamespace(name=name) for name in ("IN_PLACE", "SUM", "MAX", "MIN", "BYTE"))


class Misuse(AssertionError):
    """What MPI leaves undefined: two ranks in different collectives, a freed communicator, a buffer that does not fit."""


class Exception_(RuntimeError):
    """An error that MPI reports, as ``MPI.Exception``."""


class Status:
    def __init__(self) -> None:
        self.source, self.tag, self.count = ANY_SOURCE, ANY_TAG, 0

    def Get_count(self, datatype: Any = BYTE) -> int:
        return self.count

    def Get_source(self) -> int:
        return self.source

    def Get_tag(self) -> int:
        return self.tag


class _Message:
    """On its way from a rank to another."""

    def __init__(self, source: int, tag: int, buffer: np.ndarray, eager: bool, request: Request) -> None:
        self.source, self.tag, self.request = source, tag, request
        self.count = len(buffer)
        self.bytes = buffer.copy() if eager else buffer
        if eager:
            request.complete = True


class _Context:
    """What the ranks of a communicator share."""

    def __init__(self, network: Network, ranks: int) -> None:
        self.network, self.ranks = network, ranks
        self.arrived: list[list[_Message]] = [[] for _ in range(ranks)]  # that nobody has asked for, of each receiver
        self.posted: list[list[Request]] = [[] for _ in range(ranks)]  # receives that nothing has come for
        self.collectives: dict[int, _Collective] = {}
        self.entered = [0] * ranks
        self.freed = [False] * ranks


class _Collective:
    """A collective, from the first rank that enters it to the last."""

    def __init__(self, name: str, ranks: int) -> None:
        self.name = name
        self.given: list[Any] = [None] * ranks
        self.requests: list[Request | None] = [None] * ranks
        self.result: Any = None

    @property
    def complete(self) -> bool:
        return all(request is not None for request in self.requests)


class Request:
    def __init__(self, world: Any, kind: str) -> None:
        self.world, self.kind = world, kind
        self.complete = False
        self.null = False  # as MPI makes a request that was found complete
        self.error: Exception | None = None
        self.status = Status()
        self.kept: Any = None  # what must live until this is complete
        self.place: np.ndarray | None = None
        self.source = self.tag = 0
        self.posted_in: list[Request] | None = None

    def Test(self, status: Status | None = None) -> bool:
        return Request._test("Test", [self], None if status is None else [status])

    @staticmethod
    def Testall(requests: list[Request], statuses: list[Status] | None = None) -> bool:
        return Request._test("Testall", requests, statuses)

    @staticmethod
    def _test(name: str, requests: list[Request], statuses: list[Status] | None) -> bool:
        if not requests:
            return True
        world = requests[0].world
        world.point(f"MPI.{name}")
        done = all(request.complete for request in requests)
        if done:
            for request in requests:
                error, request.error, request.kept = request.error, None, None
                request.null = True
                if error is not None:
                    raise error
            for status, request in zip(statuses or [], requests):
                status.__dict__.update(request.status.__dict__)
            world.after(f"MPI.{name}")
        else:
            world.wait(f"MPI.{name}")
        return done

    def Wait(self, status: Status | None = None) -> bool:
        self.world.point("MPI.Wait")
        self.world.block(lambda: self.complete, "MPI.Wait")
        return self.Test(status)

    @staticmethod
    def Waitall(requests: list[Request], statuses: list[Status] | None = None) -> bool:
        for number, request in enumerate(requests):
            request.Wait(None if statuses is None else statuses[number])
        return True

    def __bool__(self) -> bool:
        return not self.null

    def Cancel(self) -> None:
        self.world.point("MPI.Cancel")
        if self.null:
            raise RuntimeError("MPI_Cancel of a null request")
        if self.posted_in is not None and self in self.posted_in:
            self.posted_in.remove(self)
            self.complete = True

    def Free(self) -> None:
        self.world.point("MPI.Free")


class Message:
    """A message that a probe has matched."""

    def __init__(self, comm: Intracomm, message: _Message) -> None:
        self._comm, self._message = comm, message

    def Irecv(self, buffer: Any) -> Request:
        world, request = self._comm.world, Request(self._comm.world, "Mrecv")
        world.point("MPI.Mrecv")
        request.place = _bytes_of(buffer, writable=True)
        _deliver(self._message, request)
        world.changed()
        world.after("MPI.Mrecv")
        return request

    def Recv(self, buffer: Any, status: Status | None = None) -> None:
        self.Irecv(buffer).Test(status)


class Comm:
    _deleters: ClassVar[dict[int, Any]] = {}

    @staticmethod
    def Create_keyval(copy_fn: Any = None, delete_fn: Any = None, nopython: bool = False) -> int:
        keyval = len(Comm._deleters) + 1
        Comm._deleters[keyval] = delete_fn
        return keyval

    @staticmethod
    def Free_keyval(keyval: int) -> int:
        return 0


class Intracomm(Comm):
    """A communicator, as one rank holds it."""

    is_inter = False

    def __init__(self, context: _Context | None, rank: int, world: Any) -> None:
        self.context, self.rank, self.world = context, rank, world
        self.attributes: dict[int, Any] = {}

    @property
    def size(self) -> int:
        return self._there().ranks

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def Is_inter(self) -> bool:
        return False

    def __bool__(self) -> bool:
        return self.context is not None

    def _there(self) -> _Context:
        if self.context is None:
            raise Misuse("a call on a communicator that is not there, or not yet")
        return self.context

    def Get_attr(self, keyval: int) -> Any:
        return TAG_LIMIT if keyval == TAG_UB_KEY else self.attributes.get(keyval)

    def Set_attr(self, keyval: int, value: Any) -> None:
        self.Delete_attr(keyval)
        self.attributes[keyval] = value

    def Delete_attr(self, keyval: int) -> None:
        if keyval in self.attributes:
            value = self.attributes.pop(keyval)
            if Comm._deleters[keyval] is not None:
                Comm._deleters[keyval](self, keyval, value)

    def Idup(self) -> tuple[Intracomm, Request]:
        copy = Intracomm(None, self.rank, self.world)

        def join(collective: _Collective) -> None:
            context = _Context(self.world.network, len(collective.given))
            self.world.network.contexts.append(context)
            for comm in collective.given:
                comm.context = context

        return copy, self._collective("Idup", copy, join)

    def Dup(self) -> Intracomm:
        copy, request = self.Idup()
        self._complete(request, "MPI.Dup")
        return copy

    def Free(self) -> None:
        self.world.point("MPI.Free")
        for keyval in list(self.attributes):
            self.Delete_attr(keyval)
        context = self._there()
        context.freed[self.rank] = True
        self.context = None
        if all(context.freed):
            self.world.network.contexts.remove(context)
            self.world.network.lost += sum(map(len, context.arrived))

    # Messages.

    def Isend(self, buffer: Any, dest: int, tag: int = 0) -> Request:
        world, context = self.world, self._there()
        world.point("MPI.Isend")
        request, memory = Request(world, "Isend"), _bytes_of(buffer)
        request.kept = buffer
        message = _Message(self.rank, tag, memory, len(memory) <= world.network.eager, request)
        posted = context.posted[dest]
        for receive in posted:
            if _fits(message, receive.source, receive.tag):
                posted.remove(receive)
                _deliver(message, receive)
                break
        else:
            context.arrived[dest].append(message)
        world.changed()
        world.after("MPI.Isend")
        return request

    def Send(self, buffer: Any, dest: int, tag: int = 0) -> None:
        self._complete(self.Isend(buffer, dest, tag), "MPI.Send")

    def Irecv(self, buffer: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        world, request = self.world, Request(self.world, "Irecv")
        world.point("MPI.Irecv")
        request.place, request.source, request.tag = _bytes_of(buffer, writable=True), source, tag
        message = self._take(source, tag)
        if message is not None:
            _deliver(message, request)
        else:
            request.posted_in = self._there().posted[self.rank]
            request.posted_in.append(request)
        world.changed()
        world.after("MPI.Irecv")
        return request

    def Recv(self, buffer: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> None:
        self._complete(self.Irecv(buffer, source, tag), "MPI.Recv", status)

    def Improbe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Message | None:
        self.world.point("MPI.Improbe")
        message = self._take(source, tag)
        if message is None:
            self.world.wait("MPI.Improbe")
            return None
        _fill(status, message)
        self.world.changed()
        self.world.after("MPI.Improbe")
        return Message(self, message)

    def Iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        self.world.point("MPI.Iprobe")
        for message in self._there().arrived[self.rank]:
            if _fits(message, source, tag):
                _fill(status, message)
                return True
        self.world.wait("MPI.Iprobe")
        return False

    def _take(self, source: int, tag: int) -> _Message | None:
        arrived = self._there().arrived[self.rank]
        for message in arrived:
            if _fits(message, source, tag):
                arrived.remove(message)
                return message
        return None

    # Collectives.

    def Barrier(self) -> None:
        self._complete(self._collective("Barrier", None, lambda _: None), "MPI.Barrier")

    def Ibarrier(self) -> Request:
        return self._collective("Ibarrier", None, lambda _: None)

    def Iallreduce(self, source: Any, target: Any, op: Any = SUM) -> Request:
        return self._collective("Iallreduce", (source, target, op), _reduce)

    def Allreduce(self, source: Any, target: Any, op: Any = SUM) -> None:
        self._complete(self._collective("Allreduce", (source, target, op), _reduce), "MPI.Allreduce")

    def Iallgather(self, source: Any, target: Any) -> Request:
        return self._collective("Iallgather", (source, target), _gather)

    def Allgather(self, source: Any, target: Any) -> None:
        self._complete(self._collective("Allgather", (source, target), _gather), "MPI.Allgather")

    def Iallgatherv(self, source: Any, target: Any) -> Request:
        return self._collective("Iallgatherv", (source, target), _gather_varying)

    def allgather(self, value: Any) -> list[Any]:
        request = self._collective("allgather", value, lambda collective: None)
        self._complete(request, "MPI.allgather")
        return list(request.kept_collective.given)  # type: ignore[attr-defined]

    def bcast(self, value: Any, root: int = 0) -> Any:
        return self.allgather(value)[root]

    def barrier(self) -> None:
        self.Barrier()

    def _collective(self, name: str, given: Any, finish: Any) -> Request:
        """Enter a collective; who comes last finishes it for all."""
        world, context = self.world, self._there()
        world.point(f"MPI.{name}")
        number = context.entered[self.rank]
        context.entered[self.rank] += 1
        collective = context.collectives.setdefault(number, _Collective(name, context.ranks))
        if collective.name != name:
            raise world.misused(f"rank {self.rank} enters {name} where another has entered {collective.name}")
        request = Request(world, name)
        request.kept, request.kept_collective = given, collective  # type: ignore[attr-defined]
        collective.given[self.rank], collective.requests[self.rank] = given, request
        world.changed()
        if collective.complete:
            del context.collectives[number]
            finish(collective)
            for each in collective.requests:
                each.complete = True  # type: ignore[union-attr]
        world.after(f"MPI.{name}")
        return request

    def _complete(self, request: Request, name: str, status: Status | None = None) -> None:
        """What a blocking call does: nothing else, until it is done."""
        self.world.block(lambda: request.complete, name)
        if request.error is not None:
            raise request.error
        if status is not None:
            status.__dict__.update(request.status.__dict__)
        self.world.after(f"{name}, done")


class Datatype:
    @staticmethod
    def fromcode(code: str) -> Any:
        return SimpleNamespace(name=code, dtype=np.dtype(code))


class Network:
    """What all ranks have in common.

    Parameters
    ----------
    eager : int
        Bytes up to which a send is complete at once.
    """

    def __init__(self, eager: int) -> None:
        self.eager = eager
        self.contexts: list[_Context] = []
        self.lost = 0  # messages on communicators that were freed

    def left(self) -> int:
        """Messages that nobody has received, and receives that nothing has come for."""
        return sum(len(queue) for context in self.contexts for queue in (*context.arrived, *context.posted))


def modules(world: Any, ranks: int) -> list[SimpleNamespace]:
    """What each rank takes for ``mpi4py.MPI``."""
    context = _Context(world.network, ranks)
    world.network.contexts.append(context)
    return [
        SimpleNamespace(
            ANY_SOURCE=ANY_SOURCE,
            ANY_TAG=ANY_TAG,
            BYTE=BYTE,
            COMM_NULL=Intracomm(None, rank, world),
            COMM_WORLD=Intracomm(context, rank, world),
            Comm=Comm,
            Datatype=Datatype,
            Exception=Exception_,
            Get_library_version=lambda: "a stand-in for MPI",
            IN_PLACE=IN_PLACE,
            Intracomm=Intracomm,
            Is_finalized=lambda: False,
            MAX=MAX,
            MIN=MIN,
            Message=Message,
            Query_thread=lambda: 0,
            Request=Request,
            SUM=SUM,
            Status=Status,
            TAG_UB=TAG_UB_KEY,
            THREAD_MULTIPLE=3,
        )
        for rank in range(ranks)
    ]


def _fits(message: _Message, source: int, tag: int) -> bool:
    return source in (ANY_SOURCE, message.source) and tag in (ANY_TAG, message.tag)


def _fill(status: Status | None, message: _Message) -> None:
    if status is not None:
        status.source, status.tag, status.count = message.source, message.tag, message.count


def _deliver(message: _Message, receive: Request) -> None:
    """Bring a message to the memory of a receive."""
    assert receive.place is not None
    _fill(receive.status, message)
    if message.count > len(receive.place):
        receive.error = Exception_(f"MPI_ERR_TRUNCATE: a message of {message.count} bytes, and room for {len(receive.place)}")
    else:
        receive.place[: message.count] = message.bytes
    receive.place = receive.posted_in = None
    receive.complete = message.request.complete = True


def _bytes_of(buffer: Any, writable: bool = False) -> np.ndarray:
    """The bytes of what mpi4py takes for a buffer: an object with memory, or a list of it and its type."""
    memory = memoryview(buffer[0] if isinstance(buffer, list | tuple) else buffer)
    if not memory.c_contiguous:
        raise Misuse("a buffer with gaps")
    if writable and memory.readonly:
        raise Exception_("message: buffer is read-only")
    if memory.nbytes == 0:
        return np.empty(0, np.uint8)
    return np.frombuffer(memory, np.uint8)


_DOUBLED, _DOUBLED_A_RANK = 1 << 14, 1 << 12  # bytes of a vector, in all and a rank, above which each value is the sum of one rank


def _reduce(collective: _Collective) -> None:
    ops = {"SUM": np.add, "MAX": np.maximum, "MIN": np.minimum}
    summands = [_array(target if source is IN_PLACE else source) for source, target, _ in collective.given]
    if len({(len(summand), summand.dtype) for summand in summands}) > 1:
        raise Misuse(f"{collective.name} of {[(len(summand), summand.dtype.name) for summand in summands]}")
    total = summands[-1].copy()  # from the last rank on, since the order is MPI's own
    for summand in reversed(summands[:-1]):
        total = ops[collective.given[0][2].name](total, summand)
    if total.nbytes > max(_DOUBLED, _DOUBLED_A_RANK * len(summands)):
        for _, target, _ in collective.given:
            _array(target)[:] = total
        return
    # Of two NaNs a sum is the first: by recursive doubling that of each rank itself.
    parts = total.real.dtype
    for summand, (_, target, _) in zip([summand.copy().view(parts) for summand in summands], collective.given, strict=True):
        _array(target)[:] = np.where(np.isnan(summand), summand, total.view(parts)).view(total.dtype)


def _gather(collective: _Collective) -> None:
    parts = [_bytes_of(source) for source, _ in collective.given]
    for _, target in collective.given:
        _bytes_of(target, writable=True)[:] = np.concatenate(parts)


def _gather_varying(collective: _Collective) -> None:
    parts = [np.asarray(source).reshape(-1) for source, _ in collective.given]
    for _, (target, lengths, places, _type) in collective.given:
        for part, length, place in zip(parts, lengths, places, strict=True):
            if len(part) != length:
                raise Misuse(f"Iallgatherv of {len(part)} values into room for {length}")
            target[place : place + length] = part


def _array(buffer: Any) -> np.ndarray:
    array = buffer[0] if isinstance(buffer, list | tuple) else buffer
    assert isinstance(array, np.ndarray)
    return array.reshape(-1)


