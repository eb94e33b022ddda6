"""Kernels as Python functions count with NumPy's integers as compiled ones do only from NumPy 2 on: before, uint64 and int make a float."""

from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if np.lib.NumpyVersion(np.__version__) < "2.0.0":
        skip = pytest.mark.skip(reason="kernels as Python functions need the integers of NumPy 2")
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(skip)
