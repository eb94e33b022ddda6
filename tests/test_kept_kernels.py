"""Kernels that one clone has compiled are there in the next, as long as no source of kernels differs."""

import kept_kernels
import pytest


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A function that makes a clone, with the contents of a source, and goes there."""
    monkeypatch.setenv("TEST_KERNELS", str(tmp_path / "kept"))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)

    def make(name, source="x + y", compiled=0):
        (tmp_path / name / "kernels/__pycache__").mkdir(parents=True)
        (tmp_path / name / "kernels/sums.py").write_text(source)
        for number in range(compiled):
            (tmp_path / name / f"kernels/__pycache__/sums.{number}.nbc").write_text(f"of {name}")
        monkeypatch.setattr(kept_kernels, "PACKAGE", tmp_path / name)
        return tmp_path / name

    return make


def test_a_clone_has_the_kernels_of_another(clone):
    clone("first", compiled=2)
    kept_kernels.pack()
    second = clone("second")
    kept_kernels.unpack()
    assert [file.read_text() for file in sorted(second.rglob("*.nbc"))] == ["of first"] * 2


def test_the_larger_set_is_kept_whole(clone):
    for name, compiled in (("first", 2), ("second", 3), ("third", 1)):
        clone(name, compiled=compiled)
        kept_kernels.pack()
    fourth = clone("fourth")
    kept_kernels.unpack()
    assert {file.read_text() for file in fourth.rglob("*.nbc")} == {"of second"}


@pytest.mark.parametrize("change", ["another source", "no folder", "damage"])
def test_kernels_are_compiled_where_none_are_kept(clone, change, monkeypatch, tmp_path):
    clone("first", compiled=2)
    kept_kernels.pack()
    second = clone("second", source="x * y" if change == "another source" else "x + y")
    if change == "no folder":
        monkeypatch.delenv("TEST_KERNELS")
    if change == "damage":
        next((tmp_path / "kept").iterdir()).write_bytes(b"PK")
    kept_kernels.unpack()
    assert not list(second.rglob("*.nbc"))


def test_what_a_clone_has_compiled_itself_stays(clone):
    clone("first", compiled=2)
    kept_kernels.pack()
    second = clone("second", compiled=1)
    kept_kernels.unpack()
    assert [file.read_text() for file in second.rglob("*.nbc")] == ["of second"]
