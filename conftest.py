"""Where PyTorch is missing, what needs it is not looked into for doctests; tests in tests/pytorch are skipped."""

from importlib.util import find_spec

IN_TESTS = ["nets.py", "launched.py", "scripts_run.py", "slow_store.py", "cases_*.py"]
WITH_TORCH = ["sparseallreduce/torch/*", *(f"tests/pytorch/{name}" for name in IN_TESTS)]
collect_ignore_glob = [] if find_spec("torch") else WITH_TORCH
