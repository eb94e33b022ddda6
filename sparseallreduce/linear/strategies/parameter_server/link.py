"""How a worker reaches the parameter servers, and what a server rank does: the messages that pull and push are."""

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

# Kinds of messages: indices asked for; their weights; a rate and then a stream in wire form; the end of an epoch; that all ranks are
# to be told the state of the servers; that training is to stop, and why, which servers pass on to every worker before its next weights.
_PULL, _WEIGHTS, _PUSH, _DRAIN, _PAUSE, _STOP = 1, 2, 3, 4, 5, 6
_RATE = np.dtype("<f8")


class Link(Protocol):
    """A worker's way to all servers; lists have an element a server, in their order."""

    stop: str | None  # why training is to stop, once a server has said so

    def pull(self, indices: Sequence[Array]) -> list[Array]:
        """The weights at the sorted indices of each part, waited for."""

    def push(self, gradients: Sequence[SparseStream], rate: float) -> None:
        """Give each server the gradient of its part, to be applied when it sees fit."""

    def drain(self) -> None:
        """Say that no gradient follows in this epoch."""

    def pause(self) -> None:
        """Say that no gradient follows until the servers have told all ranks their state."""

    def ask_to_stop(self, reason: str) -> None:
        """Have the servers tell all workers that training is to stop."""


class LocalLink:
    """To the one server that is in this process."""

    stop: str | None = None

    def __init__(self, server: Server) -> None:
        self._server = server

    def pull(self, indices: Sequence[Array]) -> list[Array]:
        return [weights for _, weights in self._server.pull(0, indices[0])]

    def push(self, gradients: Sequence[SparseStream], rate: float) -> None:
        self._server.push(0, gradients[0], rate)

    def drain(self) -> None:
        """The server is never behind."""

    def pause(self) -> None:
        """The server is never behind."""

    def ask_to_stop(self, reason: str) -> None:
        """There is no other worker."""


class RemoteLink:
    """To servers on other ranks.

    Parameters
    ----------
    mailbox : Mailbox
    servers : range
        Their ranks.
    dtype : dtype
        Of the weights.
    shape : tuple of int
        Of those of one answer: (-1,), or (-1, K) where they have columns.
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
        # A large message leaves only while this rank calls MPI, and what it computes next may take long: the gradient would age.
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
    """Do what the workers ask of a server, until all of them drain. Worker w is rank w.

    When all of them pause, ``tell_state`` is called, here as on all other ranks. Once a worker has asked to stop, or ``asked_to_stop``
    gives a reason, every worker is told so before it gets weights.
    """
    dtype = index_dtype(server.weights.size)
    ended: Counter[int] = Counter()
    reason: bytes | None = None
    told: set[int] = set()
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
            if reason is not None and worker not in told:
                mailbox.send(worker, _STOP, np.frombuffer(reason, np.uint8))
                told.add(worker)
            mailbox.send(worker, _WEIGHTS, weights)
        if ended[_PAUSE] == server.workers:
            del ended[_PAUSE]
            tell_state()
        clock.lap("communicate")
    mailbox.flush()
