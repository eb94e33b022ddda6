"""The folder in which the library caches downloads and measurements."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["CACHE_VARIABLE", "default_cache"]

#: The environment variable that names another cache folder.
CACHE_VARIABLE = "SPARSEALLREDUCE_CACHE"


def default_cache() -> Path:
    """Return the folder named by the environment variable ``SPARSEALLREDUCE_CACHE``, by default the user's cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser()
    import platformdirs  # takes 13 ms to import, and most processes need no cache

    return platformdirs.user_cache_path("sparseallreduce", appauthor=False)
