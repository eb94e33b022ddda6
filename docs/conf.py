"""Configuration of the documentation site, which `make docs` builds with Sphinx."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from sparseallreduce.version import __version__

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs" / "extensions"))

project = "sparseallreduce"
author = "sparseallreduce developers"
copyright = "sparseallreduce developers, BSD 3-Clause"
release = version = __version__

extensions = [
    "gallery",
    "message_pictures",
    "notebooks",
    "numpydoc",
    "paper_figures",
    "performance_charts",
    "simulator_page",
    "sphinx.ext.autodoc",
    "sphinx_click",
    "sphinx_copybutton",
    "sphinx_design",
]
source_suffix = {".md": "myst-nb", ".rst": "restructuredtext"}
exclude_patterns = ["_build", "extensions"]
smartquotes = False  # so that --options keep their two hyphens
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # the changelog begins at its own level

autodoc_mock_imports = ["torch"]  # hundreds of megabytes, and none of its documentation is shown
autodoc_typehints = "none"  # docstrings have the types
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
numpydoc_xref_param_type = False

html_theme = "furo"
html_title = f"sparseallreduce {__version__}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["scrolling.js"]
html_theme_options = {"navigation_with_keys": True}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# Pages that stand elsewhere in the repository, by their names on the site.
ELSEWHERE = {
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
    "data_sets": "data/README.md",
    "examples": "examples/README.md",
}
_LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\((?!https?:|#)([^)\s]+)\)")


def _take_from_elsewhere(_app: Any, docname: str, source: list[str]) -> None:
    """Read the text of a page from the repository, and let links point to pages of the site, or to nothing if the site has no such page."""
    path = ROOT / "docs" / f"{docname}.md"
    if not path.exists():
        return
    if docname in ELSEWHERE:
        path = ROOT / ELSEWHERE[docname]
        source[0] = path.read_text()
    folder = path.parent
    names = {(ROOT / path).resolve(): name for name, path in ELSEWHERE.items()}

    def linked(found: re.Match[str]) -> str:
        text, target = found.groups()
        path, _, anchor = target.partition("#")
        file = (folder / path).resolve()
        on_site = ROOT / "docs" in file.parents and file.suffix in (".md", ".rst")
        page = names.get(file) or (str(file.relative_to(ROOT / "docs").with_suffix("")) if on_site else None)
        if page is None:
            return f"`{file.relative_to(ROOT)}`" if text.strip("`") in target else f"{text} (`{file.relative_to(ROOT)}`)"
        return f"[{text}](/{page}{file.suffix}{'#' + anchor if anchor else ''})"

    source[0] = _LINK.sub(linked, source[0])


def _skip_routing(_app: Any, _kind: str, name: str, _found: Any, _skip: bool, _options: Any) -> bool | None:
    """Leave out the methods of scikit-learn's metadata routing, which its estimators add to every class."""
    return True if re.fullmatch(r"set_\w+_request|get_metadata_routing", name) else None


def _give_captions_a_level(_app: Any, _pagename: str, _template: str, context: dict[str, Any], _doctree: Any) -> None:
    """Say at which level the captions of the contents are headings, which screen readers need and Sphinx leaves out."""
    if "furo_navigation_tree" in context:
        context["furo_navigation_tree"] = context["furo_navigation_tree"].replace('role="heading"', 'role="heading" aria-level="2"')


def setup(app: Any) -> None:
    app.connect("html-page-context", _give_captions_a_level, priority=900)  # behind the theme's
    app.connect("source-read", _take_from_elsewhere)
    app.connect("autodoc-skip-member", _skip_routing)
