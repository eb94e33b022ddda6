"""Where the library keeps what it does not want to fetch or find out twice."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["CACHE_VARIABLE", "default_cache"]

#: The environment variable that names another cache folder.
CACHE_VARIABLE = "SPARSEALLREDUCE_CACHE"


def default_cache() -> Path:
    """The folder that the environment variable ``SPARSEALLREDUCE_CACHE`` names, or else the user's cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser()
    import platformdirs  # takes 13 ms, and most processes need no cache

    return platformdirs.user_cache_path("sparseallreduce", appauthor=False)
