"""Hooks of `mkdocs build`: pages, navigation and links of the documentation site.

Pages keep their paths in the repository, so links work in the repository and on the site. The navigation comes from the
headings and tables of ``docs/README.md``. Linked source files (a workflow, an experiment) are shown as pages. A link to
a folder leads to its README, if it has one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
OUTSIDE = {  # sections of the reference with pages outside of docs/
    "Examples": ("examples/**/README.md",),
    "Benchmarks": ("benchmarks/*.md",),
    "Packages": ("plugins/*/README.md", "plugins/*/cpu/README.md"),
    "Tests": ("tests/*.md", "tests/packaging/**/README.md"),
}
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
SHOWN_AS = {".py": "python", ".yaml": "yaml", ".jinja": "jinja"}
API_ROW = re.compile(r"^\| \[`([\w.]+)`\]\(\.\./\.\./(?:plugins/)?\w+/([\w/]+)\.py\) \|.*\n", re.MULTILINE)
API_NAME = re.compile(r"\[`(\w+)`\]\((\w+)\.md\)")
KEY = re.compile(r"<code>(\w+(?:\.\w+)+)</code>")
BOOSTS = {  # start of a page's path -> factor of its score in the search; the longest start applies
    "README.md": 6.0,
    "docs/": 4.0,  # user guides
    **dict.fromkeys(("docs/appworld", "docs/smollm2", "docs/backbones/trinity", "docs/backbones/verl"), 2.0),
    **{f"docs/{name}.md": 3.0 for name in ("commands", "configuration", "endpoint", "metrics", "model_families")},
    "docs/api/": 0.8,
    **dict.fromkeys(("examples/", "plugins/", "docs/README.md", "docs/api/README.md"), 0.4),
    **dict.fromkeys(("docs/architecture.md", "docs/good_first_issues.md", "docs/releasing.md"), 0.4),
    "": 0.01,  # benchmarks, changelog, reports of tests
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Remove the selector of versions from a site without versions: its list would not exist."""
    if "MIKE_DOCS_VERSION" not in os.environ:
        del config.extra["version"]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by all pages of the repository, and set the navigation."""
    found: dict[str, File] = {}
    outside = [page for patterns in OUTSIDE.values() for page in _outside(patterns)]
    for page in [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md")), *outside]:
        found[name(page)] = File(name(page), str(ROOT), config.site_dir, config.use_directory_urls)
        for path in linked(page):
            if path.is_file() and _is_source(path):
                found[f"{name(path)}.md"] = _source(path, config)
    for pattern in ("docs/images/*", "benchmarks/*.png", "examples/**/curve.png"):
        for path in sorted(ROOT.glob(pattern)):
            found[name(path)] = File(name(path), str(ROOT), config.site_dir, config.use_directory_urls)
    config.nav = _navigation()
    themes = [file for file in files if file.src_dir != config.docs_dir]
    return Files([*themes, *found.values()])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.generated_by:
        return markdown
    page.meta["search"] = {"boost": BOOSTS[max(filter(page.file.src_uri.startswith, BOOSTS), key=len)]}
    if page.file.src_uri == "docs/api/README.md":
        return API_NAME.sub(_with_anchors(), markdown)
    if page.file.src_uri.startswith("docs/api/"):
        return API_ROW.sub(_described, markdown.replace("| name | description |\n|---|---|\n", ""))
    folder = (ROOT / page.file.src_uri).parent

    def mended(link: re.Match[str]) -> str:
        path = Path(os.path.normpath(folder / link[2]))
        if path.is_dir():
            return f"[{link[1]}]({link[2]}/README.md)" if (path / "README.md").is_file() else link[1]
        return f"[{link[1]}]({link[2]}.md)" if path.is_file() and _is_source(path) else link[0]

    return LINK.sub(mended, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let keys break after their dots, and fix table cells.

    Python-Markdown, unlike GitHub, shows the backslash before a pipe in a cell.
    """
    html = KEY.sub(lambda key: key[0].replace(".", ".<wbr>"), html)
    return re.sub(r"<td.*?</td>", lambda cell: cell[0].replace("\\|", "|"), html, flags=re.DOTALL)


