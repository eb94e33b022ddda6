"""States of optimisers as tensors by name, for formats that hold nothing else: safetensors, and torch.distributed.checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from sparseallreduce.errors import CheckpointError, StreamTypeError

__all__ = ["flatten_state", "unflatten_state"]

_OUTLINE = "outline"  # the name of the tensor that holds everything else, as the bytes of JSON


def flatten_state(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return a state as contiguous tensors by name; :func:`unflatten_state` makes the state of them again.

    Parameters
    ----------
    state : dict
        As of an optimiser's ``state_dict``: dictionaries with texts and numbers as keys, lists, tuples, tensors, numbers, texts and None.

    Raises
    ------
    StreamTypeError
        If it holds something else.

    Examples
    --------
    >>> state = {"state": {0: {"step": torch.tensor(2.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    >>> tensors = flatten_state(state)            # safetensors.torch.save_file(tensors, path)
    >>> sorted(tensors)
    ['outline', 'state.0.step']
    >>> unflatten_state(tensors) == state
    True
    """
    tensors: dict[str, torch.Tensor] = {}
    outline = json.dumps(_outlined(state, "", tensors)).encode()
    tensors[_OUTLINE] = torch.frombuffer(bytearray(outline), dtype=torch.uint8)
    return tensors


def unflatten_state(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the state from which :func:`flatten_state` made these tensors.

    Raises
    ------
    CheckpointError
        If they are not whole, or of something else.
    """
    try:
        outline = json.loads(bytes(tensors[_OUTLINE].cpu().tolist()))
        state: dict[str, Any] = _filled(outline, tensors)
        return state
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise CheckpointError(f"these tensors are not those of a state, or not all of them: {error!r}") from error


def _outlined(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a value as JSON can express it: a list of its kind and its parts. Tensors are put into ``tensors``."""
    if isinstance(value, torch.Tensor):
        if name in tensors or name == _OUTLINE:
            raise StreamTypeError(f"two tensors of this state are named {name}")
        tensors[name] = value.detach().contiguous().clone()
        return ["tensor", name]
    prefix = f"{name}." if name else ""
    if isinstance(value, Mapping):
        return ["dict", [[_outlined(key, "", {}), _outlined(each, f"{prefix}{key}", tensors)] for key, each in value.items()]]
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [_outlined(each, f"{prefix}{place}", tensors) for place, each in enumerate(value)]]
    if value is None or isinstance(value, str | bool | int | float):
        return ["plain", value]
    raise StreamTypeError(f"a state holds tensors, numbers and texts, and at {name} {type(value).__name__}")


def _filled(outline: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    kind, content = outline
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {_filled(key, {}): _filled(each, tensors) for key, each in content}
    if kind in ("list", "tuple"):
        values = [_filled(each, tensors) for each in content]
        return values if kind == "list" else tuple(values)
    if kind != "plain":
        raise ValueError(f"there is no kind {kind!r}")
    return content
