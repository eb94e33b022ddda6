"""Seeds of random selections: one of 64 bits for each step."""

from __future__ import annotations

import numpy as np

__all__ = ["seed_of"]


def seed_of(seed: int, step: int) -> int:
    """Return a seed in [0, 2**64) for a step, practically independent of those of other steps and seeds."""
    return int(np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)[0])
