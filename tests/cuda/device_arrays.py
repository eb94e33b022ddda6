"""What stands for CuPy around the kernels under numba's simulator: arrays that NumPy does not take for its own, and their module.

It does what CuPy does, and no more: an array is not made a NumPy array unless it is asked to, NumPy arrays do not mix with it, it has no
mark that says it is read-only, numbers that a reduction finds are arrays, and it knows no bfloat16. What it does on streams, and who has to
wait for whom, is in `device_streams.py`.
"""

import operator

import device_streams
import numpy as np
from device_streams import memory_of, waited, waits

__all__ = ["asnumpy", "ndarray", "waits"]

WAITING = ("argwhere", "array_equal", "bincount", "flatnonzero", "nonzero", "unique")  # functions of CuPy's that wait for a length


def plain(given):
    """What NumPy works on in the place of an argument; a NumPy array is refused."""
    if isinstance(given, ndarray):
        memory_of(given._array).read()
        return given._array
    if isinstance(given, np.ndarray):
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    if isinstance(given, tuple | list):
        return type(given)(map(plain, given))
    return given


def written(given):
    """The same of what is written to."""
    plain_array = plain(given)
    if isinstance(given, ndarray):
        memory_of(given._array).write()
    return plain_array


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
        memory_of(array)

    def __getattr__(self, name):
        if name in ("shape", "dtype", "ndim", "size", "nbytes", "itemsize", "strides"):
            return getattr(self._array, name)
        if name in ("real", "imag", "T"):
            return ndarray(getattr(self._array, name))
        if name not in self.METHODS:
            raise AttributeError(f"arrays on the device have no {name}")

        def method(*args, **options):
            if name not in ("view", "reshape"):
                (written if name == "sort" else plain)(self)
            return wrapped(getattr(self._array, name)(*plain(args), **options))

        return method

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
        outputs = {"out": tuple(map(written, out))} if out else {}
        result = ufunc(*plain(inputs), **outputs, **options)
        return out[0] if out else wrapped(result)

    def __array_function__(self, function, types, args, options):
        if function.__name__ in WAITING:
            waited(function.__name__)
        return wrapped(function(*plain(args), **{name: plain(value) for name, value in options.items()}))

    def get(self, stream=None, order="C", out=None, blocking=True):
        stream = stream or device_streams.get_current_stream()
        memory_of(self._array).read(stream)
        if blocking:
            assert out is None
            waited("get")
            stream.reach()
            return self._array.copy()
        assert type(out) is np.ndarray and self._array.flags.c_contiguous and out.flags.c_contiguous
        assert (out.dtype, out.shape) == (self._array.dtype, self._array.shape)
        device_streams.Copy(self._array, out, out, stream)
        return out

    def set(self, given, stream=None):
        assert type(given) is np.ndarray and self._array.flags.c_contiguous and given.flags.c_contiguous
        assert (given.dtype, given.shape) == (self._array.dtype, self._array.shape)
        stream = stream or device_streams.get_current_stream()
        memory_of(self._array).write(stream)
        device_streams.Copy(given, self._array, given, stream)

    def tolist(self):
        waited("tolist")
        return plain(self).tolist()

    def item(self):
        waited("item")
        return plain(self).item()

    def fill(self, value):
        written(self).fill(value)

    def __len__(self):
        return len(self._array)

    def __getitem__(self, key):
        if isinstance(key, ndarray) and key.dtype == np.bool_:
            waited("mask")
        found = np.asarray(self._array[plain(key)])
        if found.base is None:  # no view
            plain(self)
        return ndarray(found)

    def __setitem__(self, key, value):
        if isinstance(key, ndarray) and key.dtype == np.bool_ and isinstance(value, ndarray):
            waited("mask")
        written(self)[plain(key)] = plain(value)

    def __bool__(self):
        waited("bool")
        return bool(plain(self))

    def __int__(self):
        waited("int")
        return int(plain(self))

    def __float__(self):
        waited("float")
        return float(plain(self))

    def __index__(self):
        waited("index")
        return operator.index(plain(self))

    def __repr__(self):
        return f"device {self._array!r}"

    __hash__ = None


def _operate(name):
    def method(self, *others):
        changes = name.startswith("__i") and name != "__invert__"
        result = getattr((written if changes else plain)(self), name)(*plain(others))
        if changes:
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


cuda = device_streams


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
        if out is not None:
            written(out)
        if name == "copyto":
            written(args[0])
        result = function(*plain(args), **{option: plain(value) for option, value in options.items()})
        if out is not None:
            return out
        return ndarray(np.asarray(result)) if isinstance(result, int | float | bool) else wrapped(result)

    return on_device
