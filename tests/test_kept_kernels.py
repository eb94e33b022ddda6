"""Kernels that one clone has compiled are there in the next, as long as no source that they are compiled from differs."""

import kept_kernels
import pytest

PARTS = "from sparseallreduce.streams.kernels.compilation import inlined"
SUMS = "from sparseallreduce.kernels.parts import part"


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A function that makes a clone, with two sources of which one takes parts from the other, and goes there."""
    monkeypatch.setenv("TEST_KERNELS", str(tmp_path / "kept"))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)

    def make(name, parts=PARTS, compiled=0):
        folder = tmp_path / name / "kernels"
        (folder / "__pycache__").mkdir(parents=True)
        (folder / "parts.py").write_text(parts)
        (folder / "sums.py").write_text(SUMS)
        (folder / "other.py").write_text("")
        for number in range(compiled):
            for source in ("sums", "other"):
                (folder / f"__pycache__/{source}.f-1.py311.{number}.nbc").write_text(f"of {name}")
        monkeypatch.setattr(kept_kernels, "PACKAGE", tmp_path / name)
        return lambda source: [file.read_text() for file in folder.rglob(f"{source}.*.nbc")]

    return make


def test_a_clone_has_the_kernels_of_another(clone):
    clone("first", compiled=2)
    kept_kernels.pack()
    machine_code = clone("second")
    kept_kernels.unpack()
    assert machine_code("sums") == machine_code("other") == ["of first"] * 2


def test_the_larger_set_is_kept_whole(clone):
    for name, compiled in (("first", 2), ("second", 3), ("third", 1)):
        clone(name, compiled=compiled)
        kept_kernels.pack()
    machine_code = clone("fourth")
    kept_kernels.unpack()
    assert machine_code("sums") == ["of second"] * 3


def test_kernels_are_compiled_anew_from_another_part(clone):
    clone("first", compiled=2)
    kept_kernels.pack()
    machine_code = clone("second", parts=PARTS + ", another")
    kept_kernels.unpack()
    assert machine_code("sums") == [] and machine_code("other") == ["of first"] * 2


@pytest.mark.parametrize("change", ["no folder", "damage"])
def test_kernels_are_compiled_where_none_are_kept(clone, change, monkeypatch, tmp_path):
    clone("first", compiled=2)
    kept_kernels.pack()
    machine_code = clone("second")
    if change == "no folder":
        monkeypatch.delenv("TEST_KERNELS")
    for file in (tmp_path / "kept").iterdir() if change == "damage" else []:
        file.write_bytes(b"PK")
    kept_kernels.unpack()
    assert machine_code("sums") == []


def test_what_a_clone_has_compiled_itself_stays(clone):
    clone("first", compiled=2)
    kept_kernels.pack()
    machine_code = clone("second", compiled=1)
    kept_kernels.unpack()
    assert machine_code("sums") == ["of second"]
