"""Seeds of random selections: one of 64 bits for each step."""

from __future__ import annotations

import numpy as np

__all__ = ["seed_of"]


def seed_of(seed: int, step: int) -> int:
    """A number from 0 to 2**64 - 1 for a step, as good as independent of those of other steps and seeds."""
    return int(np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)[0])
