"""Every environment variable that the library knows stands on its page, and the page names no other."""

import ast
import re
from pathlib import Path

import sparseallreduce as sar

PACKAGE = Path(sar.__file__).parent
PAGE = PACKAGE.parent / "docs" / "environment.md"
NAME = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+")
# Other constants of modules that read the environment: levels of MPI, values of sysconf.
OTHERS = re.compile(r"MPI_THREAD_.*|SC_.*")
# Read by Python itself, or of a single word.
BESIDES = {"TMPDIR", "RANK"}


def in_the_code() -> set[str]:
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if "environ" not in text:
            continue
        tree = ast.parse(text)
        exported = {name for node in ast.walk(tree) if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
                    for name in ast.literal_eval(node.value)}  # fmt: skip
        strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        found |= {each for each in strings - exported if NAME.fullmatch(each) and not OTHERS.fullmatch(each)}
        found |= set(re.findall(r"SPARSEALLREDUCE_[A-Z_]+", text))
    return found


def test_the_page_names_every_variable_of_the_code_and_no_other():
    named = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", PAGE.read_text())) - BESIDES
    assert named == in_the_code() - BESIDES


def test_our_own_variables_have_a_row_that_says_what_they_mean():
    rows = re.findall(r"^\| `(SPARSEALLREDUCE_\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert {*rows, "SPARSEALLREDUCE_RANK_PROCESS"} == {name for name in in_the_code() if name.startswith("SPARSEALLREDUCE_")}
