"""Every kind of malformed file is refused, with the same error on every rank, in one line that names the file."""

import malformed
import pytest
from thread_ranks import on_ranks

import sparseallreduce as sar
from sparseallreduce.linear import DatasetError, load


def test_the_file_that_binary_ones_are_made_of_is_good(tmp_path):
    path = malformed.Malformed("good", malformed.binary(), "").write(tmp_path)
    assert load(path, comm=sar.SERIAL)[0].to_scipy().toarray()[2].tolist() == [0, -1, 2, 0, 0, 0, 0, 0, 0, 3]


@pytest.mark.parametrize("case", malformed.CASES, ids=lambda case: case.kind.replace(" ", "_"))
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_malformed_file_is_refused_on_every_rank(tmp_path, case, ranks):
    if ranks > 1 and case in malformed.BINARY:
        pytest.skip("several ranks read binary files by MPI-IO alone: see tests/mpi/cases_data.py")
    path = case.write(tmp_path)

    errors = on_ranks(ranks, lambda comm: malformed.read(path, comm))

    assert [type(error) for error in errors] == [DatasetError] * ranks
    assert len({str(error) for error in errors}) == 1
    assert str(path) in str(errors[0])
    assert case.says in str(errors[0])
    assert "\n" not in str(errors[0])
