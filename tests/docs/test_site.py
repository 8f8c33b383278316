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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
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


@pytest.fixture(scope="module")
def browser(site: Path) -> Iterator[Callable[..., Any]]:
    """Return how to open a page of the served site's browser; relative addresses are of the site."""
    from playwright.sync_api import sync_playwright

    with _served(site) as address, sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"] if os.geteuid() == 0 else []
        )
        yield functools.partial(chromium.new_page, base_url=address)
        chromium.close()


def indexed(site: Path) -> list[str]:
    """Return the URLs of all pages except listings of source files."""
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    return sorted({entry["location"].partition("#")[0] for entry in index["docs"]})


@pytest.mark.needs("chromium")
def test_a_browser_searches_and_turns_dark_and_asks_nobody_else(browser: Callable[..., Any]) -> None:
    from playwright.sync_api import expect

    page = browser(color_scheme="dark")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto("/docs/metrics/")
    expect(page.locator("body")).to_have_attribute("data-md-color-scheme", "slate")
    page.get_by_title("Switch to light").click()
    expect(page.locator("body")).to_have_attribute("data-md-color-scheme", "default")
    page.get_by_role("textbox", name="Search").fill("rloo")
    # a worker reads the index first
    expect(page.locator(".md-search-result__link").first).to_be_visible(timeout=120_000)
    address = page.url.partition("/docs/")[0]
    page.close()
    assert asked
    assert [url for url in asked if not url.startswith((address, "data:"))] == []


FIRST_RESULTS = {
    "how to resume a run": "docs/troubleshooting/",
    "reward function": "docs/",
    "judge": "docs/llm_as_judge/",
    "vllm": "docs/",
    "multi agent": "docs/multiagent_workflow/",
    "api key": "docs/",
    "checkpoint": "docs/backbones/local/",
    "max_tokens": "docs/",
    "install": "",
    "cpu": "docs/",
    "astuner.rollout.num_repeat": "docs/",
    "astuner.tune": "docs/",
}
"""Query -> start of the first result's address."""
RECORDS = ("benchmarks/", "CHANGELOG/", "tests/")


@pytest.mark.needs("chromium")
def test_the_search_lists_guides_and_reference_first(browser: Callable[..., Any]) -> None:
    from playwright.sync_api import expect

    page = browser()
    page.goto("/")
    search = page.get_by_role("textbox", name="Search")
    count = page.locator(".md-search-result__meta")
    results = page.locator(".md-search-result__list > li > a")
    for query, first in FIRST_RESULTS.items():
        search.fill("")
        search.press("End")  # the page searches when a key goes up
        expect(count).to_have_text(re.compile("Type to start searching"), timeout=120_000)
        search.fill(query)
        search.press("End")
        expect(count).to_have_text(re.compile("matching document"), timeout=120_000)
        links = results.evaluate_all("links => links.slice(0, 5).map(link => new URL(link.href).pathname.slice(1))")
        assert len(links) == 5, query
        assert links[0].startswith(first), f"{query}: {links}"
        assert not links[0].startswith(("docs/api/", "examples/", "plugins/", *RECORDS)), f"{query}: {links}"
        assert [link for link in links if link.startswith(RECORDS)] == [], query
    page.close()


@pytest.mark.needs("chromium")
def test_no_page_logs_an_error_or_requests_a_missing_file(site: Path, browser: Callable[..., Any]) -> None:
    page = browser()
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("response", lambda response: errors.append(response.url) if response.status >= 400 else None)
    wrong = {}
    for url in indexed(site):
        page.goto(f"/{url}")
        if errors:
            wrong[url], errors = errors, []
    page.wait_for_load_state("networkidle")
    page.close()
    assert wrong == {}
    assert errors == []


BROKEN_KEYS = """() => {
  const broken = []
  for (const code of document.querySelectorAll("article :not(pre) > code")) {
    if (!/^\\w+(\\.\\w+)+$/.test(code.textContent)) continue
    for (const part of code.childNodes) {
      const range = document.createRange()
      range.selectNodeContents(part)
      if (part.nodeType == Node.TEXT_NODE && range.getClientRects().length > 1) broken.push(part.textContent)
    }
  }
  return broken
}"""
"""Parts of keys (between dots) that are on two lines."""


@pytest.mark.needs("chromium")
def test_keys_break_at_dots_and_pages_fit_on_a_phone(browser: Callable[..., Any]) -> None:
    page = browser(viewport={"width": 390, "height": 844})
    for url in (
        "docs/configuration/",
        "docs/metrics/",
        "docs/commands/",
        "docs/backbones/verl/",
        "docs/api/train/",
        "",
    ):
        page.goto(f"/{url}")
        assert page.evaluate(BROKEN_KEYS) == [], url
        assert page.evaluate("document.documentElement.scrollWidth") == 390, url
    page.close()


def test_the_anchors_of_the_former_api_page_are_on_the_index(pages: dict[str, Html]) -> None:
    anchors = {"astuner_models.tuning.tune", "astuner.contracts.judge.Judge", "astuner_testing.plugins.check_plugin"}
    assert anchors <= pages["docs/api/"].anchors
    assert any(link.endswith("train/#astuner_models.tuning.tune") for link in pages["docs/api/"].links)
