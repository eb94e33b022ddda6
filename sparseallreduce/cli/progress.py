"""Progress bars of commands: on rank 0, if it writes to a terminal."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm

__all__ = ["progress_bar"]


def progress_bar(comm: Any, **options: Any) -> Any:
    """A bar with these options of ``tqdm``."""
    return tqdm(disable=None if comm.rank == 0 else True, leave=False, dynamic_ncols=True, **options)
