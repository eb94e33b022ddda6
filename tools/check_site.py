"""Open every page of the documentation site in headless Chromium and report what is wrong with it, a line for each page.

Each page is opened at two widths, light and dark. It fails if the browser's console has errors, it asks the network for anything, a link or
anchor leads nowhere, it is wider than the window, an image has no alternative text, or axe-core has findings of serious or critical impact.
`make test-site` installs what is needed: Playwright's Python package and axe-core, which use a Chromium that is already on the machine.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urldefrag, urlparse

from playwright.sync_api import Error, Page, sync_playwright

WIDTHS = {1400: 900, 390: 844}  # and the heights of these windows
SCHEMES = ("light", "dark")
IMPACTS = ("serious", "critical")
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

# The ids of a page and its links; an anchor is also found by the name of an <a>.
LINKS = """() => ({
    ids: [...document.querySelectorAll('[id], a[name]')].flatMap(each => [each.id, each.getAttribute('name')]).filter(Boolean),
    links: [...document.querySelectorAll('a[href], area[href]')].map(each => each.href),
})"""

UNDESCRIBED = """() => [...document.querySelectorAll('img')]
    .filter(each => !(each.getAttribute('alt') || '').trim() && each.getAttribute('role') !== 'presentation')
    .map(each => each.getAttribute('src'))"""

# Elements that stick out of the window and are not inside a box that scrolls or clips.
WIDER = """() => {
    const width = document.documentElement.clientWidth, excess = document.documentElement.scrollWidth - width
    if (excess <= 0) return null
    const contained = each => {
        for (let box = each.parentElement; box && box !== document.body; box = box.parentElement)
            if (getComputedStyle(box).overflowX !== 'visible' && box.getBoundingClientRect().right <= width + 1) return true
        return false
    }
    const out = [...document.body.querySelectorAll('*')].filter(each => each.getBoundingClientRect().right > width + 1 && !contained(each))
    const name = each => each.tagName.toLowerCase() + (each.id ? '#' + each.id : '') + [...each.classList].map(one => '.' + one).join('')
    return `${excess} px wider than the window: ${out.slice(0, 3).map(name).join(', ')}`
}"""

FINDINGS = """async ([impacts, rules]) => (await axe.run(document, {
        resultTypes: ['violations'], preload: false, ...(rules ? {runOnly: rules} : {}),
    })).violations
    .filter(each => impacts.includes(each.impact))
    .map(each => `${each.id} (${each.impact}), ${each.nodes.length} times, as ${each.nodes[0].target.join(' ')}`)"""


class Opened(NamedTuple):
    """What a page has, as the browser shows it."""

    ids: frozenset[str]
    links: tuple[str, ...]


def looked_at(page: Page, path: Path, axe: str, pictures: Path | None) -> tuple[Opened, Iterator[tuple[str, str]]]:
    """Open a page in all ways; return its anchors and links, and what is wrong, each with the way in which it was opened."""
    faults: list[tuple[str, str]] = []
    way = ""
    listeners = {
        "console": lambda message: faults.append((way, f"console: {message.text}")) if message.type == "error" else None,
        "pageerror": lambda error: faults.append((way, f"exception: {error}")),
        "requestfailed": lambda request: faults.append((way, f"not loaded: {request.url}")),
        "request": lambda request: (
            faults.append((way, f"request to the network: {request.url}")) if request.url.startswith("http") else None
        ),
    }
    for event, listener in listeners.items():
        page.on(event, listener)  # type: ignore[call-overload]
    opened = Opened(frozenset(), ())
    for width, height in WIDTHS.items():
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=SCHEMES[0], reduced_motion="reduce")
        way = f"{width} {SCHEMES[0]}"
        page.goto(path.as_uri(), wait_until="load")
        page.evaluate(axe)
        for scheme in SCHEMES:
            way = f"{width} {scheme}"
            page.emulate_media(color_scheme=scheme)
            faults += [(way, fault) for fault in _faults_of(page, None if scheme == SCHEMES[0] else ["color-contrast"])]
            if pictures is not None:
                page.screenshot(path=pictures / f"{path.parent.name}-{path.stem}-{width}-{scheme}.png")
        if not opened.ids:
            found = page.evaluate(LINKS)
            opened = Opened(frozenset(found["ids"]), tuple(found["links"]))
    for event, listener in listeners.items():
        page.remove_listener(event, listener)
    return opened, iter(faults)


def _faults_of(page: Page, rules: list[str] | None) -> list[str]:
    """Return what is wrong with an opened page; ``rules`` are those of axe-core to apply, by default all."""
    wider = page.evaluate(WIDER)
    undescribed = [f"no alternative text: {source}" for source in page.evaluate(UNDESCRIBED)]
    return [*([wider] if wider else []), *undescribed, *page.evaluate(FINDINGS, [list(IMPACTS), rules])]


def anchored(pages: dict[Path, Opened]) -> set[Path]:
    """Return the pages of the site to whose anchors these pages link."""
    parts = [urlparse(link) for opened in pages.values() for link in opened.links]
    paths = {Path(unquote(part.path)) for part in parts if part.scheme == "file" and part.fragment}
    return {path for path in paths if path.is_file() and path.suffix == ".html"}


def broken(links: tuple[str, ...], pages: dict[Path, Opened]) -> Iterator[str]:
    """Yield the links to files and anchors of the site that are not there; links to other sites are not followed."""
    for link in dict.fromkeys(links):
        address, fragment = urldefrag(link)
        if urlparse(address).scheme != "file":
            continue
        path = Path(unquote(urlparse(address).path))
        if not path.is_file():
            yield f"broken link: {link}"
        elif fragment and path in pages and unquote(fragment) not in pages[path].ids:
            yield f"broken anchor: {path.name}#{fragment}"


def collected(faults: list[tuple[str, str]]) -> list[str]:
    """Return each fault once, with the ways in which a page has it unless it has it in all.

    >>> collected([("390 dark", "wide"), ("390 light", "wide")])
    ['390 dark, 390 light: wide']
    """
    ways: dict[str, list[str]] = defaultdict(list)
    for way, fault in faults:
        ways[fault].append(way)
    every = len(WIDTHS) * len(SCHEMES)
    return [
        fault if "" in found or len(set(found)) == every else f"{', '.join(dict.fromkeys(found))}: {fault}" for fault, found in ways.items()
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("site", type=Path, help="folder of the site")
    parser.add_argument(
        "pages", nargs="*", help="pages to open, such as index.html or 'api/*'; all by default. Links are checked in these alone"
    )
    parser.add_argument("--axe", type=Path, required=True, help="axe.min.js of axe-core")
    parser.add_argument("--chromium", default=next(filter(None, map(shutil.which, CHROMIUM)), None), help="program to start")
    parser.add_argument("--pictures", type=Path, help="folder for a picture of every page in each way")
    arguments = parser.parse_args()
    if arguments.chromium is None:
        parser.error(f"no Chromium was found: install one (on Debian: apt install chromium), or name it with --chromium; tried {CHROMIUM}")
    return arguments


def main() -> int:
    arguments = _arguments()
    site: Path = arguments.site.resolve()
    every = sorted(site.rglob("*.html"))
    chosen = [path for path in every if not arguments.pages or any(fnmatch(str(path.relative_to(site)), name) for name in arguments.pages)]
    if not chosen:
        print(f"error: {site} has no such pages: run `make docs` first", file=sys.stderr)
        return 2
    if arguments.pictures is not None:
        arguments.pictures.mkdir(parents=True, exist_ok=True)
    pages: dict[Path, Opened] = {}
    faults: dict[Path, list[tuple[str, str]]] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=arguments.chromium, args=["--no-sandbox"])
        page = browser.new_page()
        for path in chosen:
            try:
                pages[path], found = looked_at(page, path, arguments.axe.read_text(), arguments.pictures)
                faults[path] = list(found)
                print(f"        {path.relative_to(site)} opened", file=sys.stderr, flush=True)
            except Error as error:
                faults[path] = [("", f"could not be opened: {error}")]
                page = browser.new_page()
        for path in anchored(pages) - set(chosen):
            page.goto(path.as_uri(), wait_until="load")
            pages[path] = Opened(frozenset(page.evaluate(LINKS)["ids"]), ())
        browser.close()
    return report(site, chosen, pages, faults)


def report(site: Path, chosen: list[Path], pages: dict[Path, Opened], faults: dict[Path, list[tuple[str, str]]]) -> int:
    """Print a line for each page and one for each fault; return the exit status."""
    links = failed = 0
    for path in chosen:
        opened = pages.get(path, Opened(frozenset(), ()))
        links += len(set(opened.links))
        found = collected([*faults[path], *(("", fault) for fault in broken(opened.links, pages))])
        failed += bool(found)
        print(f"{'FAILED' if found else 'ok':<7} {path.relative_to(site)}, {len(set(opened.links))} links")
        for fault in found:
            print(f"        {fault}")
    ways = ", ".join(f"{width} px" for width in WIDTHS)
    print(f"{len(chosen)} pages at {ways}, {' and '.join(SCHEMES)}, {links} links: {failed or 'none'} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
