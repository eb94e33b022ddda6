"""What is found out of an MPI library that may take memory of a GPU, from libraries that answer what they are told to."""

import pytest

from sparseallreduce import StreamError
from sparseallreduce.runtime.cuda_mpi import Support, cuda_support, support_of


class OpenMPI:
    def __init__(self, answer):
        self._answer = answer

    def MPIX_Query_cuda_support(self):
        return self._answer


class MPICH:
    def __init__(self, answer, status=0):
        self._answer, self._status = answer, status

    def MPIX_GPU_query_support(self, kind, answer):
        assert kind == 0
        answer._obj.value = self._answer
        return self._status


@pytest.mark.parametrize(
    "library, environment, used, why",
    [
        (OpenMPI(1), {}, True, "MPIX_Query_cuda_support says yes"),
        (OpenMPI(0), {}, False, "MPIX_Query_cuda_support says no"),
        (OpenMPI(-1), {}, False, "MPIX_Query_cuda_support says no"),
        (MPICH(1), {}, True, "MPIX_GPU_query_support says yes"),
        (MPICH(0), {}, False, "MPIX_GPU_query_support says no"),
        (MPICH(1, status=5), {}, False, "MPIX_GPU_query_support says no"),
        (object(), {}, False, "the library cannot be asked"),
        (MPICH(1), {"MPIR_CVAR_ENABLE_GPU": "0"}, False, "MPIR_CVAR_ENABLE_GPU=0"),
        (MPICH(0), {"MPICH_GPU_SUPPORT_ENABLED": "1"}, True, "MPICH_GPU_SUPPORT_ENABLED=1"),
        (OpenMPI(1), {"SPARSEALLREDUCE_CUDA_MPI": "0"}, False, "SPARSEALLREDUCE_CUDA_MPI=0"),
        (object(), {"SPARSEALLREDUCE_CUDA_MPI": "1", "MPIR_CVAR_ENABLE_GPU": "0"}, True, "SPARSEALLREDUCE_CUDA_MPI=1"),
    ],
)
def test_what_the_library_and_the_environment_say(library, environment, used, why):
    assert support_of(library, environment) == Support(used, why)


def test_a_word_that_means_nothing_is_an_error():
    with pytest.raises(StreamError, match="SPARSEALLREDUCE_CUDA_MPI is 1 if MPI can use GPU memory"):
        support_of(OpenMPI(1), {"SPARSEALLREDUCE_CUDA_MPI": "yes"})


def test_the_library_that_is_here_answers():
    pytest.importorskip("mpi4py.MPI", exc_type=(ImportError, RuntimeError))
    assert cuda_support().why
