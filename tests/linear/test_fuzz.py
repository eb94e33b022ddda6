"""Readers against damaged files: a short run of the fuzz tool, and proof that it notices a reader that does not look."""

import fuzz_readers
import pytest

from sparseallreduce.linear.data.binary import reader as binary
from sparseallreduce.linear.data.svmlight import reader as svmlight


def test_damaged_files_are_refused_or_read_as_a_slow_reader_does():
    counts, failures = fuzz_readers.run(1, range(3000))
    assert failures == {}
    assert sum(counts.values()) == 3000
    assert all(count > 5 for count in counts.values())
    assert len(counts) == 2 * len(fuzz_readers.KINDS)  # each both accepted and refused


@pytest.mark.parametrize("reader,check", [(binary._Rows, "_check"), (svmlight._Parser, "_convert")])
def test_a_reader_that_does_not_look_is_found_out(monkeypatch, reader, check):
    monkeypatch.setattr(reader, check, lambda *_: None)
    assert any(fuzz_readers.run(2, range(begin, begin + 50))[1] for begin in range(0, 1500, 50))
