"""Tests of the CUDA kernels, which only numba's simulator runs here: without NUMBA_ENABLE_CUDASIM=1 nothing is collected."""

import os

collect_ignore_glob = [] if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1" else ["*.py"]
