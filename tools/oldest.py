"""Print pip constraints that hold every package at the lower bound that pyproject.toml gives it."""

import re
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def main() -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    optional = project["optional-dependencies"].values()
    print(*constraints([*project["dependencies"], *(of for extra in optional for of in extra)]), sep="\n")


def constraints(requirements: list[str]) -> list[str]:
    """`name==bound` of every requirement with a lower bound, each package once."""
    bounds: dict[str, str] = {}
    for requirement in requirements:
        found = re.match(r"([\w.-]+)[^>]*>=\s*([\w.]+)", requirement)
        if found is None:
            continue
        name, bound = found.groups()
        if bounds.setdefault(name, bound) != bound:
            sys.exit(f"error: {name} has two lower bounds in {PROJECT.name}, {bounds[name]} and {bound}")
    return [f"{name}=={bound}" for name, bound in bounds.items()]


if __name__ == "__main__":
    main()
