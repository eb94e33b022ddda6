"""A data set whose samples are cached on the disk and in the memory of a host (DataCache, CommLib section 4.1)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparseallreduce.checked_file import Damaged
from sparseallreduce.data_cache import DataCache, Request
from sparseallreduce.errors import DatasetError

__all__ = ["CachedDataset"]

_TENSOR = "tensor "  # before the dtype of one


class CachedDataset(torch.utils.data.Dataset):
    """Another data set, each sample of which is asked for once by all ranks and workers of a host.

    Parameters
    ----------
    dataset : torch.utils.data.Dataset
        What has ``len`` and samples by number, on a slow store. Samples are tensors, arrays, numbers, strings and bytes, in tuples, lists
        and dictionaries.
    cache : DataCache
    name : str
        What tells the data set from others in the cache's folder, of a test set also.
    version : str or callable
        What was cached under another is not used any more. A callable is asked for that of a sample by its number, as
        :meth:`sparseallreduce.data_cache.StoredFiles.version`.
    decode : callable, optional
        Makes of what the data set gives what is kept in memory, such as a tensor of the bytes of an image: always the same of the same.
        The disk keeps what the data set gives.
    transform : callable, optional
        Applied to what is handed over, each time: random augmentation, and whatever makes something that cannot be cached.

    Raises
    ------
    DatasetError
        When a sample has something else in it.

    Notes
    -----
    Tensors come back contiguous, on the processor, without history. Each is a copy that may be written to. With DataLoader's workers that
    are spawned, all that is given here is pickled; the cache may be.

    Examples
    --------
    >>> import tempfile, torch
    >>> squares = torch.utils.data.TensorDataset(torch.arange(10) ** 2)
    >>> folder = tempfile.TemporaryDirectory()
    >>> cached = CachedDataset(squares, DataCache(folder.name, memory_bytes=1 << 20), name="squares")
    >>> cached.fill()
    10
    >>> for batch, in torch.utils.data.DataLoader(cached, batch_size=5):
    ...     print(batch)
    tensor([ 0,  1,  4,  9, 16])
    tensor([25, 36, 49, 64, 81])
    """

    def __init__(
        self,
        dataset: Any,
        cache: DataCache,
        *,
        name: str,
        version: str | Callable[[int], str] = "",
        decode: Callable[[Any], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self.dataset, self.cache, self.name, self.version = dataset, cache, name, version
        self.decode, self.transform = decode, transform

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        place, length = operator.index(index), len(self)
        if not -length <= place < length:
            raise IndexError(f"there is no sample {place} among {length}")
        key, fetch, version, decode = self._request(place % length)
        sample = self.cache.get(key, fetch, version=version, decode=decode, to_array=_to_array, from_array=_from_array)
        return sample if self.transform is None else self.transform(sample)

    def fill(self) -> int:
        """Bring all samples into the cache, each rank or worker of a host that calls it a part; returns how many this one has fetched.

        It ends when all are there, or when there is no room for more. Not collective: whoever calls it, others may train meanwhile.
        """
        return self.cache.fill(len(self), self._request, to_array=_to_array, from_array=_from_array)

    def _request(self, index: int) -> Request:
        version = self.version if isinstance(self.version, str) else self.version(index)
        return Request(f"{self.name}\0{index}", lambda: self.dataset[index], version, self.decode)


def _to_array(leaf: Any) -> tuple[str, NDArray[Any]] | None:
    """The bytes of a tensor, its elements' in the last dimension."""
    if type(leaf) is not torch.Tensor:
        return None
    if leaf.layout != torch.strided or leaf.is_quantized:
        raise DatasetError(f"a {'quantized' if leaf.is_quantized else leaf.layout} tensor cannot be cached: make a dense one of it before")
    plain = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    content = plain.view(torch.uint8).numpy() if plain.numel() else np.empty(0, np.uint8)
    return _TENSOR + str(leaf.dtype).removeprefix("torch."), content.reshape(*leaf.shape, leaf.element_size())


def _from_array(what: str, content: NDArray[Any]) -> torch.Tensor:
    dtype, shape = getattr(torch, what.removeprefix(_TENSOR), None), content.shape[:-1]
    known = what.startswith(_TENSOR) and isinstance(dtype, torch.dtype) and content.dtype == np.uint8 and content.ndim > 0
    if dtype is None or not known or content.shape[-1] != dtype.itemsize:
        raise Damaged(f"there is no {what} of bytes of shape {content.shape}")
    if not content.size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(content.reshape(-1)).view(dtype).reshape(shape)
