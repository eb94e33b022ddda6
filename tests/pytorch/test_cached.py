"""CachedDataset without MPI: what comes back is what was there, also to the workers of a DataLoader, of whichever kind."""

import pytest

pytest.importorskip("torch")

import torch
from slow_store import SlowStore, check, decoded, doubled
from torch.utils.data import DataLoader, RandomSampler

from sparseallreduce.data_cache import Counts, DataCache, StoredFiles
from sparseallreduce.errors import DatasetError
from sparseallreduce.torch import CachedDataset

DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "uint8", "bool", "complex64", "float8_e4m3fn"]


class Listed:
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def alike(one, other):
    return (one.dtype, one.shape, one.layout) == (other.dtype, other.shape, other.layout) and torch.equal(
        one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8)
    )


def test_tensors_come_back_as_they_were(tmp_path):
    tensors = [torch.randn(shape).to(getattr(torch, dtype)) for dtype in DTYPES for shape in [(), (0,), (3,), (2, 3, 5), (2, 0, 4)]]
    tensors += [torch.randn(4, 6).T, torch.randn(4, 6)[::2, 1::3], torch.tensor([float("nan"), -0.0])]
    tensors.append(torch.randn(3).to(torch.complex64).conj())
    tensors += [torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.ones(2, requires_grad=True)]
    samples = [{"x": tensor, 7: [tensor, (None, "label", 1.5)]} for tensor in tensors]
    cached = CachedDataset(Listed(samples), DataCache(tmp_path), name="tensors")
    for _ in range(2):
        for given, found in zip(tensors, cached):
            assert alike(found["x"], given.detach().resolve_conj()) and not found["x"].requires_grad
            assert alike(found[7][0], given.detach().resolve_conj()) and found[7][1] == (None, "label", 1.5)
    assert cached.cache.counts == Counts(disk=len(samples), fetched=len(samples))


@pytest.mark.parametrize("strange", [torch.eye(3).to_sparse(), torch.nn.Parameter(torch.ones(2)), object()])
def test_what_cannot_be_cached_is_refused(tmp_path, strange):
    with pytest.raises(DatasetError, match="cannot be cached"):
        CachedDataset(Listed([strange]), DataCache(tmp_path), name="strange")[0]


def test_samples_are_numbered_as_in_a_list(tmp_path):
    cached = CachedDataset(Listed([3, 4, 5]), DataCache(tmp_path), name="list")
    assert [cached[0], cached[-1], cached[torch.tensor(1)], len(cached), list(cached)] == [3, 5, 4, 3, [3, 4, 5]]
    for index in (3, -4):
        with pytest.raises(IndexError, match="no sample"):
            cached[index]
    with pytest.raises(TypeError):
        cached[0.5]


def test_names_and_versions_tell_samples_apart(tmp_path):
    cache = DataCache(tmp_path, memory_bytes=1 << 20)
    for name, version in (("train", ""), ("test", ""), ("train", "2"), ("test", str)):
        samples = [f"{name} {version} {index}" for index in range(3)]
        assert list(CachedDataset(Listed(samples), cache, name=name, version=version)) == samples
    assert cache.counts.fetched == 12


def test_files_are_decoded_into_memory(tmp_path):
    (tmp_path / "a").write_bytes(bytes(range(100)))
    files, cache = StoredFiles([tmp_path / "a"]), DataCache(tmp_path / "cache", memory_bytes=1 << 20)
    cached = CachedDataset(files, cache, name="files", version=files.version, decode=lambda content: torch.tensor(list(content)))
    for _ in range(3):
        assert torch.equal(cached[0], torch.arange(100))
    assert cache.counts == Counts(memory=2, fetched=1)
    assert CachedDataset(files, cache, name="files", version=files.version)[0] == bytes(range(100))


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_loader_share_the_cache(tmp_path, start):
    store, cache = SlowStore(tmp_path), DataCache(tmp_path / "cache", memory_bytes=1 << 20)
    cached = CachedDataset(store, cache, name="store", decode=decoded, transform=doubled)
    check(*(each[None] if isinstance(each, torch.Tensor) else torch.tensor([each]) for each in cached[0]))
    for _ in range(2):
        workers = 2 if start == "fork" else 1
        loader = DataLoader(cached, 4, sampler=RandomSampler(cached), num_workers=workers, multiprocessing_context=start)
        for images, labels in loader:
            check(images, labels)
    assert store.asked == list(range(24))
    assert cached.fill() == 0 and cached[23][1] == 23 and cache.counts == Counts(memory=1, fetched=1)
