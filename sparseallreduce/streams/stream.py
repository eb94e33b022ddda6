"""The sparse stream: a vector stored as index-value pairs or as a dense array, whichever is smaller (thesis sections 4.1.1, 4.1.2).

A stream covers an index range ``[lo, hi)`` of a vector of dimension ``size``; streams of users cover all of it. The parts that the split
algorithms send are streams on smaller ranges. They keep the indices of the whole vector, so that cutting and joining does not change them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from sparseallreduce.errors import StreamError, StreamTypeError
from sparseallreduce.streams import kernels
from sparseallreduce.streams.dtypes import BFLOAT16, DTYPES, HALVES, NAMES, as_dtype, is_float
from sparseallreduce.streams.kernels.backend import array_module, device_kernels, device_module, mark_read_only, may_be_written, on_device
from sparseallreduce.streams.operator import SUM

__all__ = ["DTYPES", "SparseStream", "index_dtype", "refuse_masked", "switch_point"]

_UINT32, _UINT64 = np.dtype(np.uint32), np.dtype(np.uint64)

Array = NDArray[Any]
Casting = Literal["no", "equiv", "safe", "same_kind", "unsafe"]


def index_dtype(size: int) -> np.dtype[Any]:
    """Return the dtype of an index into a vector of dimension ``size``: uint32 if ``size <= 2**32``, otherwise uint64.

    Examples
    --------
    >>> index_dtype(2**32), index_dtype(2**32 + 1)
    (dtype('uint32'), dtype('uint64'))
    """
    return _UINT32 if size <= 2**32 else _UINT64


@lru_cache(maxsize=4096)
def switch_point(extent: int, dtype: DTypeLike, size: int, width: int | None = None, density: float | None = None) -> int:
    """Return the largest number of entries of a sparse form over ``extent`` positions: phi(N) of thesis section 4.1.2.

    Parameters
    ----------
    extent : int
        Positions covered (N, or about N/P for a part).
    dtype : dtype
        Dtype of the values; its size in bytes is the paper's isize.
    size : int
        Dimension of the whole vector, which determines the size of an index (the paper's c).
    width : int, optional
        Values in a row of a row-sparse stream.
    density : float, optional
        A lower switch point, as a fraction of ``extent``. It can be faster, since adding sparse entries costs more than adding as many
        dense ones (thesis section 5.2.5, where the two break even at 6.25 %).

    Returns
    -------
    int
        floor(extent * isize / (c + isize)), or floor(extent * density) if that is less.

    Examples
    --------
    >>> switch_point(100, "float32", 100), switch_point(100, "float64", 100), switch_point(100, "float32", 100, density=0.0625)
    (50, 66, 6)
    """
    isize = np.dtype(dtype).itemsize * (1 if width is None else width)
    limit = extent * isize // (index_dtype(size).itemsize + isize)
    return limit if density is None else min(limit, int(extent * density))


class SparseStream:
    """A vector of dimension ``size`` with few entries present.

    Parameters
    ----------
    indices : array_like of int, shape (nnz,)
        Positions of the entries: strictly increasing, from 0 to ``size`` - 1.
    values : array_like, shape (nnz,) or (nnz, width)
        Entries of dtype float32, float64, float16, int32, int64, complex64, complex128, or ml_dtypes' bfloat16. With a second axis the
        stream is row-sparse, like the gradient of an embedding table. Zeros, infinities and NaN are entries like any other.
    size : int
        Dimension N of the vector (number of rows, if row-sparse).
    switch_density : float, optional
        Density above which the stream is stored dense, by default and at most where the dense form is smaller.

    Raises
    ------
    StreamError
        If indices are out of order, repeated or out of range, or the lengths differ.
    StreamTypeError
        If indices are not integers or the dtype of the values is not supported.

    Notes
    -----
    Arrays of the right dtype are not copied. A stream never modifies them; do not modify them while the stream is in use, or results are
    undefined (but nothing is written outside of the arrays). Use :meth:`copy` to get a writeable stream. Above ``switch_point(size,
    dtype)`` entries the stream switches to the dense form, so that it never takes more memory than that. ``indices``, ``values`` and
    ``nnz`` describe the same entries in either form.

    Examples
    --------
    >>> s = SparseStream([1, 4], [10.0, 40.0], 8)
    >>> s
    SparseStream(size=8, nnz=2, dtype=float64, sparse)
    >>> (s + SparseStream([4, 7], [0.5, 0.7], 8)).to_dense()
    array([ 0. , 10. ,  0. ,  0. , 40.5,  0. ,  0. ,  0.7])

    A stream times a number keeps its positions and dtype:

    >>> (-s / 4).values, (0 * s).nnz
    (array([ -2.5, -10. ]), 2)
    """

    hi: int
    lo: int
    size: int

    __array_ufunc__ = None  # makes NumPy arrays on the left of an operator defer to the stream

    __slots__ = ("_array", "_indices", "_owned", "_present", "_values", "hi", "lo", "size", "switch_density")

    # Exactly one of the two forms is set: _indices and _values, or _array with _values and _indices None. In the dense form _present marks
    # the positions that hold an entry; None stands for the non-zero ones.
    _indices: Array | None
    _values: Array | None
    _array: Array | None
    _present: NDArray[np.bool_] | None
    # Whether the holder may write to the arrays because no one else uses them: a reduction that created a dense array, or a user that made
    # a
    # copy. The arrays of all other streams are borrowed or frozen. The arrays' own flags are not used, since only NumPy's have them.
    _owned: bool

    def __init__(self, indices: ArrayLike, values: ArrayLike, size: int, *, switch_density: float | None = None) -> None:
        size = _checked_size(size)
        density = _checked_density(switch_density)
        value_array = _checked_values(values)
        index_array = _checked_indices(indices, size, value_array.shape[0])
        if type(value_array) is not np.ndarray or type(index_array) is not np.ndarray:
            _module_of_both(index_array, value_array)
        self._fill_sparse(index_array, value_array, size, 0, size, density)
        self._switch()

    @classmethod
    def from_dense(cls, array: ArrayLike, *, switch_density: float | None = None) -> SparseStream:
        """Return the stream of the non-zero entries of an array.

        Parameters
        ----------
        array : array_like, shape (size,) or (size, width)
            A row of a two-dimensional array is an entry if any of its values is non-zero.
        switch_density : float, optional
            As for :class:`SparseStream`.

        Examples
        --------
        >>> SparseStream.from_dense([0.0, 0.0, 3.0, 0.0]).indices
        array([2], dtype=uint32)
        """
        dense = _checked_values(array)
        size = dense.shape[0]
        density = _checked_density(switch_density)
        stream = cls._dense_form(dense, size, density=density)
        if stream.nnz <= stream.switch_point:
            stream._fill_sparse(*stream._entries(), size, 0, size, density)
        return stream

    @classmethod
    def from_scipy(cls, row: Any, *, switch_density: float | None = None) -> SparseStream:
        """Return the stream of a ``scipy.sparse`` matrix or array with one row, one column, or one dimension.

        Duplicate entries are added; stored zeros are kept.

        Raises
        ------
        StreamError
            If it has more than one row and more than one column.
        """
        if not hasattr(row, "tocoo"):
            raise StreamTypeError(f"from_scipy takes a scipy.sparse matrix or array, not {type(row).__name__}: use from_dense or from_coo")
        coo = row.tocoo()
        if coo.ndim > 2 or (coo.ndim == 2 and 1 not in coo.shape):
            raise StreamError(f"from_scipy takes a single row or column, not shape {coo.shape}: take one, as in matrix[i:i+1]")
        if coo.ndim == 1:
            return cls.from_coo(coo.coords[0], coo.data, coo.shape[0], switch_density=switch_density)
        along = 1 if coo.shape[0] == 1 else 0
        return cls.from_coo(coo.col if along else coo.row, coo.data, coo.shape[along], switch_density=switch_density)

    @classmethod
    def from_coo(cls, indices: ArrayLike, values: ArrayLike, size: int, *, switch_density: float | None = None) -> SparseStream:
        """Return the stream of index-value pairs in any order; the values of duplicate indices are added in the order given.

        Examples
        --------
        >>> SparseStream.from_coo([4, 1, 4], [1.0, 2.0, 3.0], 8).values
        array([2., 4.])
        """
        size = _checked_size(size)
        value_array = _checked_values(values)
        index_array = _integers(indices, value_array.shape[0])
        _check_range(index_array, size)
        xp = _module_of_both(index_array, value_array)
        index_array = xp.ascontiguousarray(index_array, dtype=index_dtype(size))
        order = xp.argsort(index_array, kind="stable")
        summed = kernels.sum_duplicates(index_array[order], xp.ascontiguousarray(value_array[order]))
        return cls(*summed, size, switch_density=switch_density)

    @classmethod
    def _sparse_form(
        cls, indices: Array, values: Array, size: int, lo: int = 0, hi: int | None = None, density: float | None = None
    ) -> SparseStream:
        """Return a sparse stream on ``[lo, hi)`` without checking the arrays."""
        stream = cls.__new__(cls)
        stream._fill_sparse(indices, values, size, lo, size if hi is None else hi, density)
        return stream

    @classmethod
    def _dense_form(
        cls,
        array: Array,
        size: int,
        lo: int = 0,
        hi: int | None = None,
        present: NDArray[np.bool_] | None = None,
        density: float | None = None,
        owned: bool = False,
    ) -> SparseStream:
        """Return a dense stream on ``[lo, hi)`` without checking the array, which nobody else uses if ``owned``."""
        stream = cls.__new__(cls)
        stream._indices = stream._values = None
        stream._array = array
        stream._present = present
        stream._owned = owned
        stream.size, stream.lo, stream.hi = size, lo, size if hi is None else hi
        stream.switch_density = density
        return stream

    def _fill_sparse(self, indices: Array, values: Array, size: int, lo: int, hi: int, density: float | None) -> None:
        self._indices, self._values = indices, values
        self._array = self._present = None
        self._owned = False
        self.size, self.lo, self.hi = size, lo, hi
        self.switch_density: float | None = density

    def _switch(self) -> None:
        """Switch to the dense form if there are more entries than the switch point allows."""
        if self._indices is None or self._values is None or len(self._indices) <= self.switch_point:
            return
        xp = array_module(self._values)
        array = xp.zeros((self.extent, *self._values.shape[1:]), self._values.dtype)
        kernels.scatter_set(self._indices, self._values, self.lo, array)
        with np.errstate(invalid="ignore"):  # of signalling NaNs, which are not zero
            zero = ~xp.any(self._values.reshape(len(self._values), -1), axis=1)
        if zero.any():  # a mask distinguishes entries that are zero from absent ones
            self._present = xp.zeros(self.extent, np.bool_)
            self._present[kernels.places(self._indices, self.lo, self.extent)] = True
        self._array = array
        self._indices = self._values = None

    @property
    def _stored(self) -> Array:
        """The array that holds the values, in either form."""
        return self._values if self._array is None else self._array  # type: ignore[return-value]  # one of them is an array

    @property
    def is_dense(self) -> bool:
        """True if the stream is stored as an array of all its values."""
        return self._array is not None

    @property
    def on_device(self) -> bool:
        """True if the arrays are in GPU memory."""
        stored = self._values if self._array is None else self._array
        return stored.__class__ is not np.ndarray and on_device(stored)

    @property
    def extent(self) -> int:
        """The positions covered: ``hi - lo``, which is ``size`` for a whole vector."""
        return self.hi - self.lo

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        return self._stored.dtype

    @property
    def width(self) -> int | None:
        """The values in a row of a row-sparse stream, None for a plain vector."""
        stored = self._stored
        return None if stored.ndim == 1 else int(stored.shape[1])

    @property
    def stored(self) -> int:
        """The number of entries in memory (nofitems in the thesis): ``nnz`` in the sparse form, ``extent`` in the dense form."""
        return len(self._stored)

    @property
    def nbytes(self) -> int:
        """The size of the arrays in bytes."""
        return sum(array.nbytes for array in self._arrays if array is not None)

    @property
    def _arrays(self) -> tuple[Array | None, ...]:
        return self._indices, self._values, self._array, self._present

    @property
    def switch_point(self) -> int:
        """The number of entries above which this stream is stored dense."""
        return switch_point(self.extent, self.dtype, self.size, self.width, self.switch_density)

    @property
    def nnz(self) -> int:
        """The number of entries; counted in one pass if the stream is dense."""
        if self._indices is not None:
            return len(self._indices)
        if self._present is not None:
            return int(array_module(self._present).count_nonzero(self._present))
        array = self._stored
        return int(array_module(array).count_nonzero(array if array.ndim == 1 else array.any(axis=1)))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of :meth:`to_dense`: (size,), or (size, width) if row-sparse."""
        return (self.size, *self._stored.shape[1:])

    @property
    def ndim(self) -> int:
        """The number of dimensions: 1, or 2 if row-sparse."""
        return self._stored.ndim

    @property
    def T(self) -> SparseStream:
        """The stream itself, like the transpose of a vector in NumPy. A row-sparse stream has no transpose."""
        if self.width is not None:
            raise AttributeError("a row-sparse stream has no transpose: take to_scipy().T or to_dense().T")
        return self

    @property
    def density(self) -> float:
        """The fraction of positions with an entry, ``nnz / size``; 0 if the size is 0."""
        return self.nnz / self.size if self.size else 0.0

    @property
    def indices(self) -> Array:
        """The positions of the entries, increasing, shape (nnz,); read-only, computed in one pass if dense."""
        return _read_only(self._entries()[0])

    @property
    def values(self) -> Array:
        """The values of the entries, shape (nnz,) or (nnz, width); computed in one pass if dense.

        They are read-only, except for a sparse :meth:`copy`. Assigning to ``values`` works for a copy in either form, as in ``c.values =
        c.values / 2``; entries that become zero stay entries.

        Raises
        ------
        StreamError
            On assignment to a stream that is not a copy, or of values with another shape or dtype.
        """
        values = self._entries()[1]
        return values.view() if self._owned and not self.is_dense else _read_only(values)

    @values.setter
    def values(self, values: ArrayLike) -> None:
        if not self._owned:
            raise StreamError("the values of this stream are read-only: write to those of its copy()")
        refuse_masked(values)
        xp = array_module(self._stored)
        try:
            given: Any = values if xp is np else xp.asarray(values)
            if self._array is None:
                xp.copyto(self._stored, given)
                return
            present = self._mask()
            written = xp.empty((self.nnz, *self._array.shape[1:]), self.dtype)
            xp.copyto(written, given)
        except (TypeError, ValueError) as error:
            raise StreamError(f"the {self.nnz} values of {self.dtype} cannot become these: {error}") from None
        self._array[present] = written
        self._present = present

    def _mask(self) -> NDArray[np.bool_]:
        """Return a mask of the positions of the dense form that hold an entry."""
        if self._present is not None:
            return self._present
        array = self._stored
        return array_module(array).asarray(array != 0 if array.ndim == 1 else array.any(axis=1))  # type: ignore[no-any-return]

    def _entries(self) -> tuple[Array, Array]:
        if self._indices is not None and self._values is not None:
            return self._indices, self._values
        if self._present is None:
            return kernels.gather_present(self._stored, self.lo, index_dtype(self.size))
        where = array_module(self._present).flatnonzero(self._present)
        return (where + self.lo).astype(index_dtype(self.size)), self._stored[where]

    def to_dense(self) -> Array:
        """Return a new array of all values, of shape (size,) or (size, width), with zeros at absent positions.

        Examples
        --------
        >>> SparseStream([2], [7], 4).to_dense()
        array([0, 0, 7, 0])
        """
        stored = self._stored
        if self.is_dense and self.extent == self.size:
            return stored.copy()
        array: Array = array_module(stored).zeros((self.size, *stored.shape[1:]), stored.dtype)
        if self.is_dense:
            array[self.lo : self.hi] = stored
        else:
            assert self._indices is not None
            kernels.scatter_set(self._indices, stored, 0, array)
        return array

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        """Return all values as a new NumPy array, for ``np.asarray``: :meth:`to_dense`, cast to ``dtype`` if given.

        Raises
        ------
        StreamTypeError
            If the stream is on a GPU. ValueError If ``copy`` is False and the stream is not stored as an array of this dtype. Otherwise
            ``copy=False`` returns a read-only view.
        """
        if self.on_device:
            raise StreamTypeError("this stream lies on a GPU: take to_host() first, or to_dense() there")
        if copy is False:
            if not self.is_dense or self.extent != self.size or (dtype is not None and np.dtype(dtype) != self.dtype):
                raise ValueError(f"{self!r} cannot become an array without a copy: leave copy=False out")
            return _read_only(self._stored)
        return self.to_dense().astype(self.dtype if dtype is None else dtype, copy=False)

    def __iter__(self) -> NoReturn:
        raise TypeError("a SparseStream is not iterated over: take zip(stream.indices, stream.values), or stream.to_dense()")

    def __eq__(self, other: object) -> bool:
        """Return True if two streams have the same shape, positions and values; NaN is not equal to itself."""
        if not isinstance(other, SparseStream):
            return NotImplemented
        if (self.shape, self.lo, self.hi) != (other.shape, other.lo, other.hi) or self.on_device != other.on_device:
            return False
        (indices, values), (their_indices, their_values) = self._entries(), other._entries()
        same: bool = len(indices) == len(their_indices) and bool((indices == their_indices).all()) and bool((values == their_values).all())
        return same

    def __hash__(self) -> int:
        return hash((self.size, self.lo, self.hi))

    def to_scipy(self) -> Any:
        """Return a copy as a ``scipy.sparse.csr_array``; entries that are zero are stored, too.

        Returns
        -------
        csr_array, shape (1, size) or (size, width)
            One row, from which :meth:`from_scipy` restores the stream. A row-sparse stream becomes a matrix with all values of its entries
            stored, and takes 4 or 8 bytes more for each of its ``size`` rows.

        Raises
        ------
        StreamTypeError
            If the dtype is float16 or bfloat16, which SciPy's sparse arrays do not support.

        Examples
        --------
        >>> SparseStream([2], [7], 4).to_scipy().toarray()
        array([[0, 0, 7, 0]])
        """
        if self.dtype in HALVES:
            raise StreamTypeError(f"scipy has no sparse arrays of {self.dtype}: take those of astype('float32')")
        from scipy.sparse import csr_array  # imported here because it is slow

        indices, values = self.to_host()._entries()
        width = self.width or 1
        largest = max(self.size, values.size)
        numbers = np.int32 if largest <= np.iinfo(np.int32).max else np.int64
        if self.width is None:
            bounds, columns, shape = np.array([0, len(indices)], numbers), indices.astype(numbers), (1, self.size)
        else:
            bounds, shape = np.zeros(self.size + 1, numbers), (self.size, width)
            bounds[indices.astype(np.intp) + 1] = width
            np.cumsum(bounds, out=bounds)
            columns = np.tile(np.arange(width, dtype=numbers), len(indices))
        return csr_array((np.array(values).reshape(-1), columns, bounds), shape=shape)

    def astype(self, dtype: DTypeLike, *, casting: Casting = "unsafe", copy: bool = True) -> SparseStream:
        """Return the stream with its values converted to another dtype; entries that become zero stay entries.

        Values are cast as by ``ndarray.astype``, with the same warnings: for NaN and values out of range for integers, and for discarded
        imaginary parts. The new stream is sparse or dense according to its own :attr:`switch_point`.

        Parameters
        ----------
        dtype : dtype
            A dtype that streams support.
        casting : {"no", "equiv", "safe", "same_kind", "unsafe"}
            Permitted casts, as in NumPy.
        copy : bool
            If False, a stream that already has the dtype is returned itself.

        Returns
        -------
        SparseStream
            Of the same size and indices.

        Raises
        ------
        StreamTypeError
            If the dtype is not supported, or ``casting`` does not allow the conversion.

        Examples
        --------
        >>> SparseStream([1, 4], [0.5, 2.5], 8).astype("int32")
        SparseStream(size=8, nnz=2, dtype=int32, sparse)
        """
        wanted = as_dtype(dtype)
        if not copy and wanted == self.dtype:
            return self
        try:
            cast = self._converted(lambda values: values.astype(wanted, casting=casting))
        except TypeError as error:
            raise StreamTypeError(f"{error}: casting={casting!r} does not allow it") from None
        cast._switch()
        if cast.is_dense and cast.nnz <= cast.switch_point:
            cast._fill_sparse(*cast._entries(), cast.size, cast.lo, cast.hi, cast.switch_density)
        return cast

    def _converted(self, convert: Callable[[Array], Array]) -> SparseStream:
        """Return a stream with the same positions and form, and with the values that ``convert`` returns."""
        stored = self._stored
        if self._indices is not None:
            values = convert(stored)
            return self._sparse_form(self._indices.copy(), values, self.size, self.lo, self.hi, self.switch_density)
        # Absent positions are left out, since `convert` may turn their zeros into NaN, or warn.
        xp, present = array_module(stored), self._mask()
        everything = bool(present.all())
        values = convert(stored if everything else stored[present])
        array = values
        if not everything:
            array = xp.zeros(stored.shape, values.dtype)
            array[present] = values
        kept = xp.count_nonzero(values if values.ndim == 1 else values.any(axis=1)) == len(values)
        return self._dense_form(array, self.size, self.lo, self.hi, None if kept else present.copy(), self.switch_density)

    def copy(self) -> SparseStream:
        """Return a copy whose :attr:`values` can be modified; its indices cannot.

        Examples
        --------
        >>> stream = SparseStream([1, 4], [10.0, 40.0], 8)
        >>> mine = stream.copy()
        >>> mine.values[0] = 7
        >>> mine.values *= 2
        >>> mine.values, stream.values
        (array([14., 80.]), array([10., 40.]))
        """
        arrays = (None if array is None else array.copy() for array in self._arrays)
        stream = type(self).__new__(type(self))
        stream._indices, stream._values, stream._array, stream._present = arrays
        stream._owned = True
        stream.size, stream.lo, stream.hi, stream.switch_density = self.size, self.lo, self.hi, self.switch_density
        return stream

    __copy__ = copy

    def to_host(self) -> SparseStream:
        """Return the stream on NumPy arrays: a copy if it is on a GPU, otherwise the stream itself."""
        return self._moved(lambda array: array.get()) if self.on_device else self  # type: ignore[attr-defined]

    def to_device(self, xp: Any = None) -> SparseStream:
        """Return the stream on arrays of CuPy, or of a compatible module: a copy if it is on the host, otherwise the stream itself.

        It is copied to the current device. If CuPy has not been imported before, this rank's device becomes the current one
        (:func:`~sparseallreduce.local_device`).

        Raises
        ------
        StreamError
            If there is no GPU, or CuPy is not installed. StreamTypeError If the values are bfloat16, which CuPy does not support.
        """
        if self.on_device:
            return self
        _check_device_dtype(self.dtype)
        moved = self._moved((xp or device_module()).asarray)
        array_module(moved._stored)  # so that operations know the module
        return moved

    def _moved(self, move: Callable[[Array], Array]) -> SparseStream:
        arrays = (None if array is None else move(array) for array in self._arrays)
        stream = SparseStream.__new__(SparseStream)
        stream._indices, stream._values, stream._array, stream._present = arrays
        stream._owned = False
        stream.size, stream.lo, stream.hi, stream.switch_density = self.size, self.lo, self.hi, self.switch_density
        return stream

    def overlaps(self, other: SparseStream) -> bool:
        """Return True if an array of this stream may share memory with one of the other stream."""
        mine, their = self._stored, other._stored
        may_share = np.may_share_memory if mine.__class__ is np.ndarray else array_module(mine).may_share_memory
        return mine.__class__ is their.__class__ and any(
            may_share(ours, theirs)
            for ours in self._arrays
            for theirs in other._arrays
            if ours is not None and theirs is not None and len(ours) and len(theirs)
        )

    def add_to(self, array: Array) -> None:
        """Add the entries to an array in place, like ``array += self.to_dense()``, at a cost proportional to the entries.

        Parameters
        ----------
        array : ndarray, shape (size,) or (size, width)
            Must have the stream's dtype, and be C-contiguous and writeable.

        Raises
        ------
        StreamError
            If its shape or dtype differs, it is read-only, or an index of the stream has been changed to a value out of range; some or all
            other entries have then been added.
        StreamTypeError
            If it is not a NumPy array (for a stream on a GPU, not a CuPy array), or masked.
        """
        refuse_masked(array)
        if self.on_device or on_device(array):
            device_kernels(array, self._stored)  # raises unless both are on the device
        elif not isinstance(array, np.ndarray):
            raise StreamTypeError(f"a stream is added to a NumPy array, not to {type(array).__name__}")
        stored = self._stored
        if array.shape != (self.size, *stored.shape[1:]) or array.dtype != stored.dtype:
            raise StreamError(
                f"cannot add a stream of size {self.size} and dtype {stored.dtype} to an array of shape {array.shape} and dtype "
                f"{array.dtype}: both must agree"
            )
        if not may_be_written(array):
            raise StreamError("cannot add a stream to an array that is read-only: pass a copy")
        if self.is_dense:
            array[self.lo : self.hi] += stored
        elif array.flags.c_contiguous:
            assert self._indices is not None
            kernels.scatter(self._indices, stored, 0, SUM, array)
        else:
            assert self._indices is not None
            array[kernels.places(self._indices, 0, self.size)] += stored

    def __add__(self, other: object) -> SparseStream:
        """Return the sum of two streams of the same size, dtype and width (thesis section 4.1.3)."""
        if not isinstance(other, SparseStream):
            return NotImplemented
        from sparseallreduce.streams.reduction import Reduction  # which is made of streams

        return Reduction(switch_density=self.switch_density).whole(self, other)

    def __mul__(self, number: object) -> SparseStream:
        """Return the stream with each entry multiplied by a number, in the stream's dtype.

        The dtype of a NumPy scalar is ignored, so that it behaves like a Python number in NumPy 2. Integer products that are out of range
        wrap around.

        Raises
        ------
        StreamTypeError
            For a stream of integers and a float, or of real numbers and a complex one, whose products would have another dtype.
        StreamError
            If the number is out of range for the dtype.
        """
        factor = _as_factor(number, self.dtype)
        return NotImplemented if factor is None else self._scaled(np.multiply, factor)

    __rmul__ = __mul__

    def __truediv__(self, number: object) -> SparseStream:
        """Return the stream with each entry divided by a number, in the stream's dtype. Integer streams are not supported."""
        divisor = _as_factor(number, self.dtype)
        if divisor is None:
            return NotImplemented
        if self.dtype.kind == "i":
            raise StreamTypeError(f"quotients of {self.dtype} values are no {self.dtype}: convert them first, as with astype('float64')")
        return self._scaled(np.divide, divisor)

    def __neg__(self) -> SparseStream:
        """Return the stream with the sign of each entry changed."""
        return self._converted(np.negative)

    def _scaled(self, ufunc: np.ufunc, number: Any) -> SparseStream:
        if self.dtype != BFLOAT16:
            return self._converted(lambda values: ufunc(values, number))
        # In float32, since bfloat16 keeps three digits of a number such as 0.1.
        return self._converted(lambda values: ufunc(values.astype(np.float32), number).astype(BFLOAT16))

    def __repr__(self) -> str:
        part = "" if self.extent == self.size else f", range=[{self.lo}, {self.hi})"
        rows = "" if self.width is None else f", width={self.width}"
        form = "dense" if self.is_dense else "sparse"
        return f"SparseStream(size={self.size}{part}, nnz={self.nnz}{rows}, dtype={self.dtype}, {form})"


def _read_only(array: Array) -> Array:
    view = array.view()
    mark_read_only(view)
    return view


def _checked_size(size: int) -> int:
    try:
        size = operator.index(size)
    except TypeError:
        raise StreamTypeError(f"size must be an integer, not {size!r}") from None
    if not 0 <= size < 2**63:
        raise StreamError(f"size must be from 0 to 2**63 - 1, not {size}")
    return size


def _checked_density(density: float | None) -> float | None:
    if density is not None and not 0 <= density <= 1:
        raise StreamError(f"switch_density is a fraction of the size, from 0 to 1, not {density}")
    return None if density is None else float(density)


def _as_factor(number: Any, dtype: np.dtype[Any]) -> Any:
    """Return a number as a NumPy scalar that values of ``dtype`` can be multiplied by; None if it is not a number."""
    if isinstance(number, np.ndarray) and number.ndim == 0:
        number = number[()]
    if isinstance(number, np.generic):
        kind = "f" if is_float(number.dtype) else number.dtype.kind.replace("u", "i").replace("b", "i")
    else:
        kind = next((kind for kind, known in (("i", int), ("f", float), ("c", complex)) if isinstance(number, known)), "")
    if kind not in tuple("ifc"):
        return None
    ours = "f" if is_float(dtype) else dtype.kind
    if "ifc".index(kind) > "ifc".index(ours):
        wider = "complex128" if kind == "c" else "float64"
        raise StreamTypeError(f"values of {dtype} times or by {number!r} are no {dtype}: convert them first, as with astype({wider!r})")
    if ours == "i" and not np.iinfo(dtype).min <= int(number) <= np.iinfo(dtype).max:
        raise StreamError(f"{number} is out of range for values of {dtype}: convert them first, as with astype('float64')")
    try:
        return np.float32(number) if dtype == BFLOAT16 else dtype.type(number)
    except OverflowError:
        raise StreamError(f"an integer of {int(number).bit_length()} bits is out of range for values of {dtype}") from None


def refuse_masked(array: Any) -> None:
    """Raise an error for a masked array, whose masked values would otherwise be used."""
    if isinstance(array, np.ndarray) and type(array) is not np.ndarray and hasattr(array, "mask"):
        raise StreamTypeError("masked arrays are not supported: fill them first, as with array.filled(0)")


def _checked_values(values: ArrayLike) -> Array:
    refuse_masked(values)
    array = _as_array(values)
    if array.dtype.newbyteorder("=") not in DTYPES:
        raise StreamTypeError(f"values of dtype {array.dtype} are not supported: convert them to one of {NAMES}")
    if array.ndim not in (1, 2):
        raise StreamError(f"values must have shape (nnz,) or (nnz, width), not {array.shape}")
    if array.ndim == 2 and array.shape[1] == 0:
        raise StreamError("rows of width 0 hold no value: give at least one column")
    if on_device(array):
        _check_device_dtype(array.dtype)
    return array_module(array).ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))  # type: ignore[no-any-return]


