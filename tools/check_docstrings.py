"""Check the docstrings of the public names with numpydoc, for `make lint`: print what is wrong, and exit with status 1 if anything is."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator

from numpydoc.validate import validate

MODULES = (
    "sparseallreduce",
    "sparseallreduce.algorithms",
    "sparseallreduce.algorithms.steps",
    "sparseallreduce.data_cache",
    "sparseallreduce.linear",
    "sparseallreduce.linear.metrics",
    "sparseallreduce.optim",
    "sparseallreduce.reducers",
    "sparseallreduce.streams.selection",
    "sparseallreduce.testing",
)
# Sections in numpydoc's order and of its names, parameters that exist and in their order, and a summary that is a sentence.
ALWAYS = {"GL05", "GL06", "GL07", "GL09", "PR02", "PR03", "PR05", "PR09", "RT05", "SS01", "SS02", "SS03", "SS04", "SS05"}
COMPLETE = {"PR01", "RT01"}  # every parameter, and the result: of functions, and of all that document a parameter
# Docstrings that are composed of shared parts, whose parameters are keyword-only, so that their order means nothing.
COMPOSED = {f"sparseallreduce.linear.{name}" for name in ("LinearRegression", "LinearSVM", "LogisticRegression")}


def public() -> Iterator[tuple[str, bool]]:
    """Yield the name of each public class, method and function, and whether it is a function."""
    seen = set()
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            value = getattr(module, name)
            if not (inspect.isclass(value) or inspect.isfunction(value)) or value in seen:
                continue
            seen.add(value)
            yield f"{module.__name__}.{name}", inspect.isfunction(value)
            for method, member in vars(value).items() if inspect.isclass(value) else ():
                if not method.startswith("_") and isinstance(member, property | classmethod | staticmethod | type(public)):
                    yield f"{module.__name__}.{name}.{method}", False


def faults() -> Iterator[str]:
    """Yield a line for each fault."""
    for name, is_function in public():
        found = validate(name)
        docstring = found["docstring"] or ""
        documented = is_function or "Parameters\n" in docstring
        # Options that a signature takes as ``**how`` are documented one by one.
        skipped = {"PR03"} if name in COMPOSED else {"RT01"} if "Yields\n" in docstring else set()
        skipped |= {code for code, text in found["errors"] if code == "PR01" and "'**" in text and "'," not in text}
        skipped |= {"PR02"} if "PR01" in skipped else set()
        for code, text in found["errors"]:
            if code not in skipped and (code in ALWAYS or (documented and code in COMPLETE)):
                yield f"{name}: {code} {text}"


def main() -> int:
    """Print all faults."""
    lines = list(faults())
    print("\n".join(lines) or "the docstrings of the public names are complete")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
