"""Arrays of other libraries are read and changed in place."""

from array import array

import numpy as np
import pytest

import sparseallreduce as sar
from sparseallreduce.optim import TopKSGD
from sparseallreduce.optim.arrays import as_array, as_flat_parameter


class Interfaced:
    """Nothing but NumPy's array interface."""

    def __init__(self, values):
        self.values = values
        self.__array_interface__ = values.__array_interface__


class Exported:
    """Nothing but DLPack."""

    def __init__(self, values):
        self.values = values

    def __dlpack__(self, **how):
        return self.values.__dlpack__(**how)

    def __dlpack_device__(self):
        return self.values.__dlpack_device__()


class OldTensor:
    """A tensor of the time before DLPack 1.0, which cannot say that it may be written to."""

    def __init__(self, values):
        self.values = values

    def __dlpack__(self, stream=None):
        return self.values.__dlpack__()

    def __dlpack_device__(self):
        return self.values.__dlpack_device__()

    def __array__(self, dtype=None, copy=None):
        return self.values


class OnDevice(Exported):
    """An array in another memory."""

    def __dlpack__(self, **how):
        raise BufferError("it is on device 2")


DLPACK_WRITES = np.lib.NumpyVersion(np.__version__) >= "2.2.5"  # before, NumPy takes memory that DLPack gives for read-only
MAKERS = [lambda values: values, memoryview, Interfaced, OldTensor, lambda values: array(values.dtype.char, values.tolist())]
MAKERS += [Exported] if DLPACK_WRITES else []


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("make", MAKERS)
def test_parameters_of_any_library_are_changed_in_place(make, dtype):
    parameter, gradient = make(np.array([1, 2, 3, 4], dtype)), make(np.array([0, 8, 0, 2], dtype))
    TopKSGD(parameter, 0.5, density=0.25, comm=sar.SERIAL).step(gradient)
    np.testing.assert_array_equal(as_array(parameter), np.array([1, -2, 3, 4], dtype))
    np.testing.assert_array_equal(as_array(gradient), np.array([0, 8, 0, 2], dtype))


@pytest.mark.parametrize("make", MAKERS)
def test_nothing_is_copied(make):
    given = make(np.zeros(3, np.float32))
    as_array(given)[1] = 7
    assert as_flat_parameter(given)[1] == 7


@pytest.mark.skipif(DLPACK_WRITES, reason="this NumPy writes to what DLPack gives")
def test_what_only_dlpack_gives_is_read_but_not_changed_by_old_versions_of_numpy():
    values = np.array([1, 2, 3, 4], np.float32)
    np.testing.assert_array_equal(as_array(Exported(values)), values)
    with pytest.raises(sar.StreamError, match="read-only"):
        TopKSGD(Exported(values), 0.5, density=0.25, comm=sar.SERIAL)


def test_a_module_of_pytorch_is_trained_in_place():
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(4, 3)
    optimizer = TopKSGD(layer.parameters(), 0.5, density=1, comm=sar.SERIAL)
    layer(torch.ones(2, 4)).sum().backward()
    expected = [(parameter - 0.5 * parameter.grad).detach().clone() for parameter in layer.parameters()]
    optimizer.step([parameter.grad for parameter in layer.parameters()])
    for parameter, wanted in zip(layer.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), wanted)


@pytest.mark.parametrize(
    "parameter,message",
    [
        ([1.0, 2.0], "array is needed.*not list"),
        (np.zeros(3, np.int64), "not int64"),
        (np.zeros(3, ">f4"), "not >f4"),
        (np.zeros((3, 2), np.float32).T, "contiguous"),
        (np.broadcast_to(np.float32(1), (3,)), "contiguous"),
        (np.frombuffer(bytes(8), np.float32), "read-only"),
        (OnDevice(np.zeros(3, np.float32)), "device 2"),
    ],
)
def test_a_parameter_that_cannot_be_changed_in_place_is_an_error(parameter, message):
    with pytest.raises((sar.StreamError, sar.StreamTypeError), match=message):
        TopKSGD([parameter], 0.5, comm=sar.SERIAL)


def test_a_gradient_with_gaps_is_taken():
    parameter = np.zeros((2, 3), np.float32)
    gradient = np.arange(6, dtype=np.float32).reshape(3, 2).T
    TopKSGD(parameter, 1.0, density=1, comm=sar.SERIAL).step(gradient)
    np.testing.assert_array_equal(parameter, -gradient)
