"""A data set that caches its samples on the disk and in the memory of each host (DataCache, CommLib section 4.1)."""

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

_TENSOR = "tensor "  # prefix of a tensor's dtype in the cache


class CachedDataset(torch.utils.data.Dataset[Any]):
    """A data set that reads each sample of another data set only once per host and keeps it in a cache.

    Parameters
    ----------
    dataset : torch.utils.data.Dataset
        A data set on slow storage, with a length and samples that are indexed by number. A sample consists of tensors, arrays, numbers,
        strings and bytes, possibly nested in tuples, lists and dictionaries.
    cache : DataCache
        The cache, which several data sets can share.
    name : str
        Identifies this data set among those in the same cache folder, such as a training set and a test set.
    version : str or callable
        The version of the data. Samples that were cached with another version are read again. A callable takes the number of a sample and
        returns its version, as :meth:`sparseallreduce.data_cache.StoredFiles.version` does.
    decode : callable, optional
        Converts a sample of ``dataset`` to the form that is kept in memory, for example the bytes of an image to a tensor. It must always
        return the same result for the same sample. The disk keeps the sample as ``dataset`` returns it.
    transform : callable, optional
        Applied to a sample each time it is requested, for example for random augmentation or to make objects that cannot be cached.

    Raises
    ------
    DatasetError
        When a sample contains an object of any other type.

    Notes
    -----
    Tensors are returned contiguous, on the CPU and without gradient history. Each is a copy that may be modified. If the workers of a
    DataLoader are spawned, everything given here must be picklable; the cache is.

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

    dataset: Any
    cache: DataCache
    name: str
    version: str | Callable[[int], str]
    decode: Callable[[Any], Any] | None
    transform: Callable[[Any], Any] | None

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
        """Read all samples into the cache, and return how many this process has read.

        The ranks and workers of a host that call it share the work. It ends when all samples are cached or the cache is full. It is not
        collective: some ranks may call it while others train.
        """
        return self.cache.fill(len(self), self._request, to_array=_to_array, from_array=_from_array)

    def _request(self, index: int) -> Request:
        version = self.version if isinstance(self.version, str) else self.version(index)
        return Request(f"{self.name}\0{index}", lambda: self.dataset[index], version, self.decode)


def _to_array(leaf: Any) -> tuple[str, NDArray[Any]] | None:
    """Return a tensor's dtype as text, and the bytes of its elements as an array with an additional last dimension.

    Return None for any other object.
    """
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
