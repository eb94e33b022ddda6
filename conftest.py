"""Settings of all tests and doctests: what needs PyTorch is left out where it is missing, and no test leaves algorithms registered.

Tests in tests/pytorch are skipped without PyTorch.
"""

from importlib.util import find_spec

import pytest

IN_TESTS = ["nets.py", "launched.py", "scripts_run.py", "slow_store.py", "cases_*.py"]
WITH_TORCH = ["sparseallreduce/torch/*", *(f"tests/pytorch/{name}" for name in IN_TESTS)]
collect_ignore_glob = [] if find_spec("torch") else WITH_TORCH


@pytest.fixture(autouse=True)
def registrations():
    """Remove the algorithms that a test, or an example in a page, has registered."""
    yield
    from sparseallreduce.algorithms.registration import registered, unregister_algorithm

    for name in registered():
        unregister_algorithm(name)
