"""Redraw the pictures of the documentation.

``python docs/pictures.py [RUNS]`` reads the runs in the folder RUNS (``launcher_record``) and trains the math agent if
its run is missing. It draws the curve of every example with a run, a plan, and (if Chromium is installed) the report
and the viewer. Pictures without a run stay unchanged.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright
from rich.console import CONSOLE_SVG_FORMAT, Console

from astuner.support.json_lines import read_jsonl
from astuner_report.curve import draw_reward_curve

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
NAME = "math_agent"
"""Example shown in all pictures except the curves of other examples."""
RUN = ("run", f"examples/{NAME}/{NAME}.yaml", "--backbone", "local")


def main(runs: Path) -> None:
    if not (runs / NAME / "report.html").is_file():
        astuner(*RUN, f"astuner.experiment_dir={runs}")
    ended = {report.parent.name: report.parent for report in runs.glob("*/report.html")}
    # the main run of examples with several runs
    ended["rubrics"] = runs.parent / "rubrics_runs" / "seed-0" / "learned"
    ended["flywheel"] = runs.parent / "flywheel_runs" / "seed-0" / "again"
    for name, run in ended.items():
        if (ROOT / "examples" / name).is_dir() and (run / "report.html").is_file():
            draw_reward_curve(list(read_jsonl(run / "metrics.jsonl")), ROOT / "examples" / name / "curve.png")
    shutil.copy(ROOT / "examples" / NAME / "curve.png", IMAGES / "reward_curve.png")
    plan = astuner(*RUN, "--dry-run").replace(f"{ROOT}/", "").replace(str(ROOT), "this folder")
    draw_terminal(f"$ astuner {' '.join(RUN)} --dry-run\n{plan}", IMAGES / "plan.svg")
    with tempfile.TemporaryDirectory() as folder:
        astuner("view", str(runs / NAME), "--export", f"{folder}/view.html", "--limit", "20")
        draw_pages({"report": runs / NAME / "report.html", "view": Path(folder) / "view.html"})


def astuner(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "astuner", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def draw_terminal(text: str, path: Path) -> None:
    """Draw ``text`` as in a terminal, in the reader's monospace font: rich's font would be downloaded."""
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=118, file=nowhere)
        console.print(text, markup=False, highlight=False)
    here = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    console.save_svg(str(path), title="", code_format=here, unique_id=path.stem)


def draw_pages(pages: dict[str, Path]) -> None:
    if (chromium := shutil.which("chromium")) is None:
        print(f"{', '.join(pages)}: not drawn because Chromium is not installed; install it: apt-get install chromium")
        return
    with sync_playwright() as playwright:
        # Chromium's sandbox does not work for root. The pages are trusted.
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox"] if os.geteuid() == 0 else []
        )
        page = browser.new_page(viewport={"width": 1100, "height": 700})
        for name, file in pages.items():
            page.goto(file.resolve().as_uri())
            page.wait_for_load_state("networkidle")
            page.screenshot(path=IMAGES / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main(Path(*sys.argv[1:2] or ["launcher_record"]).absolute())
