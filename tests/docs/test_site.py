"""The documentation site, built as `make site` builds it: every page is in it, says the same, and asks nobody else."""

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"
HOST = "http://site"
KINDS = {"tr_open": "tr", "list_item_open": "li", "fence": "pre", "code_block": "pre", "image": "img"}
"""What markdown-it, which reads Markdown as forges do, calls the parts of a page: the elements they become."""
COUNTED = (*KINDS.values(), "h1", "h2", "h3")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MKDOCS.is_file(), reason="there is no .venv-docs; type: make .venv-docs/.done"),
]


class Html(HTMLParser):
    """Of a built page: the anchors, where it leads, what a browser fetches with it, and the elements of its text."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.elements: Counter[str] = Counter()
        self.navigation: list[str] = []
        self._inside: list[tuple[str, str]] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
            if any("md-nav--primary" in classes for _, classes in self._inside):
                self.navigation.append(given["href"])
        if tag == "link" and given.get("rel") not in ("canonical", "next", "prev", "alternate"):
            self.fetched.append(given.get("href", ""))
        if "src" in given:
            self.fetched.append(given["src"])
        if any(name == "article" for name, _ in self._inside):
            self.elements[tag] += 1
        if tag in ("article", "nav"):
            self._inside.append((tag, given.get("class", "")))

    def handle_endtag(self, tag: str) -> None:
        if tag in ("article", "nav"):
            self._inside.pop()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [MKDOCS, "build", "--site-dir", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Html]:
    """URL below the site -> page."""
    return {file.relative_to(site).as_posix().removesuffix("index.html"): Html(file) for file in site.rglob("*.html")}


def url_of(page: Path) -> str:
    """Where a page of the repository is in the site."""
    path = page.relative_to(ROOT)
    found = path.parent.as_posix() if path.stem == "README" else path.with_suffix("").as_posix()
    return "" if found == "." else f"{found}/"


def resolved(here: str, target: str) -> tuple[str, str] | None:
    """URL below the site and anchor; None leads elsewhere."""
    parts = urlsplit(urljoin(f"{HOST}/{here}", target))
    return (unquote(parts.path).lstrip("/"), unquote(parts.fragment)) if parts.netloc == "site" else None


def test_every_page_of_docs_is_in_the_navigation_once(pages: dict[str, Html]) -> None:
    shown = Counter(target and target[0] for target in (resolved("", link) for link in pages[""].navigation))
    for page in (ROOT / "docs").rglob("*.md"):
        assert shown[url_of(page)] == 1, page
    titles = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", titles, re.MULTILINE)[:4] == ["Tutorials", "How-tos", "Reference", "Explanations"]


def test_every_link_and_anchor_leads_somewhere(site: Path, pages: dict[str, Html]) -> None:
    checked, wrong = 0, []
    for here, page in pages.items():
        for link in page.links + page.fetched:
            if (found := resolved(here, link)) is not None:
                url, anchor = found
                checked += 1
                there = pages.get(url)
                if there is None and not (site / url).is_file():
                    wrong.append(f"{here}: {link} is not there")
                elif there is not None and anchor and anchor not in there.anchors and not anchor.startswith("__"):
                    wrong.append(f"{here}: {link}: no such anchor")
    assert wrong == []
    assert checked > 10_000


def test_nothing_is_fetched_from_elsewhere(site: Path, pages: dict[str, Html]) -> None:
    for here, page in pages.items():
        assert [url for url in page.fetched if resolved(here, url) is None and not url.startswith("data:")] == [], here
    for file in [*site.rglob("*.css"), *site.rglob("*.svg")]:
        text = file.read_text(encoding="utf-8")
        assert re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//[^)]+", text) == [], file


def test_the_search_knows_every_page(site: Path, pages: dict[str, Html]) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    words = {entry["location"]: entry["title"] + entry["text"] for entry in index["docs"]}
    for page in (ROOT / "docs").rglob("*.md"):
        assert len(words[url_of(page)]) > 20, page


def test_a_page_has_the_same_parts_as_in_the_repository(site: Path, pages: dict[str, Html]) -> None:
    """Two readings of Markdown differ in when a list is one, and in what a backslash is for."""
    reader = MarkdownIt("commonmark").enable("table")
    outside = ("*.md", "docs/**/*.md", "benchmarks/*.md", "examples/*/README.md", "plugins/*/README.md")
    for page in [page for pattern in outside for page in ROOT.glob(pattern) if page.parent.name != "api"]:
        tokens = reader.parse(page.read_text(encoding="utf-8"))
        kinds = Counter(
            token.tag if token.type == "heading_open" else KINDS.get(token.type, "")
            for block in tokens
            for token in (block, *(block.children or ()))
        )
        elements = pages[url_of(page)].elements
        assert {tag: elements[tag] for tag in COUNTED} == {tag: kinds[tag] for tag in COUNTED}, page
        text = (site / url_of(page) / "index.html").read_text(encoding="utf-8")
        assert [cell for cell in re.findall("<td.*?</td>", text, re.DOTALL) if "\\|" in cell] == [], page


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.needs("chromium")
def test_a_browser_searches_and_turns_dark_and_asks_nobody_else(site: Path) -> None:
    from playwright.sync_api import expect, sync_playwright

    with _served(site) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"] if os.geteuid() == 0 else []
        )
        page = browser.new_page(color_scheme="dark")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{address}/docs/metrics/")
        expect(page.locator("body")).to_have_attribute("data-md-color-scheme", "slate")
        page.get_by_title("Switch to light").click()
        expect(page.locator("body")).to_have_attribute("data-md-color-scheme", "default")
        page.get_by_role("textbox", name="Search").fill("rloo")
        # a worker reads the index first
        expect(page.locator(".md-search-result__link").first).to_be_visible(timeout=120_000)
        browser.close()
    assert asked
    assert [url for url in asked if not url.startswith((address, "data:"))] == []
