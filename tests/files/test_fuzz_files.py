"""Readers of the library's own files against altered ones: a short run of the fuzz tool."""

import fuzz_files


def test_altered_files_are_refused_by_name_or_made_anew():
    counts, failures = fuzz_files.run(1, range(250))
    assert failures == {}
    assert len(counts) == 2 * (len(fuzz_files.KINDS) + len(fuzz_files.ARCHIVES))  # each both accepted and refused
