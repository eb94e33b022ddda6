"""Sphinx extension: write the cost model as JavaScript beside the simulator page, which runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from javascript import translated
from prediction import prediction

from sparseallreduce.algorithms.cost import Machine, Problem, Transfer
from sparseallreduce.streams.wire import Encoding

__all__ = ["model", "setup"]


def model() -> str:
    """Return the JavaScript that defines ``prediction``; classes are translated first, so that their fields are known."""
    return f"const prediction = (() => {{\n{translated(Problem, Machine, Transfer, Encoding, prediction)}return prediction\n}})()\n"


def _write(app: Any, _error: Exception | None) -> None:
    if app.builder.format == "html":
        folder = Path(app.outdir) / "_static"
        folder.mkdir(exist_ok=True)
        (folder / "cost_model.js").write_text(f"// Generated from sparseallreduce/algorithms/cost.py by `make docs`.\n{model()}")


def setup(app: Any) -> dict[str, bool]:
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