def _as_array(given: Any) -> Any:
    """Return the argument as a NumPy array, or as a CuPy array if it is on a GPU."""
    return array_module(given).asarray(given) if on_device(given) else np.asarray(given)


def _module_of_both(indices: Any, values: Any) -> Any:
    """Return the array module of indices and values; raise an error if they are in different places."""
    device_kernels(indices, values)  # raises unless both are in one place
    return array_module(values)


def _check_device_dtype(dtype: np.dtype[Any]) -> None:
    if dtype == BFLOAT16:
        raise StreamTypeError("CuPy has no arrays of bfloat16: take those of astype('float32')")


def _integers(indices: ArrayLike, count: int) -> Array:
    refuse_masked(indices)
    array = _as_array(indices)
    if array.ndim != 1:
        raise StreamError(f"indices must have one dimension, not shape {array.shape}")
    if array.dtype.kind not in "iu":
        if len(array):
            raise StreamTypeError(f"indices of dtype {array.dtype} are no integers: convert them, for example to np.uint32")
        array = array.astype(np.uint32)  # an empty list has no dtype of its own
    if len(array) != count:
        raise StreamError(f"{len(array)} indices but {count} values: there must be one value, or one row, an index")
    return array  # type: ignore[no-any-return]


def _check_range(indices: Array, size: int) -> None:
    if len(indices) == 0:
        return
    for position in (int(indices.argmin()), int(indices.argmax())):
        if not 0 <= int(indices[position]) < size:
            raise StreamError(f"index {int(indices[position])} at position {position} is out of range for size {size}")


def _checked_indices(indices: ArrayLike, size: int, count: int) -> Array:
    array = _integers(indices, count)
    array = array_module(array).ascontiguousarray(array)
    wanted = index_dtype(size)
    if array.dtype == wanted:
        checked = array
    else:
        # Through 64 bits, where a negative index becomes one far out of range.
        checked = array.astype(np.int64 if array.dtype.kind == "i" else np.uint64, copy=False).view(np.uint64)
    position = kernels.first_violation(checked, size)
    if position >= 0:
        value = int(array[position])
        before = int(array[position - 1]) if position else -1
        if not 0 <= value < size:
            raise StreamError(f"index {value} at position {position} is out of range for size {size}")
        if value == before:
            raise StreamError(f"index {value} occurs twice, at positions {position - 1} and {position}: from_coo adds up duplicates")
        raise StreamError(f"indices must be increasing, but {value} follows {before} at position {position}: from_coo sorts them")
    return checked if checked.dtype == wanted else checked.astype(wanted)  # type: ignore[no-any-return]
