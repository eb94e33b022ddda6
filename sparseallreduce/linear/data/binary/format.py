"""The header of the binary CSR format, as defined in ``data/FORMAT.md``."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.files import PathLike

__all__ = ["BLOCK", "HEADER_BYTES", "MAGIC", "SECTIONS", "Header", "Section"]

Array = NDArray[Any]

# Its first byte is not text, and its line ends reveal a transfer that has changed them.
MAGIC = b"\x89SAR\r\n\x1a\n"
VERSION = 1
HEADER_BYTES = 192
BLOCK = 1 << 20  # bytes per checksum in written files
SECTIONS = ("indptr", "indices", "values", "labels")

_ALIGNMENT = 64
_LARGEST_BLOCK = 1 << 30
_ORDER = 0x01020304
_SWAPPED_ORDER = 0x04030201
_LAYOUT = struct.Struct("<8sIIQQQQBBBBI10QI")
_CHECKSUM = struct.Struct("<I")

_INDEX_TYPES: dict[int, np.dtype[Any]] = {4: np.dtype("<u4"), 8: np.dtype("<u8")}
_VALUE_TYPES: dict[int, np.dtype[Any]] = {0: np.dtype("<f4"), 4: np.dtype("<f4"), 8: np.dtype("<f8")}  # 0: all ones, not stored
_LABEL_TYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<i1"), 8: np.dtype("<f8")}


class Section(NamedTuple):
    """The position of one of the arrays in the file."""

    offset: int
    length: int


@dataclass(frozen=True)
class Header:
    """The contents of the first 192 bytes."""

    samples: int
    features: int
    nonzeros: int
    index_width: int  # bytes
    value_width: int  # bytes; 0 if all values are 1 and not stored
    label_width: int  # bytes: 1 for int8, 8 for float64
    file_bytes: int
    block: int  # bytes per checksum
    sections: dict[str, Section]
    checksums: Section
    checksums_crc: int

    @classmethod
    def planned(cls, samples: int, features: int, nonzeros: int, widths: tuple[int, int, int]) -> Header:
        """Return the header of a file to be written, without the checksum of its checksums."""
        index, value, label = widths
        lengths = cls._lengths(samples, nonzeros, index, value, label)
        blocks = sum(-(-length // BLOCK) for length in lengths)
        end, placed = HEADER_BYTES, []
        for length in (*lengths, 4 * blocks):
            offset = -(-end // _ALIGNMENT) * _ALIGNMENT
            placed.append(Section(offset, length))
            end = offset + length
        return cls(samples, features, nonzeros, index, value, label, end, BLOCK, dict(zip(SECTIONS, placed)), placed[-1], 0)

    def dtype(self, section: str) -> np.dtype[Any]:
        """Return the data type of a section's items in the file."""
        if section == "indptr":
            return np.dtype("<i8")
        if section == "indices":
            return _INDEX_TYPES[self.index_width]
        if section == "values":
            return _VALUE_TYPES[self.value_width]
        return _LABEL_TYPES[self.label_width]

    def first_block(self, section: str) -> int:
        """Return the number of a section's first block among those of all sections."""
        before = SECTIONS[: SECTIONS.index(section)]
        return sum(-(-self.sections[name].length // self.block) for name in before)

    @property
    def blocks(self) -> int:
        """The number of blocks in all sections."""
        return sum(-(-section.length // self.block) for section in self.sections.values())

    def to_bytes(self) -> bytes:
        """Return the header as bytes."""
        places = [number for section in (*self.sections.values(), self.checksums) for number in section]
        packed = _LAYOUT.pack(
            *(MAGIC, VERSION, _ORDER, self.samples, self.features, self.nonzeros, self.file_bytes),
            *(self.index_width, self.value_width, self.label_width, 0, self.block, *places, self.checksums_crc),
        ).ljust(HEADER_BYTES - _CHECKSUM.size, b"\0")
        return packed + _CHECKSUM.pack(zlib.crc32(packed))

    @classmethod
    def from_bytes(cls, raw: bytes, file_bytes: int, path: PathLike) -> Header:
        """Return the header in these bytes, of a file of ``file_bytes`` bytes.

        Raises
        ------
        DatasetError
            With the offset of the fault.
        """
        try:
            _identify(raw)
            _, _, _, samples, features, nonzeros, length, index, value, label, _, block, *places, crc = _LAYOUT.unpack_from(raw)
            *sections, table = (Section(*pair) for pair in zip(places[::2], places[1::2]))
            named = dict(zip(SECTIONS, sections))
            header = cls(samples, features, nonzeros, index, value, label, length, block, named, table, crc)
            header._check_counts(file_bytes)
            header._check_sections()
        except _Fault as fault:
            offset, reason = fault.args
            raise DatasetError(f"{path}, offset {offset}: {reason}") from None
        return header

    def _check_counts(self, file_bytes: int) -> None:
        if self.file_bytes != file_bytes:
            what = "truncated" if file_bytes < self.file_bytes else "longer than it was written"
            raise _Fault(40, f"the file should have {self.file_bytes} bytes, but has {file_bytes}: it is {what}")
        for offset, what, width, known in (
            (48, "index", self.index_width, _INDEX_TYPES),
            (49, "value", self.value_width, _VALUE_TYPES),
            (50, "label", self.label_width, _LABEL_TYPES),
        ):
            if width not in known:
                raise _Fault(offset, f"the {what} width is {width}, but must be one of {', '.join(map(str, known))}")
        if self.samples < 1:
            raise _Fault(16, "no samples in it")
        if not 1 <= self.features <= (2**32 if self.index_width == 4 else 2**63):
            raise _Fault(24, f"{self.features} features do not match indices of {self.index_width} bytes")
        if self.block < _ALIGNMENT or self.block % _ALIGNMENT or self.block > _LARGEST_BLOCK:
            raise _Fault(52, f"blocks of {self.block} bytes are not a multiple of {_ALIGNMENT} up to {_LARGEST_BLOCK}")

    def _check_sections(self) -> None:
        needed = (*self._lengths(self.samples, self.nonzeros, self.index_width, self.value_width, self.label_width), 4 * self.blocks)
        end = HEADER_BYTES
        for number, (name, section) in enumerate([*self.sections.items(), ("checksums", self.checksums)]):
            if section.length != needed[number]:
                raise _Fault(64 + 16 * number, f"the section {name} has {section.length} bytes, but the counts make {needed[number]}")
            if section.offset % _ALIGNMENT or section.offset < end or section.offset + section.length > self.file_bytes:
                raise _Fault(56 + 16 * number, f"the section {name} cannot start at {section.offset}")
            end = section.offset + section.length

    @staticmethod
    def _lengths(samples: int, nonzeros: int, index: int, value: int, label: int) -> tuple[int, int, int, int]:
        return (samples + 1) * 8, nonzeros * index, nonzeros * value, samples * label


class _Fault(Exception):
    """Raised with the offset of a fault and its description."""


def _identify(raw: bytes) -> None:
    """Raise an error unless this is a complete header of our version."""
    if raw[:4] != MAGIC[:4]:
        raise _Fault(0, f"the file starts with {raw[:8]!r}: it is not a binary data set")
    if raw[: len(MAGIC)] != MAGIC[: len(raw)]:
        raise _Fault(4, "the line ends in the magic number are not as written: the file was transferred as text")
    if len(raw) < HEADER_BYTES:
        raise _Fault(len(raw), f"the file ends within its header of {HEADER_BYTES} bytes: it is truncated")
    _, version, order = _LAYOUT.unpack_from(raw)[:3]
    if order == _SWAPPED_ORDER:
        raise _Fault(12, "the file is in big-endian byte order: write it in little-endian")
    if order != _ORDER:
        raise _Fault(12, "the byte order mark is altered")
    if version != VERSION:
        raise _Fault(8, f"the file has version {version}, but this release reads version {VERSION}: install a newer one")
    if _CHECKSUM.unpack(raw[-_CHECKSUM.size :])[0] != zlib.crc32(raw[: -_CHECKSUM.size]):
        raise _Fault(HEADER_BYTES - _CHECKSUM.size, "the header does not match its checksum: it is altered")
