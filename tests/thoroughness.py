"""How much is tried: less by `make test`, more by `make test-all`, which is run before a release and sets TEST_ALL=1."""

import os

ALL = bool(os.environ.get("TEST_ALL"))


def examples(number: int) -> int:
    """Return how many examples hypothesis draws where `number` are drawn for a release: a quarter, but at least eight."""
    return number if ALL else max(number // 4, min(number, 8))
