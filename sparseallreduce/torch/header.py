"""The message that the ranks exchange at the beginning of a step.

It contains the kind of each gradient and the properties that must be the same on all ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from sparseallreduce.algorithms.agreement import Intent
from sparseallreduce.algorithms.steps import Share, Step
from sparseallreduce.errors import StreamTypeError
from sparseallreduce.runtime.launching import launch
from sparseallreduce.torch import replicas
from sparseallreduce.torch.buckets import Member
from sparseallreduce.torch.devices import norms
from sparseallreduce.torch.flight import translated

__all__ = ["NONE", "SPARSE", "STRIDED", "Header", "exchange", "norm_of", "on_any_rank", "settings", "terms", "text"]

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # an address in the text of an object, which differs between ranks
NONE, STRIDED, SPARSE = 0, 1, 2  # kinds of gradients; the kind of a sparse gradient with d indexed dimensions is SPARSE + d - 1


class Header(NamedTuple):
    """The result of the agreement on a step."""

    layouts: bytes  # for each parameter, the kind of its gradient on the ranks that have a gradient
    infinite: bool  # whether a rank has an infinite gradient


def exchange(
    comm: Any, members: Sequence[Member], groups: Sequence[dict[str, Any]], step: int, infinite: bool, check: bool, error: Exception | None
) -> Header:
    """Let the ranks agree on a step.

    Raises
    ------
    SparseAllreduceError
        The same error on every rank: the ``error`` of any rank; MismatchError if the steps, the settings or, with ``check``, the parameters
        differ; StreamTypeError if a gradient has different kinds on different ranks.
    """
    record = b""
    try:
        if error is not None:
            raise error
        record = bytes(map(_kind, members)) + bytes([infinite]) + (replicas.digests(members) if check else b"")
        described = {"step of the optimiser": step, "settings of the groups": settings(groups)}
        intent = Intent(tuple((name, text(value)) for name, value in described.items()), 0)
    except BaseException as wrong:
        intent = Intent((), 0, translated(wrong) if isinstance(wrong, Exception) else wrong)

    def schedule(_rank: int, _ranks: int) -> Generator[Step, Any, list[bytes]]:
        return list((yield Share(record)))

    records: list[bytes] = launch(comm, intent, schedule, blocking=True).wait()
    count = len(members)
    if check:
        different = replicas.difference(members, [each[count + 1 :] for each in records])
        if different is not None:
            different.on_all_ranks = True
            raise different
    for member, kinds in zip(members, zip(*(each[:count] for each in records))):
        if len(set(kinds) - {NONE}) > 1:
            mixed = StreamTypeError(f"the gradient of {member.name} is sparse on some ranks and not on others, or in other dimensions")
            mixed.on_all_ranks = True
            raise mixed
    return Header(bytes(map(max, zip(*(each[:count] for each in records)))), any(each[count] for each in records))


def on_any_rank(comm: Any, condition: bool) -> bool:
    """Return whether the condition holds on any rank. Collective."""

    def schedule(_rank: int, _ranks: int) -> Generator[Step, Any, bool]:
        return any(each != b"\0" for each in (yield Share(bytes([condition]))))

    return bool(launch(comm, Intent((("operation", "a question to all ranks"),), 0), schedule, blocking=True).wait())


def terms(optimizer: Any, members: Sequence[Member]) -> tuple[tuple[str, str], ...]:
    """Return the properties that must be the same on all ranks when parameters are added, as names and texts."""
    described = {"optimiser": type(optimizer).__name__, "settings": optimizer._settings, "options": optimizer.options}
    described |= {"bucket_bytes": optimizer.bucket_bytes, "check_every": optimizer.check_every}
    described |= {"shapes of the parameters": [tuple(member.parameter.shape) for member in members]}
    described |= {"dtypes of the parameters": [member.kind for member in members], "groups": settings(optimizer.param_groups)}
    return tuple((name, text(value)) for name, value in described.items())


def settings(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the settings of the groups without their parameters, with tensors as plain numbers."""
    return [{name: _plain(value) for name, value in group.items() if name not in ("params", "param_names")} for group in groups]


def text(value: Any) -> str:
    """Return the value as text, without memory addresses, which differ between ranks."""
    return _ADDRESS.sub("", str(value))


def norm_of(gradients: Iterable[torch.Tensor | None]) -> float:
    """Return the L2 norm of all gradients together, in double precision."""
    given = [gradient for gradient in gradients if gradient is not None]
    return math.hypot(*norms(each.detach().coalesce().values() if each.is_sparse else each for each in given))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value


def _kind(member: Member) -> int:
    gradient = member.parameter.grad
    if gradient is None:
        return NONE
    if gradient.layout is torch.strided:
        return STRIDED
    if gradient.layout is torch.sparse_coo:
        return SPARSE - 1 + int(gradient.sparse_dim())
    raise StreamTypeError(f"the gradient of {member.name} is of layout {gradient.layout}: strided and sparse_coo are summed")
