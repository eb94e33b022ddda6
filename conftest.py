"""Where PyTorch is missing, what needs it is not looked into for doctests; tests in tests/pytorch are skipped."""

from importlib.util import find_spec

WITH_TORCH = ["sparseallreduce/torch/*", "tests/pytorch/nets.py", "tests/pytorch/launched.py", "tests/pytorch/slow_store.py", "tests/pytorch/cases_*.py"]
collect_ignore_glob = [] if find_spec("torch") else WITH_TORCH
