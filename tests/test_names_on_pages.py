"""What pages call by a name of this library exists: functions, classes, their parameters, and options of commands."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import click
import pytest
from test_documentation import FENCE, ROOT, each_page

import sparseallreduce as sar
from sparseallreduce import linear
from sparseallreduce.cli import main
from sparseallreduce.runtime.options import OperationOptions, RequestOptions

PYTORCH = Path(sar.__file__).parent / "torch"
EXPORTED_FOR_PYTORCH = {
    name
    for node in ast.walk(ast.parse((PYTORCH / "__init__.py").read_text()))
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    for name in ast.literal_eval(node.value)
}
OPTIONS = {*OperationOptions.__annotations__, *RequestOptions.__annotations__}


def resolve(path):
    """Return what a dotted name stands for; None if it is in sparseallreduce.torch, which is not imported here."""
    words = path.split(".")
    found = {"sar": sar, "sparseallreduce": sar}[words[0]]
    for place, word in enumerate(words[1:], start=2):
        if words[1] == "torch":
            known = EXPORTED_FOR_PYTORCH | {module.stem for module in PYTORCH.glob("*.py")} | {"torch"}
            assert {*words[1:3]} <= known, path
            return None
        try:
            found = getattr(found, word)
        except AttributeError:
            found = importlib.import_module("sparseallreduce." + ".".join(words[1:place]))
    return found


@each_page
def test_names_of_the_library_exist(page):
    text = FENCE.sub("", page.read_text())
    for path in re.findall(r"`((?:sar|sparseallreduce)(?:\.[A-Za-z_]\w*)+)(?=[`(])", text):
        resolve(path)


COMING_FROM = ROOT / "docs" / "coming_from.md"


def columns():
    """The second columns of all rows of tables on the page, without their headings."""
    for line in COMING_FROM.read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 2 and not set(cells[0]) <= {"-"} and "here" not in cells[1] and "`sparseallreduce train` and" not in cells[1]:
            yield cells[1]


SNIPPETS = [snippet for column in columns() for snippet in re.findall(r"`([^`]+)`", column)]


def commands_by_name():
    context = click.Context(main)
    return {name: main.get_command(context, name) for name in main.list_commands(context)}


@pytest.mark.parametrize("snippet", [snippet for snippet in SNIPPETS if "--" in snippet])
def test_options_that_take_the_place_of_others_exist(snippet):
    words = snippet.split()
    commands = commands_by_name()
    named = words[words.index("sparseallreduce") + 1] if "sparseallreduce" in words else None
    known = {option for name, command in commands.items() if named in (None, name)
             for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}  # fmt: skip
    assert {word for word in words if word.startswith("--")} <= known


def calls():
    """Every call of a class or function of this library in the tables, as source."""
    for snippet in SNIPPETS:
        try:
            tree = ast.parse(snippet, mode="eval")
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                if name in linear.__all__:
                    yield f"sparseallreduce.linear.{name}", node
                elif name.split(".")[0] in ("sar", "sparseallreduce"):
                    yield name, node


@pytest.mark.parametrize("name,call", [pytest.param(*call, id=ast.unparse(call[1])) for call in calls()])
def test_calls_that_take_the_place_of_others_have_these_parameters(name, call):
    found = resolve(name)
    if found is not None:
        given = {keyword.arg for keyword in call.keywords}
        parameters = inspect.signature(found).parameters
        assert given <= parameters.keys() | (OPTIONS if "options" in parameters else set())


def test_there_are_tables_for_all_six():
    text = COMING_FROM.read_text()
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert titles == ["mpi4py", "scikit-learn", "Vowpal Wabbit", "LIBLINEAR", "Horovod", "DistributedDataParallel"]
    assert text.count("What differs:") == text.count("\nNot here: ") == 6
    assert len(SNIPPETS) > 120
