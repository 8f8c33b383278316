"""Runs compared in a real browser: from the list of runs to the token at which two episodes part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("playwright")

from playwright.sync_api import expect

from astuner.contracts.types import Split

from ._runs import HOSTILE, add_metrics, byte_tokenizer, episode, ids, turn, viewing, write_log
from .test_in_browser import chromium, page  # noqa: F401  (fixtures)
from .test_view_compare import STEPS, a_run

pytestmark = pytest.mark.needs("chromium")


def says(
    root: Path, name: str, said: str, reward: float, *, query: str = "", lr: float, judge: str, agent: str
) -> Path:
    """A run of one validation episode, with what its model said."""
    run = a_run(root, name, [], lr=lr, task_judge={"judge": judge})
    one = turn(0, ids(f"What is 2 + 2? {query}"), ids(said), agent=agent)
    made = episode("v7-0", reward, split=Split.VALIDATION, turns=(one,))
    asked = replace(made.workflow_task.task, main_query=query, task_id=f"seven {query}")
    made = replace(made, workflow_task=replace(made.workflow_task, task=asked))
    write_log(run, [(STEPS, made)])
    add_metrics(run, {"step": STEPS, "time": 3.0, HOSTILE: 1.0})
    byte_tokenizer(run / "episodes/tokenizer/tokenizer.json")
    return run


def test_two_runs_are_ticked_compared_and_read_to_where_they_part(page: Any, tmp_path: Path) -> None:  # noqa: F811
    says(tmp_path, "old", "2 + 2 is 5.", 0.0, lr=0.1, judge="exact", agent="solver")
    says(tmp_path, "new", "2 + 2 is 4.", 1.0, lr=0.2, judge="kind", agent="solver")
    with viewing(tmp_path) as viewer:
        page.goto(f"http://127.0.0.1:{viewer.port}/")
        page.get_by_label("compare old").check()
        page.get_by_label("compare new").check()
        page.get_by_test_id("compare").click()
        page.locator('[data-testid="curve"] canvas').first.wait_for()
        expect(page.get_by_test_id("yardsticks")).to_contain_text("judge: astuner.task_judge.judge: exact | kind")
        expect(page.get_by_test_id("groups")).to_contain_text("trainer_common.optim.lr")
        expect(page.get_by_test_id("measures")).to_contain_text("not tested: the judges differ")
        expect(page.get_by_test_id("lost").get_by_test_id("flip")).to_have_count(0)
        page.get_by_test_id("won").get_by_test_id("flip").click()
        parts = page.get_by_test_id("part")
        expect(parts).to_have_count(2)
        assert [part.inner_text() for part in parts.all()] == ["5", "4"]
        assert [part.get_attribute("title") for part in parts.all()] == [f"token {ord(c)}" for c in "54"]
        same = len("What is 2 + 2? ") + len("2 + 2 is ")
        expect(page.get_by_test_id("parting")).to_contain_text(f"The same for {same} tokens")
        page.get_by_test_id("side").nth(1).get_by_role("link").first.click()  # the whole episode, at that token
        expect(page.locator(f'[data-i="{same}"]')).to_have_text("4")
        assert f"token={same}" in page.url
        page.go_back()
        page.keyboard.press("Escape")
        page.get_by_label("validation of A").select_option(f"step {STEPS}")
        assert f"step_a={STEPS}" in page.url
        expect(page.get_by_test_id("won").get_by_test_id("flip")).to_have_count(1)
        page.goto("about:blank")


def test_nothing_of_a_run_becomes_part_of_the_comparison(page: Any, tmp_path: Path) -> None:  # noqa: F811
    turned = "\u202egnp.exe"  # an override of direction, to show another text
    for name, said, reward in (("a", "no", 0.0), ("b", "yes", 1.0)):
        text = f"{HOSTILE}{turned}{said}"
        says(tmp_path, f"{name}{turned}", text, reward, query=HOSTILE + turned, lr=reward, judge=text, agent=text)
    with viewing(tmp_path) as viewer:
        found = viewer.get("/api/runs").ok["runs"]
        names = "&".join(f"run={one['id']}" for one in sorted(found, key=lambda one: one["name"]))
        page.goto(f"http://127.0.0.1:{viewer.port}/#/compare?{names}")
        flip = page.get_by_test_id("flip").first
        flip.wait_for()
        for shown in ("yardsticks", "groups", "won"):
            expect(page.get_by_test_id(shown)).to_contain_text("⟨202e⟩")
        page.get_by_label("Add a metric").select_option(index=1)
        checked(page)
        flip.click()
        expect(page.get_by_test_id("part")).to_have_count(2)
        checked(page)
        page.goto("about:blank")


def checked(page: Any) -> None:  # noqa: F811
    assert "owned" not in page.title()
    assert "\u202e" not in page.locator("main").inner_text()
    assert page.locator("main img, main script, iframe, object, embed").count() == 0
    titles = page.locator("main [title]").evaluate_all("all => all.map(e => e.title)")
    labels = page.locator("main [aria-label]").evaluate_all("all => all.map(e => e.getAttribute('aria-label'))")
    assert not [text for text in (*titles, *labels) if "\u202e" in text]