def on_post_build(config: MkDocsConfig) -> None:
    """Redirect old paths to current pages."""
    older = DOCS / "older_pages.yaml"
    for old, new in yaml.safe_load(older.read_text(encoding="utf-8")).items() if older.is_file() else ():
        there, here = (File(path, str(ROOT), config.site_dir, config.use_directory_urls) for path in (new, old))
        url = get_relative_url(there.url, here.url)
        target = Path(here.abs_dest_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(
            f'<!doctype html><meta http-equiv="refresh" content="0; url={url}"><a href="{url}">moved</a>\n'
        )


def linked(page: Path) -> Iterator[Path]:
    """Yield the existing files and folders that ``page`` links to."""
    for _, target, _ in LINK.findall(page.read_text(encoding="utf-8")):
        if (path := Path(os.path.normpath(page.parent / target))).exists():
            yield path


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _is_source(path: Path) -> bool:
    return path.suffix not in (".md", ".png", ".svg")


def _source(path: Path, config: MkDocsConfig) -> File:
    """Return a page that shows a source file, excluded from navigation and search."""
    text = path.read_text(encoding="utf-8")
    code = f"````{SHOWN_AS.get(path.suffix, 'text')}\n{text}\n````" if path.suffix != ".ipynb" else _cells(text)
    shown = f"---\nsearch: {{exclude: true}}\n---\n# {path.name}\n\n`{name(path)}`\n\n{code}\n"
    return File.generated(config, f"{name(path)}.md", content=shown, inclusion=InclusionLevel.NOT_IN_NAV)


def _cells(notebook: str) -> str:
    """Return the cells of a notebook as Markdown."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(notebook)["cells"]]
    return "\n\n".join(f"````python\n{text}\n````" if kind == "code" else text for kind, text in cells)


def _described(row: re.Match[str]) -> str:
    """Replace a row of the Python API by a mkdocstrings directive, which shows signature and docstring."""
    short = row[1].rpartition(".")[2]
    return f"::: {_object_path(row)}\n    options: {{heading: {row[1]}, toc_label: {short}}}\n\n"


def _object_path(row: re.Match[str]) -> str:
    module = row[2].removesuffix("/__init__").replace("/", ".")
    return f"{module}.{row[1].rpartition('.')[2]}"


def _with_anchors() -> Callable[[re.Match[str]], str]:
    """Return how to link a name in the index of the Python API: to its description.

    The link has the anchor of the description, because all descriptions were once on the index page.
    """
    rows = [row for page in sorted((DOCS / "api").glob("*.md")) for row in API_ROW.finditer(page.read_text("utf-8"))]
    paths = {row[1].rpartition(".")[2]: _object_path(row) for row in rows}

    def linked_name(link: re.Match[str]) -> str:
        return f"[`{link[1]}`]({link[2]}.md#{paths[link[1]]}){{#{paths[link[1]]}}}"

    return linked_name


def _navigation() -> list[Any]:
    nav: list[Any] = [{"Home": "README.md"}, {"All pages": "docs/README.md"}]
    titles: list[str] = []
    for line in (DOCS / "README.md").read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"##(#*) (.+)", line):
            titles[len(heading[1]) :] = [heading[2]]
        elif line.startswith("|"):
            for _, target, _ in LINK.findall(line.split("|")[1]):
                _section(nav, titles).append(name(Path(os.path.normpath(DOCS / target))))
    for title, patterns in OUTSIDE.items():
        _section(nav, ["Reference", title]).extend(map(name, _outside(patterns)))
    return nav


def _section(nav: list[Any], titles: list[str]) -> list[Any]:
    """Return the navigation list below these headings; create it if necessary."""
    for title in titles:
        found = next((item[title] for item in nav if isinstance(item, dict) and title in item), None)
        if found is None:
            nav.append({title: (found := [])})
        nav = found
    return nav


def _outside(patterns: tuple[str, ...]) -> list[Path]:
    """Return the matching pages, sorted by folder, README first."""
    found = [page for pattern in patterns for page in ROOT.glob(pattern)]
    return sorted(found, key=lambda page: (page.parent, page.name != "README.md", page.name))
