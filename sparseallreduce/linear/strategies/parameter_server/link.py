"""Communication between workers and parameter servers: the messages of pull and push."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.strategies.clock import Clock
from sparseallreduce.linear.strategies.parameter_server.core import Answers, Server
from sparseallreduce.streams import wire
from sparseallreduce.streams.stream import SparseStream, index_dtype

if TYPE_CHECKING:
    from sparseallreduce.linear.strategies.parameter_server.mailbox import Mailbox

__all__ = ["LocalLink", "RemoteLink", "answer_workers"]

Array = NDArray[Any]

# Message tags: requested indices; their weights; a rate followed by a stream in wire form; the end of an epoch; a request for the state of
# the servers on all ranks; the reason to stop training, which servers pass on to every worker before its next weights.
_PULL, _WEIGHTS, _PUSH, _DRAIN, _PAUSE, _STOP = 1, 2, 3, 4, 5, 6
_RATE = np.dtype("<f8")


class Link(Protocol):
    """A worker's connection to all servers; lists have one element per server, in their order."""

    stop: str | None  # reason to stop training, once a server has sent it

    def pull(self, indices: Sequence[Array]) -> list[Array]:
        """Return the weights at the sorted indices of each part."""

    def push(self, gradients: Sequence[SparseStream], rate: float) -> None:
        """Send each server the gradient of its part."""

    def drain(self) -> None:
        """Notify the servers that no gradient follows in this epoch."""

    def pause(self) -> None:
        """Notify the servers that no gradient follows until they have sent their state to all ranks."""

    def ask_to_stop(self, reason: str) -> None:
        """Ask the servers to notify all workers that training has to stop."""


class LocalLink:
    """The connection to the only server, which is in this process."""

    stop: str | None = None

    def __init__(self, server: Server) -> None:
        self._server = server

    def pull(self, indices: Sequence[Array]) -> list[Array]:
        return [weights for _, weights in self._server.pull(0, indices[0])]

    def push(self, gradients: Sequence[SparseStream], rate: float) -> None:
        self._server.push(0, gradients[0], rate)

    def drain(self) -> None:
        """Do nothing, because the server is never behind."""

    def pause(self) -> None:
        """Do nothing, because the server is never behind."""

    def ask_to_stop(self, reason: str) -> None:
        """Do nothing, because there is no other worker."""


class RemoteLink:
    """The connection to servers on other ranks.

    Parameters
    ----------
    mailbox : Mailbox
    servers : range
        Ranks of the servers.
    dtype : dtype
        That of the weights.
    shape : tuple of int
        Shape of the weights in an answer: (-1,), or (-1, K) if they have columns.
    """

    def __init__(self, mailbox: Mailbox, servers: range, dtype: np.dtype[Any], shape: tuple[int, ...] = (-1,)) -> None:
        self._mailbox = mailbox
        self._servers = servers
        self._dtype = dtype
        self.stop: str | None = None
        self._shape = shape

    def pull(self, indices: Sequence[Array]) -> list[Array]:
        for server, part in zip(self._servers, indices, strict=True):
            self._mailbox.send(server, _PULL, part)
        weights: dict[int, Array] = {}
        while len(weights) < len(self._servers):
            message = self._mailbox.receive()
            if message.kind == _STOP:
                self.stop = message.payload.tobytes().decode()
            else:
                weights[message.source] = message.payload.view(self._dtype).reshape(self._shape)
        return [weights[server] for server in self._servers]

    def push(self, gradients: Sequence[SparseStream], rate: float) -> None:
        for server, gradient in zip(self._servers, gradients, strict=True):
            envelope, parts = wire.enclose([gradient])
            self._mailbox.send(server, _PUSH, np.array([rate], _RATE), envelope, *parts)
        # A large message is sent only while this rank calls MPI, and its next computation may take long: the gradient would become stale.
        self._mailbox.flush()

    def drain(self) -> None:
        self._say(_DRAIN)

    def pause(self) -> None:
        self._say(_PAUSE)

    def ask_to_stop(self, reason: str) -> None:
        self._say(_STOP, np.frombuffer(reason.encode(), np.uint8))

    def _say(self, kind: int, *parts: Array) -> None:
        for server in self._servers:
            self._mailbox.send(server, kind, *parts)
        self._mailbox.flush()


def answer_workers(
    mailbox: Mailbox, server: Server, clock: Clock, tell_state: Callable[[], object], asked_to_stop: Callable[[], str | None]
) -> None:
    """Answer the workers' requests to a server until all of them drain. Worker w is rank w.

    When all workers pause, ``tell_state`` is called, here as on all other ranks. Once a worker has asked to stop, or ``asked_to_stop``
    returns a reason, every worker is notified before it gets weights.
    """
    dtype = index_dtype(server.weights.size)
    ended: Counter[int] = Counter()
    reason: bytes | None = None
    notified: set[int] = set()
    while ended[_DRAIN] < server.workers:
        message = mailbox.receive()
        clock.lap("wait")
        answers: Answers = []
        if message.kind == _PULL:
            answers = server.pull(message.source, message.payload.view(dtype))
        elif message.kind == _PUSH:
            (rate,), (gradient,) = message.payload[: _RATE.itemsize].view(_RATE), wire.decode(message.payload[_RATE.itemsize :])
            answers = server.push(message.source, gradient, float(rate))
        elif message.kind == _STOP:
            reason = message.payload.tobytes()
        else:
            ended[message.kind] += 1
        clock.lap("update")
        if reason is None and (own := asked_to_stop()) is not None:
            reason = own.encode()
        for worker, weights in answers:
            if reason is not None and worker not in notified:
                mailbox.send(worker, _STOP, np.frombuffer(reason, np.uint8))
                notified.add(worker)
            mailbox.send(worker, _WEIGHTS, weights)
        if ended[_PAUSE] == server.workers:
            del ended[_PAUSE]
            tell_state()
        clock.lap("communicate")
    mailbox.flush()
