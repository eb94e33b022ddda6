"""What is released: one version and one address everywhere; with TEST_ALL also the distributions, and the wheel in an empty environment."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import sparseallreduce as sar

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
URLS = PROJECT["urls"]
README = (ROOT / "README.md").read_text()
LINK = re.compile(r"\]\(([^)\s]+)\)|<(https?:[^>\s]+)>")
# Of the repository, but of no use without its host or its history.
NOT_RELEASED = {".ci/run", ".dockerignore", ".gitignore", ".pre-commit-config.yaml"}
# Written by the build.
ADDED = {"PKG-INFO", "setup.cfg"}
# What builds, tests and editors leave behind.
STRAYS = (
    "a.npz",
    "bench/results/run.json",
    "build/site/index.html",
    "data/url.svm",
    "docs/_build/index.html",
    "docs/.x.md.swp",
    "notes.txt",
    "sparseallreduce/streams/x.cpython-311.nbi",
    "tests/.hypothesis/x",
    "tests/__pycache__/x.cpython-311.pyc",
)


def tracked():
    """Return the files of the repository that exist, by their paths; the test is skipped where git does not know them."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode or not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    return {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}


def test_the_version_is_in_the_package_and_everything_else_agrees():
    assert PROJECT["dynamic"] == ["version"] and "version" not in PROJECT
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+|\.dev\d+)?", sar.__version__)
    headings = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert next(heading for heading in headings if heading != "Unreleased") == sar.__version__
    assert f"\nversion: {sar.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_every_address_of_the_project_is_the_one_of_pyproject():
    """What to change when the repository or the site moves is what this test then lists."""
    source, site = URLS["Source"], URLS["Homepage"]
    owner = source.removeprefix("https://").rpartition("/")[0]
    raw = source.replace("github.com", "raw.githubusercontent.com")
    hosts = r"(?:raw\.githubusercontent\.com|github\.com|ghcr\.io|[\w-]+\.github\.io)"
    mine = re.compile(rf"{hosts}/[\w./#?=%-]*sparseallreduce\b[\w./#-]*")
    allowed = tuple(url.removeprefix("https://") for url in (source, site, raw, f"https://{owner}".replace("github.com", "ghcr.io")))
    wrong = []
    for name in sorted(tracked()):
        text = (ROOT / name).read_text(errors="replace")
        if "github" in text or "ghcr.io" in text:
            wrong += [f"{name}: {address}" for address in mine.findall(text) if not address.startswith(allowed)]
    assert not wrong
    assert all(url.startswith((source, site)) for url in URLS.values())


def test_the_readme_has_no_relative_link_so_that_it_can_be_read_on_pypi():
    targets = [one or other for one, other in LINK.findall(README)]
    assert len(targets) > 10 and all(target.startswith("https://") for target in targets), targets


def test_the_readme_links_to_pages_and_files_that_exist():
    conf = (ROOT / "docs" / "conf.py").read_text()
    elsewhere = set(re.findall(r'^    "(\w+)": "[\w/]+\.md",$', conf, re.MULTILINE))
    for target in (one or other for one, other in LINK.findall(README)):
        if target.startswith(URLS["Homepage"]):
            page = target.removeprefix(URLS["Homepage"]).removesuffix(".html") or "index"
            assert page in elsewhere or any((ROOT / "docs" / f"{page}{suffix}").exists() for suffix in (".md", ".rst")), target
        elif found := re.search(r"(?:/blob|raw\.githubusercontent\.com/[\w-]+/[\w-]+)/main/(.*)", target):
            assert (ROOT / found[1]).exists(), target


def test_the_picture_of_the_readme_has_the_times_that_the_simulator_gives():
    spec = importlib.util.spec_from_file_location("draw_overview", ROOT / "tools" / "draw_overview.py")
    drawing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawing)
    picture = drawing.PICTURE.read_text()
    assert len(picture) < 100_000
    shown = dict(re.findall(r"(\w+) ([\d.]+) ms", re.search(r"\b0\.001: ([^;]*)", picture)[1]))
    taken = drawing.times(0.001)
    assert {name: float(time) for name, time in shown.items()} == pytest.approx(taken, rel=0.05), "run tools/draw_overview.py"


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """Build the source distribution and from it the wheel, in a copy of the tree with what work leaves behind; return both paths."""
    pytest.importorskip("build", reason="installed by `make test-all`")
    copy = tmp_path_factory.mktemp("tree")
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    for name in STRAYS:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text("x")
    command = [sys.executable, "-m", "build", "--outdir", str(copy / "dist"), str(copy)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    return tuple(next((copy / "dist").glob(pattern)) for pattern in ("*.tar.gz", "*.whl"))


@pytest.mark.release
def test_the_source_distribution_has_every_file_of_the_repository_and_no_other(distributions):
    with tarfile.open(distributions[0]) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    released = {name for name in names if not name.startswith("sparseallreduce.egg-info/")} - ADDED
    assert released == {name for name in tracked() if not name.startswith(".github/")} - NOT_RELEASED


@pytest.mark.release
def test_the_wheel_is_pure_and_has_the_package_alone(distributions):
    wheel = distributions[1]
    assert wheel.name == f"sparseallreduce-{sar.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == {name for name in tracked() if name.startswith("sparseallreduce/")}


@pytest.mark.release
def test_the_metadata_and_the_readme_render_on_pypi(distributions):
    pytest.importorskip("twine", reason="installed by `make test-all`")
    command = [sys.executable, "-m", "twine", "check", "--strict", *distributions]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0 and checked.stdout.count("PASSED") == 2, checked.stdout


@pytest.mark.release
@pytest.mark.mpi
@pytest.mark.timeout(1200)
def test_the_wheel_runs_in_an_empty_environment_as_the_readme_says(distributions, tmp_path):
    command = [sys.executable, ROOT / "tools" / "try_wheel.py", distributions[1]]
    tried = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1100, check=False)
    assert tried.returncode == 0 and "all commands succeeded" in tried.stdout, tried.stdout[-4000:] + tried.stderr[-2000:]
