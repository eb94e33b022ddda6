"""Options of readers of samples, and errors that name an option."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TypedDict, TypeVar

from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.encoding import Encoding

__all__ = [
    "AUTO",
    "BASES",
    "DEFAULT_BITS",
    "FORMATS",
    "HEADERS",
    "MOST_CATEGORIES",
    "TABLES",
    "Reading",
    "TableOptions",
    "TableReading",
    "bits_of",
    "naming_option",
    "table_reading",
    "what_is_read",
]

E = TypeVar("E", bound=DatasetError)

AUTO = "auto"
#: Values of the option that says whether indices of svmlight text count from 0.
BASES = (AUTO, "yes", "no")
#: Formats of samples, and their file name suffixes. The first bytes identify the binary format; svmlight is the default.
FORMATS: dict[str, tuple[str, ...]] = {
    "svmlight": (".svm", ".svmlight", ".libsvm"),
    "binary": (".csr",),
    "npz": (".npz",),
    "parquet": (".parquet", ".pq"),
    "vw": (".vw",),
    "text": (".tsv",),
    "csv": (".csv",),
    "tsv": (".tsv", ".tab"),  # .tsv only if a column is named
    "arrow": (".arrow", ".feather", ".ipc"),
}
#: Formats of tables; Parquet only without columns of lists.
TABLES = ("csv", "tsv", "parquet", "arrow")
#: Values of the option that says whether the first line of CSV has the names of the columns.
HEADERS = (AUTO, "yes", "no")
MOST_CATEGORIES = 1 << 16
DEFAULT_BITS = 18  # Vowpal Wabbit's default
_MOST_BITS = 30


def naming_option(template: str, argument: str, option: str, kind: type[E] = DatasetError) -> E:  # type: ignore[assignment]
    """Return an error that names an option: an argument in Python, an option at the command line.

    Parameters
    ----------
    template : str
        Text, with ``{option}`` instead of the option.
    argument, option : str
    kind : type
        Class of the error.

    Examples
    --------
    >>> error = naming_option("give {option}", "zero_based=True", "--zero-based")
    >>> str(error), error.at_command_line
    ('give zero_based=True', 'give --zero-based')
    """
    error = kind(template.replace("{option}", argument))
    error.at_command_line = template.replace("{option}", option)
    return error


def what_is_read() -> str:
    """Return the supported formats and their suffixes, for an error message."""
    listed = (f"{format} ({', '.join(endings)})" for format, endings in FORMATS.items())
    return f"supported formats are {', '.join(listed)}"


class TableOptions(TypedDict, total=False):
    """The columns of a table, as keyword arguments: the fields of :class:`TableReading`."""

    target: str | None
    features: Sequence[str] | None
    drop: Sequence[str]
    categorical: Sequence[str]
    header: str
    max_categories: int
    encoding: Encoding | None


@dataclass(frozen=True)
class TableReading:
    """The roles of the columns of a table.

    Raises
    ------
    DatasetError
        If an option is invalid.
    """

    target: str | None = None  # the column of labels
    features: tuple[str, ...] | None = None  # the columns that become features; all others by default
    drop: tuple[str, ...] = ()  # columns that do not become features
    categorical: tuple[str, ...] = ()  # columns to treat as categories although they look like numbers or dates
    header: str = AUTO  # one of HEADERS; without a header columns are called "1", "2", ...
    max_categories: int = MOST_CATEGORIES  # columns with more categories are hashed
    encoding: Encoding | None = None  # encoding of a training set, to use for the columns

    def __post_init__(self) -> None:
        for name in ("features", "drop", "categorical"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise DatasetError(f"{name} must be a list of columns, not the word {value!r}")
            if value is not None:
                object.__setattr__(self, name, tuple(value))
        if self.header not in HEADERS:
            raise DatasetError(f"header must be one of {', '.join(HEADERS)}, not {self.header!r}")
        if self.max_categories < 0:
            raise DatasetError(f"max_categories must be at least 0, not {self.max_categories}")

    @property
    def names_columns(self) -> bool:
        """True if a column is named, so that the format must be a table."""
        return bool(self.target is not None or self.features or self.drop or self.categorical or self.encoding)


def table_reading(function: str, columns: TableOptions) -> TableReading:
    """Return the roles of columns, from the keyword arguments of a function.

    Raises
    ------
    TypeError
        If a keyword is unknown.
    DatasetError
        If an option is invalid.
    """
    known = TableOptions.__annotations__
    for name in columns:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")
    return TableReading(**columns)  # type: ignore[arg-type]  # lists become tuples there


@dataclass(frozen=True)
class Reading:
    """Options for reading a file of samples.

    Raises
    ------
    DatasetError
        If an option is invalid.
    """

    format: str | None = None  # a key of FORMATS; by default determined by the name and the first bytes
    zero_based: str | bool = "no"  # whether indices of svmlight text count from 0; True for "yes"; "auto": if there is an index 0
    hash_bits: int | None = None  # for formats with hashed features: N is 2**hash_bits
    unlabelled: bool = False  # whether samples may lack labels, which are then NaN
    table: TableReading = field(default_factory=TableReading)  # for tables: the roles of columns

    def __post_init__(self) -> None:
        if isinstance(self.zero_based, bool):
            object.__setattr__(self, "zero_based", "yes" if self.zero_based else "no")
        if self.format is not None and self.format not in FORMATS:
            raise DatasetError(f"there is no format {self.format!r}: choose one of {', '.join(FORMATS)}")
        if self.zero_based not in BASES:
            raise DatasetError(f"zero_based must be one of {', '.join(BASES)}, not {self.zero_based!r}")
        if self.hash_bits is not None and not 1 <= self.hash_bits <= _MOST_BITS:
            raise DatasetError(f"features are hashed to 1 to {_MOST_BITS} bits, not to {self.hash_bits}")

    def bits(self, source: object, n_features: int | None) -> int:
        """Return the number of bits to which the features of a file are hashed, given the required number of features, if any.

        Raises
        ------
        DatasetError
            If the two do not match.
        """
        bits = self.hash_bits or (n_features and bits_of(n_features)) or DEFAULT_BITS
        if n_features is not None and n_features != 1 << bits:
            remedy = "give a power of two" if self.hash_bits is None else "leave one of the two out"
            raise DatasetError(f"{source}: features hashed to {bits} bits are {1 << bits}, not {n_features}: {remedy}")
        return bits


def bits_of(features: int) -> int | None:
    """Return the number of bits to which this many features have been hashed, or None if it is not a power of two.

    >>> bits_of(262144), bits_of(1000)
    (18, None)
    """
    bits = features.bit_length() - 1
    return bits if 1 <= bits <= _MOST_BITS and features == 1 << bits else None
