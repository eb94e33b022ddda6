"""Dtypes that NumPy does not have, or that have no order."""

import subprocess
import sys

import numpy as np
import pytest

from sparseallreduce import SparseStream, StreamTypeError, simulate
from sparseallreduce.streams.dtypes import BFLOAT16, DTYPES
from sparseallreduce.streams.reduction import divided

needs_bfloat16 = pytest.mark.skipif(BFLOAT16 is None, reason="needs ml_dtypes")

WITHOUT = """
import sys
sys.modules["ml_dtypes"] = None
import numpy as np
import sparseallreduce as sar
from sparseallreduce.streams.dtypes import BFLOAT16, DTYPES
assert BFLOAT16 is None
print(",".join(dtype.name for dtype in DTYPES))
for dtype in DTYPES:
    stream = sar.SparseStream([1, 4], np.ones(2, dtype), 9)
    assert (stream + stream).values.tolist() == [2, 2]
    assert (stream * 2).astype("float16").values.tolist() == [2, 2]
try:
    stream.astype("bfloat16")
except sar.StreamTypeError as error:
    print(error)
"""


def test_all_works_without_ml_dtypes_and_positions_on_the_wire_are_the_same():
    run = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    names, error = run.stdout.splitlines()
    assert names.split(",") == [dtype.name for dtype in DTYPES][:7]
    assert "install ml_dtypes for it, or take one of float32" in error


@needs_bfloat16
def test_bfloat16_has_the_place_behind_all_others():
    assert DTYPES.index(BFLOAT16) == 7


@needs_bfloat16
def test_the_mean_of_bfloat16_divides_by_any_number_of_ranks():
    total = SparseStream([0], np.array([257], np.float32), 100).astype(BFLOAT16)  # 256 or 258, and 257 is neither
    assert divided(total, 257).values.astype(float).tolist() == [np.float32(total.values[0]) / 257 // 2**-8 * 2**-8]


@pytest.mark.parametrize("op", ["min", "max"])
def test_complex_numbers_have_no_order_on_any_rank(op):
    streams = [SparseStream([rank], [1j], 9) for rank in range(3)]
    with pytest.raises(StreamTypeError, match=f"have no order, and so no {op}"):
        simulate(streams, "allgather", op=op)
