"""What a reader of samples is told beside the name of the file, and errors that name an option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from sparseallreduce.errors import DatasetError

__all__ = ["AUTO", "BASES", "DEFAULT_BITS", "FORMATS", "Reading", "bits_of", "naming_option"]

E = TypeVar("E", bound=DatasetError)

AUTO = "auto"
#: How files may say which feature an index of svmlight text is.
BASES = (AUTO, "yes", "no")
#: Of files with samples, and the endings by which they are known; the first bytes tell the binary format, svmlight is all else.
FORMATS: dict[str, tuple[str, ...]] = {
    "svmlight": (".svm", ".svmlight", ".libsvm"),
    "binary": (".csr",),
    "npz": (".npz",),
    "parquet": (".parquet", ".pq"),
    "vw": (".vw",),
    "text": (".tsv",),
}
DEFAULT_BITS = 18  # that Vowpal Wabbit takes by default
_MOST_BITS = 30


def naming_option(template: str, argument: str, option: str, kind: type[E] = DatasetError) -> E:  # type: ignore[assignment]
    """Return an error that names an option, as an argument in Python, and as an option where a command ends by it.

    Parameters
    ----------
    template : str
        The text, with ``{option}`` where the option is named.
    argument, option : str
    kind : type
        Of the error.

    Examples
    --------
    >>> error = naming_option("give {option}", "zero_based=True", "--zero-based")
    >>> str(error), error.at_command_line
    ('give zero_based=True', 'give --zero-based')
    """
    error = kind(template.replace("{option}", argument))
    error.at_command_line = template.replace("{option}", option)
    return error


@dataclass(frozen=True)
class Reading:
    """How to read a file of samples.

    Raises
    ------
    DatasetError
        If an option is none that there is.
    """

    format: str | None = None  # a key of FORMATS; by default what the name and the first bytes say
    zero_based: str | bool = "no"  # of svmlight text: whether indices count from 0; True for "yes"; "auto": whether there is an index 0
    hash_bits: int | None = None  # of formats whose features are hashed: N is 2 to the power of it
    unlabelled: bool = False  # whether samples may come without labels, which are then NaN

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
        """To how many bits the features of a file are hashed, where there have to be so many features if any number is given.

        Raises
        ------
        DatasetError
            If the two do not go together.
        """
        bits = self.hash_bits or (n_features and bits_of(n_features)) or DEFAULT_BITS
        if n_features is not None and n_features != 1 << bits:
            remedy = "give a power of two" if self.hash_bits is None else "leave one of the two out"
            raise DatasetError(f"{source}: features hashed to {bits} bits are {1 << bits}, not {n_features}: {remedy}")
        return bits


def bits_of(features: int) -> int | None:
    """To how many bits so many features have been hashed; None if their number says that they have not.

    >>> bits_of(262144), bits_of(1000)
    (18, None)
    """
    bits = features.bit_length() - 1
    return bits if 1 <= bits <= _MOST_BITS and features == 1 << bits else None
