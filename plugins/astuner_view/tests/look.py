"""Draw all pages of the viewer: ``python -m tests.look FOLDER [LARGE_RUN]`` in ``plugins/astuner_view``.

The runs are a finished one with slices, a running one, a stopped one and an empty one. Each page is drawn in light and
dark mode, and on a phone. Errors in the console are printed.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from ._runs import viewing
from ._sliced import as_running, sliced_run

LOOKS = {
    "light": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True},
}


def main(folder: Path, large: Path | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="view-look-"))
    sliced_run(root / "invoices-lr-1e-5")
    sliced_run(root / "invoices-lr-5e-6", gain=0.2, lr=5e-6)
    running = sliced_run(root / "invoices-running", steps=7, ended=False)
    sliced_run(root / "invoices-stopped", steps=5, ended=False)
    (root / "empty").mkdir()
    shutil.copy(running / "resolved.yaml", root / "empty")
    first, second = "invoices-lr-1e-5", "invoices-lr-5e-6"
    pages = {
        "runs": "#/",
        **{f"run-{name}": f"#/run/invoices-{name}" for name in ("lr-1e-5", "running", "stopped")},
        "run-empty": "#/run/empty",
        "episodes-empty": "#/run/empty/episodes",
        "tasks": f"#/run/{first}?tab=tasks",
        "steps": f"#/run/{first}?tab=steps&step=4",
        "config": f"#/run/{first}?tab=config",
        "episodes": f"#/run/{first}/episodes?where=layout%3Dscanned&where=split%3Dvalidation",
        "compare": f"#/compare?run={first}&run={second}",
        **{
            f"episode-{view}": f"#/run/{first}/episode/g1-2?view={view}"
            for view in ("messages", "tokens", "tree", "lanes")
        },
    }
    if large is not None:
        (root / "large").symlink_to(large.absolute())
        pages |= {"run-large": "#/run/large", "episodes-large": "#/run/large/episodes?where=layout%3Dtwo"}
    with as_running(running), viewing(root) as viewer, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for look, settings in LOOKS.items():
            page = browser.new_context(**settings).new_page()
            page.on("console", lambda said: print("console:", said.text) if said.type in ("error", "warning") else None)
            for name, path in pages.items():
                page.goto("about:blank")
                page.goto(f"http://127.0.0.1:{viewer.port}/{path}")
                page.locator("h1").first.wait_for(state="attached")
                page.locator('[role="status"]').wait_for(state="detached")
                page.wait_for_timeout(1500 if "large" in name else 600)
                page.screenshot(path=folder / f"{name}-{look}.png")
                if page.evaluate("document.body.scrollWidth > innerWidth"):
                    print(name, look, "is wider than the screen")
            page.goto("about:blank")
        browser.close()
    shutil.rmtree(root)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
