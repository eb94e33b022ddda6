"""Settings of all tests and doctests: what needs PyTorch is left out where it is missing, and no test leaves algorithms registered.

Tests in tests/pytorch are skipped without PyTorch.
"""

from importlib.util import find_spec

import pytest

IN_TESTS = ["nets.py", "launched.py", "scripts_run.py", "slow_store.py", "cases_*.py"]
WITH_TORCH = ["sparseallreduce/torch/*", *(f"tests/pytorch/{name}" for name in IN_TESTS)]
OF_THE_SITE = ["docs/conf.py", "docs/extensions/*"]  # need Sphinx
collect_ignore_glob = OF_THE_SITE if find_spec("torch") else [*OF_THE_SITE, *WITH_TORCH]


@pytest.fixture(autouse=True)
def registrations():
    """Remove the algorithms that a test, or an example in a page, has registered."""
    yield
    from sparseallreduce.algorithms.registration import registered, unregister_algorithm

    for name in registered():
        unregister_algorithm(name)
