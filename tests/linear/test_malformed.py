"""Every kind of malformed file is refused, with the same error on every rank, in one line that names the file."""

import malformed
import pytest
from thread_ranks import on_ranks

from sparseallreduce.linear import DatasetError


@pytest.mark.parametrize("case", malformed.CASES, ids=lambda case: case.kind.replace(" ", "_"))
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_malformed_file_is_refused_on_every_rank(tmp_path, case, ranks):
    path = case.write(tmp_path)

    errors = on_ranks(ranks, lambda comm: malformed.read(path, comm))

    assert [type(error) for error in errors] == [DatasetError] * ranks
    assert len({str(error) for error in errors}) == 1
    assert str(path) in str(errors[0])
    assert case.says in str(errors[0])
    assert "\n" not in str(errors[0])
