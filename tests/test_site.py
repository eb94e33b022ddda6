"""The documentation site names everything that is public; `make docs` builds it, and takes warnings for errors."""

import re
from pathlib import Path

import pytest

import sparseallreduce as sar
from sparseallreduce import data_cache, linear, optim, testing
from sparseallreduce.cli.paper_figures import FIGURES

MODULES = {"sparseallreduce.optim"}  # that guides import as a whole
API = Path(__file__).parent.parent / "docs" / "api"


def documented(module):
    """Return the names that the pages of the API document of a module."""
    found = set()
    for page in API.glob("*.rst"):
        current = ""
        for line in page.read_text().splitlines():
            if each := re.match(r"\.\. currentmodule:: (\S+)", line):
                current = each[1]
            elif (each := re.match(r"\.\. auto\w+:: (\S+)", line)) and current == module:
                found.add(each[1])
    return found


@pytest.mark.parametrize("module", [sar, optim, linear, data_cache, testing], ids=lambda module: module.__name__)
def test_every_public_name_is_in_the_reference(module):
    names = {name for name in module.__all__ if not name.startswith("__")}
    if module is sar:
        names |= {"register_algorithm", "register_codec", "register_reducer"}
    assert documented(module.__name__) == names


def imported_by_guides():
    """Return the names that guides, tutorials and examples import from this library, with their modules."""
    root = API.parent.parent
    pages = [root / "README.md", *API.parent.rglob("*.md"), *(root / "examples").rglob("*.py")]
    found = (each for page in pages for each in re.findall(r"from (sparseallreduce(?:\.\w+)*) import \(?([\w, ]+)", page.read_text()))
    return sorted({(module, name) for module, names in found for name in re.findall(r"\w+", re.sub(r" as \w+", "", names))})


@pytest.mark.parametrize("module,name", imported_by_guides())
def test_what_guides_import_is_in_the_reference(module, name):
    """What is in no page of the API is not public, and may change."""
    if module == "sparseallreduce.torch":
        assert name in (API / "torch.rst").read_text()
    elif f"{module}.{name}" not in MODULES:
        assert name in documented(module)


def test_every_page_is_in_the_contents():
    docs = API.parent
    contents = {str(index.parent.relative_to(docs) / word) for index in docs.rglob("index.md") for word in index.read_text().split()}
    pages = {str(path.relative_to(docs).with_suffix("")) for path in docs.rglob("*.md")} - {"index"}
    assert pages <= contents


def test_figures_of_where_it_does_not_pay_are_measured_ones():
    rows = [line for line in (API.parent / "where_it_does_not_pay.md").read_text().splitlines() if line.startswith("| **")]
    measured = (API.parent / "performance.md").read_text()
    figures = {figure for row in rows for figure in re.findall(r"(?<![\d^])\d*\.\d+(?!\d)", row)}
    assert len(rows) > 12 and len(figures) > 20
    assert {figure for figure in figures if not re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", measured)} <= {"0.01"}  # of --gap


def test_every_figure_of_the_papers_has_its_place():
    shown = [name for page in (API.parent / "papers").glob("*.md") for name in re.findall(r"{paper-figure} (\S+)", page.read_text())]
    assert sorted(shown) == sorted(FIGURES)
