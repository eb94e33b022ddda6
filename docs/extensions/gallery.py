"""Sphinx extension: the directive ``example`` runs a program of examples/ as the site is built, and shows its code, output and picture.

    ```{example} own_sgd.py
    :ranks: 2
    :bars: sent=sent ([\\d.]+) MB; dense=dense would be ([\\d.]+) MB
    ```

``ranks`` starts it under mpiexec; ``arguments`` are passed to it; ``picture`` is a pattern of the file that it draws; ``bars`` draws
numbers of its output, found by regular expressions. What is inside the directive is shown as the output of a program that needs PyTorch,
which is not run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shlex
import subprocess
import tempfile
from html import escape
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from notebooks import BUILD, ROOT, digest_of_library
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

__all__ = ["setup"]

_SECONDS = 600  # that a program may take
_BAR, _LABEL = 22, 90  # height of a bar with its gap, and width of its label, in units of the SVG's coordinates


def _run(command: list[str], picture: str) -> dict[str, str]:
    """Run a command in an empty folder; return its output, and the picture that it has drawn there, in base 64."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": folder}
        run = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_SECONDS, check=False
        )
        if run.returncode:
            raise ExtensionError(f"{shlex.join(command)} failed: {run.stdout}{run.stderr}")
        drawn = base64.b64encode(next(Path(folder).glob(picture)).read_bytes()).decode() if picture else ""
    return {"output": run.stdout.strip("\n").replace(folder, "/tmp"), "picture": drawn}


def _kept(command: list[str], picture: str, source: Path) -> dict[str, str]:
    """Return what `_run` returns; from a file, if neither the library nor the program has changed since."""
    digest = hashlib.sha256(json.dumps([digest_of_library(), command, picture, source.read_text()]).encode()).hexdigest()[:16]
    path = BUILD / "examples" / f"{source.stem}-{digest}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        for old in path.parent.glob(f"{source.stem}-*.json"):
            old.unlink()
        path.write_text(json.dumps(_run(command, picture)))
    found: dict[str, str] = json.loads(path.read_text())
    return found


def bars(found: dict[str, float]) -> str:
    """Return a bar for each number, by its name, as an SVG element."""
    longest = max(found.values())
    parts = []
    for place, (name, value) in enumerate(found.items()):
        y, length = _BAR * place, 250 * value / longest
        parts.append(f'<text x="0" y="{y + 14}">{escape(name)}</text>')
        parts.append(f'<rect class="bar{" first" * (place == 0)}" x="{_LABEL}" y="{y + 2}" width="{max(length, 1):.1f}" height="15"/>')
        parts.append(f'<text x="{_LABEL + max(length, 1) + 6:.1f}" y="{y + 14}">{value:,g}</text>')
    label = escape(", ".join(f"{name} {value:g}" for name, value in found.items()))
    return f'<svg class="chart" viewBox="0 0 460 {_BAR * len(found) + 4}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


class Example(SphinxDirective):
    """A program of examples/, with what it prints and draws."""

    required_arguments = 1
    has_content = True
    option_spec: ClassVar[dict[str, Any]] = {
        "ranks": directives.positive_int, "arguments": directives.unchanged, "picture": directives.unchanged, "bars": directives.unchanged,
    }  # fmt: skip

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        source = ROOT / "examples" / name
        self.env.note_dependency(str(source))
        arguments = shlex.split(self.options.get("arguments", ""))
        interpreter = ["sh"] if source.suffix == ".sh" else ["python"]
        launched = ["mpiexec", "-n", str(self.options["ranks"])] if "ranks" in self.options else []
        typed = shlex.join([*launched, *interpreter, f"examples/{name}", *arguments])
        picture = self.options.get("picture", "")
        if self.content:
            found = {"output": "\n".join(self.content), "picture": ""}
        else:
            found = _kept([*launched, *interpreter, str(source), *arguments], picture, source)
        return [*self._code(source), _block(f"$ {typed}\n{found['output']}", "console"), *self._pictures(found, name)]

    def _code(self, source: Path) -> list[nodes.Node]:
        """Return the program, which the reader opens."""
        opened = f'<details class="example"><summary>examples/{escape(source.name)}</summary>'
        block = _block(source.read_text(), "sh" if source.suffix == ".sh" else "python")
        return [nodes.raw("", opened, format="html"), block, nodes.raw("", "</details>", format="html")]

    def _pictures(self, found: dict[str, str], name: str) -> list[nodes.Node]:
        pictures = []
        if found["picture"]:
            kind = "svg+xml" if self.options["picture"].endswith("svg") else "png"
            drawn = f'<img class="example" src="data:image/{kind};base64,{found["picture"]}" alt="The picture that {escape(name)} draws">'
            pictures.append(nodes.raw("", drawn, format="html"))
        if "bars" in self.options:
            numbers = {}
            for bar in self.options["bars"].split(";"):
                label, _, pattern = bar.strip().partition("=")
                match = re.search(pattern, found["output"])
                if match is None:
                    raise ExtensionError(f"{name} prints nothing like {pattern}: {found['output']}")
                numbers[label] = float(match[1].replace(",", ""))
            pictures.append(nodes.raw("", f'<figure class="chart">{bars(numbers)}</figure>', format="html"))
        return pictures


def _block(text: str, language: str) -> nodes.literal_block:
    return nodes.literal_block(text, text, language=language)


def setup(app: Any) -> dict[str, bool]:
    app.setup_extension("notebooks")
    app.add_directive("example", Example)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
