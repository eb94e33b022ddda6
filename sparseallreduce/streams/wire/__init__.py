"""Encode streams to bytes, and decode them (thesis section 4.1.1)."""

from sparseallreduce.streams.wire.codecs import (
    BITMAP,
    GAPS,
    INDEX_CODECS,
    INDEX_NAMES,
    PLAIN,
    VALUE_NAMES,
    Encoding,
    IndexCodec,
    estimated_bytes,
)
from sparseallreduce.streams.wire.frames import Assembly, Growing, packets, piece_bytes, read_headers
from sparseallreduce.streams.wire.header import HEADER_BYTES, VERSION, Bytes, Header, read_header
from sparseallreduce.streams.wire.message import decode, enclose, encode, join, message_bytes, part_lengths
from sparseallreduce.streams.wire.values import CodedStream, decoded

__all__ = [
    "BITMAP",
    "GAPS",
    "HEADER_BYTES",
    "INDEX_CODECS",
    "INDEX_NAMES",
    "PLAIN",
    "VALUE_NAMES",
    "VERSION",
    "Assembly",
    "Bytes",
    "CodedStream",
    "Encoding",
    "Growing",
    "Header",
    "IndexCodec",
    "decode",
    "decoded",
    "enclose",
    "encode",
    "estimated_bytes",
    "join",
    "message_bytes",
    "packets",
    "part_lengths",
    "piece_bytes",
    "read_header",
    "read_headers",
]
