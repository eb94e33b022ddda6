"""The recipes in packaging/ and the workflows agree with pyproject.toml; with the tools of `make lint`, the workflows are checked too."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

import sparseallreduce as sar

ROOT = Path(__file__).resolve().parent.parent
PACKAGING = ROOT / "packaging"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PYTHONS = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))


def bounds(requirements):
    """Return the lower bound of each requirement, by its name."""
    return dict(re.match(r"([\w.-]+)[^>]*>=\s*([\w.]+)", each).groups() for each in requirements)


def test_the_conda_recipe_has_the_version_and_the_dependencies():
    yaml = pytest.importorskip("yaml")
    recipe = yaml.safe_load((PACKAGING / "conda" / "recipe.yaml").read_text())
    assert recipe["context"] == {"version": sar.__version__, "python_min": PROJECT["requires-python"].removeprefix(">=")}
    run = [each.replace(" ", "", 1) for each in recipe["requirements"]["run"]]
    assert run[1:] == [*PROJECT["dependencies"], EXTRAS["mpi"][0]]


def test_the_spack_package_has_the_version_and_the_dependencies():
    calls = [node for node in ast.walk(ast.parse((PACKAGING / "spack" / "package.py").read_text())) if isinstance(node, ast.Call)]
    first = [(ast.unparse(call.func), call.args[0].value, call) for call in calls if call.args and isinstance(call.args[0], ast.Constant)]
    assert sar.__version__ in [value for name, value, _ in first if name == "version"]
    needed = {}
    for name, value, call in first:
        if name == "depends_on" and value.startswith("py-"):
            when = next((keyword.value.value for keyword in call.keywords if keyword.arg == "when"), "")
            package, _, version = value.removeprefix("py-").partition("@")
            needed[package] = version.partition(":")[0], when.removeprefix("+")
    needed.pop("setuptools")
    expected = {name: (bound, "") for name, bound in bounds(PROJECT["dependencies"]).items()}
    for extra in ("mpi", "plot", "parquet", "torch", "zstd"):
        expected |= {name: (bound, extra) for name, bound in bounds(EXTRAS[extra][:1]).items()}
    assert needed == expected


@pytest.mark.parametrize("path", ["Dockerfile", "sparseallreduce.def"])
def test_containers_install_extras_that_exist(path):
    (extras,) = re.findall(r"\.whl\)\[([\w,]+)\]", (PACKAGING / "container" / path).read_text())
    assert set(extras.split(",")) <= set(EXTRAS)


@pytest.mark.parametrize("name", ["test", "release"])
def test_workflows_try_every_supported_python(name):
    text = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text() if (ROOT / ".github").exists() else pytest.skip("no clone")
    matrices = re.findall(r"python: (\[.*\])", text)
    assert matrices and all(ast.literal_eval(matrix) == PYTHONS for matrix in matrices)


def test_targets_and_programs_of_the_workflows_exist():
    if not (ROOT / ".github").exists():
        pytest.skip("no clone")
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = path.read_text()
        assert set(re.findall(r"\bmake ([\w-]+)", text)) <= {*targets, "test"}, path.name
        assert all((ROOT / program).exists() for program in re.findall(r"\btools/\w+\.\w+", text)), path.name
