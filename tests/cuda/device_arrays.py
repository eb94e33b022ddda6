"""What stands for CuPy around the kernels under numba's simulator: arrays that NumPy does not take for its own, and their module.

It does what CuPy does, and no more: an array is not made a NumPy array unless it is asked to, NumPy arrays do not mix with it, it has no
mark that says it is read-only, numbers that a reduction finds are arrays, and it knows no bfloat16.
"""

import operator
from contextlib import contextmanager

import numpy as np

__all__ = ["asnumpy", "ndarray", "waits"]

WAITING = ("argwhere", "array_equal", "bincount", "flatnonzero", "nonzero", "unique")  # functions of CuPy's that wait for a length
_waits = []  # lists of the names of what has waited for the device since, one of each caller that counts


@contextmanager
def waits():
    """A list that grows by a name with whatever makes the host wait for a number from the device, or for a copy."""
    counted = []
    _waits.append(counted)
    try:
        yield counted
    finally:
        _waits.remove(counted)


def waited(name):
    for counted in _waits:
        counted.append(name)


def plain(given):
    """What NumPy works on in the place of an argument; a NumPy array is refused."""
    if isinstance(given, ndarray):
        return given._array
    if isinstance(given, np.ndarray):
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    if isinstance(given, tuple | list):
        return type(given)(map(plain, given))
    return given


def wrapped(result):
    if isinstance(result, np.ndarray | np.generic):
        return ndarray(np.asarray(result))
    return type(result)(map(wrapped, result)) if isinstance(result, tuple | list) else result


class Flags:
    def __init__(self, flags):
        self.c_contiguous, self.f_contiguous, self.owndata = flags.c_contiguous, flags.f_contiguous, flags.owndata


class ndarray:
    """An array on the device, whose memory is the simulator's."""

    METHODS = ("reshape", "view", "astype", "copy", "max", "min", "sum", "any", "all", "argmax", "argmin", "ravel", "sort")

    def __init__(self, array):
        assert type(array) is np.ndarray
        self._array = array

    def __getattr__(self, name):
        if name in ("shape", "dtype", "ndim", "size", "nbytes", "itemsize", "strides"):
            return getattr(self._array, name)
        if name in ("real", "imag", "T"):
            return ndarray(getattr(self._array, name))
        if name not in self.METHODS:
            raise AttributeError(f"arrays on the device have no {name}")
        return lambda *args, **options: wrapped(getattr(self._array, name)(*plain(args), **options))

    @property
    def flags(self):
        return Flags(self._array.flags)

    @property
    def __cuda_array_interface__(self):
        return {**self._array.__array_interface__, "version": 3}

    def __array__(self, *args, **options):
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array explicitly.")

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **options):
        if method != "__call__":
            return NotImplemented
        outputs = {"out": tuple(map(plain, out))} if out else {}
        result = ufunc(*plain(inputs), **outputs, **options)
        return out[0] if out else wrapped(result)

    def __array_function__(self, function, types, args, options):
        if function.__name__ in WAITING:
            waited(function.__name__)
        return wrapped(function(*plain(args), **{name: plain(value) for name, value in options.items()}))

    def get(self):
        waited("get")
        return self._array.copy()

    def tolist(self):
        waited("tolist")
        return self._array.tolist()

    def item(self):
        waited("item")
        return self._array.item()

    def fill(self, value):
        self._array.fill(value)

    def __len__(self):
        return len(self._array)

    def __getitem__(self, key):
        if isinstance(key, ndarray) and key.dtype == np.bool_:
            waited("mask")
        return ndarray(np.asarray(self._array[plain(key)]))

    def __setitem__(self, key, value):
        if isinstance(key, ndarray) and key.dtype == np.bool_ and isinstance(value, ndarray):
            waited("mask")
        self._array[plain(key)] = plain(value)

    def __bool__(self):
        waited("bool")
        return bool(self._array)

    def __int__(self):
        waited("int")
        return int(self._array)

    def __float__(self):
        waited("float")
        return float(self._array)

    def __index__(self):
        waited("index")
        return operator.index(self._array)

    def __repr__(self):
        return f"device {self._array!r}"

    __hash__ = None


def _operate(name):
    def method(self, *others):
        result = getattr(self._array, name)(*plain(others))
        if name.startswith("__i") and name != "__invert__":
            return self
        return wrapped(result)

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift", "pow"):
    for _form in ("", "r", "i"):
        setattr(ndarray, f"__{_form}{_name}__", _operate(f"__{_form}{_name}__"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "invert", "abs"):
    setattr(ndarray, f"__{_name}__", _operate(f"__{_name}__"))


def asarray(given, dtype=None):
    """An array on the device: a copy of one on the host."""
    if isinstance(given, ndarray):
        return given if dtype is None or given.dtype == dtype else given.astype(dtype)
    if hasattr(given, "__cuda_array_interface__"):
        raise TypeError(f"arrays of {type(given).__name__} are not simulated")
    array = np.array(given, dtype)
    if array.dtype.kind not in "biufc":
        raise ValueError(f"Unsupported dtype {array.dtype}")
    return ndarray(array)


class cuda:
    """What is asked of CuPy's devices: to wait until one has nothing more to do, as here always."""

    class Device:
        def synchronize(self):
            return None


def asnumpy(array):
    return array.get()


def may_share_memory(first, second):
    return np.may_share_memory(plain(first), plain(second))


def __getattr__(name):
    """NumPy's functions on arrays of the device."""
    function = getattr(np, name)
    if name.startswith("__") or not callable(function) or isinstance(function, type):
        return function

    def on_device(*args, **options):
        if name in WAITING:
            waited(name)
        out = options.get("out")
        result = function(*plain(args), **{option: plain(value) for option, value in options.items()})
        if out is not None:
            return out
        return ndarray(np.asarray(result)) if isinstance(result, int | float | bool) else wrapped(result)

    return on_device
