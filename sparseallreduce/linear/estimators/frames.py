"""Conversion of frames passed to estimators to samples."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from sklearn.utils import check_array

from sparseallreduce.errors import MismatchError
from sparseallreduce.linear.data.tables.frames import encoded_frame, is_frame, needs_encoding
from sparseallreduce.linear.encoding import Encoding
from sparseallreduce.runtime.objects import gather
from sparseallreduce.runtime.serial import SERIAL

__all__ = ["columns_encoded", "encoded"]


def columns_encoded(X: Any, known: Encoding | None, comm: Any) -> tuple[Any, Encoding | None]:
    """Return the samples of a training call, encoded if they are a frame that needs it, and the encoding. Collective.

    Parameters
    ----------
    X : array-like, sparse matrix or frame
        This rank's samples.
    known : Encoding, optional
        Encoding of earlier calls.
    comm : communicator

    Raises
    ------
    MismatchError
        On all ranks, if some pass frames and others do not.
    """
    frame = is_frame(X)
    before = None if known is None else known.to_json()
    ranks = gather(comm, (frame, frame and (known is not None or needs_encoding(X)), before and zlib.crc32(before.encode())))
    if any(bits != ranks[0][2] for *_, bits in ranks):
        raise MismatchError("the ranks continue from models with different columns: use the same model on all ranks")
    if not any(needed for _, needed, _ in ranks):
        return X, known if known is not None and np.shape(X)[1:] == (known.features,) else None
    if not all(framed for framed, *_ in ranks):
        remedy = "a rank without samples passes a frame of the same columns, without rows"
        raise MismatchError(f"some ranks pass frames and others arrays: {remedy}")
    return encoded_frame(X, comm, known)


def encoded(X: Any, encoding: Encoding, least: int, estimator: Any) -> Any:
    """Return samples to score with the model's features: those of a frame, or of an array that has been encoded before.

    Raises
    ------
    ValueError
        If columns are missing, a value is not a number, or an array has another number of features.
    """
    if is_frame(X):
        X, _ = encoded_frame(X, SERIAL, encoding)
    X = check_array(
        X, accept_sparse="csr", dtype=[np.float64, np.float32], ensure_min_samples=least, ensure_min_features=0, estimator=estimator
    )
    if X.shape[1] != encoding.features:
        columns = f"{len(encoding.columns)} columns, which are {encoding.features} features"
        fitted = f"{type(estimator).__name__} was fitted on a frame of {columns}"
        raise ValueError(f"X has {X.shape[1]} features, and {fitted}: pass a frame with these columns")
    return X
