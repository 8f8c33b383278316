"""The page in a real browser: Debian's Chromium without a window, on real runs of the local backbone.

Whatever the page writes to the console, asks another host for, or lets text of an episode do, fails the test.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest

pytest.importorskip("pyarrow")

pytest.importorskip("playwright")

from playwright.sync_api import expect, sync_playwright

from astuner import RunDir
from astuner.contracts.types import Episode, Split, WorkflowOutput
from astuner_record.episode_log import EpisodeLog
from astuner_record.exam import add_label
from astuner_report.run_report import write_report
from astuner_view.page import STATIC

from ._runs import HOSTILE, add_metrics, byte_tokenizer, credited, episode, make_run, turn, viewing, write_log
from ._sliced import as_running, sliced_run

pytestmark = pytest.mark.needs("chromium")

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/math_agent/math_agent.yaml"
WEB = Path(__file__).resolve().parents[3] / "plugins/astuner_view/web"
BUILT = "built"
VIEWS = ("messages", "tokens", "tree", "lanes")
NAMED = "attack \u202ekcatta \u2066"
"""A run's name with an override of the direction of writing."""
BLUE, AMBER = "trained", "generated, not trained"


def running(root: Path, steps: int) -> subprocess.Popen[str]:
    """`astuner run` of the example with the local backbone, in the background."""
    command = [
        *(sys.executable, "-m", "astuner", "run", str(EXAMPLE), "--backbone", "local", "--no-resume"),
        f"astuner.experiment_dir={root}",
        f"astuner.trainer_common.total_steps={steps}",
        "astuner.trainer_common.test_freq=1000",
        "astuner.data.train_batch_size=3",
        "astuner.data.max_validation_tasks=4",
        "astuner.rollout.num_repeat=4",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an ended run of three steps."""
    folder = tmp_path_factory.mktemp("launcher_record")
    process = running(folder, 3)
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    return folder


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox"] if os.geteuid() == 0 else [],  # Chromium refuses to run as root with its sandbox
        )
        yield browser
        browser.close()


expect.set_options(timeout=60_000)


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    """A page that may do nothing but show what it is given."""
    context = chromium.new_context(viewport={"width": 1400, "height": 900})
    context.set_default_timeout(60_000)
    made = context.new_page()
    wrong: list[str] = []
    made.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    made.on(
        "console", lambda said: wrong.append(f"console: {said.text}") if said.type in ("error", "warning") else None
    )
    made.on("dialog", lambda dialog: (wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    made.on("request", lambda asked: wrong.append(f"request: {asked.url}") if _is_foreign(asked.url) else None)
    yield made
    context.close()
    assert wrong == []


def _is_foreign(url: str) -> bool:
    return not re.match(r"(http://127\.0\.0\.1:|file:|data:|blob:)", url)


def colour(token: Any) -> tuple[float, float, float]:
    """The background of a token: red, green and blue."""
    said = token.evaluate("e => getComputedStyle(e).backgroundColor")
    red, green, blue, *_ = (float(n) for n in re.findall(r"[\d.]+", said.removeprefix("color(srgb")))
    return red, green, blue


def facts(page: Any, token: Any) -> str:
    """What the page says of a token when the mouse is on it."""
    token.scroll_into_view_if_needed()
    token.hover()
    return str(page.get_by_test_id("tooltip").inner_text())


def number(said: str, name: str) -> float:
    """The number that follows ``name`` in what the page says."""
    found = re.search(rf"{name}\s+(\S+)", said)
    assert found, said
    return float(found.group(1).replace("\N{MINUS SIGN}", "-"))


def generated(page: Any, trained: str) -> Any:
    return page.locator(f'[data-testid="token"][data-trained="{trained}"]')


def test_an_episode_of_a_real_run_is_found_and_its_tokens_are_read(page: Any, root: Path) -> None:
    with EpisodeLog(root / "math_agent") as log:
        listed = next(e for e in log.list(["split=train"]) if any(c.advantage for c in log.credit(e.episode_id)))
        logged = log.read(listed)
    first = logged.episode.turns[0].generation
    with viewing(root) as viewer:
        page.goto(f"http://127.0.0.1:{viewer.port}/")
        page.get_by_test_id("run-row").first.click()
        page.locator('[data-testid="curve"] canvas').first.wait_for()
        page.keyboard.press("e")
        page.get_by_test_id("episode-row").first.wait_for()
        page.keyboard.press("/")
        page.keyboard.type(listed.query)
        expect(page.get_by_test_id("filter-chip")).to_have_count(1)
        page.get_by_role("button", name="where …").click()
        page.get_by_label("A condition").fill(f"group={listed.group_id}")
        page.keyboard.press("Enter")
        expect(page.get_by_test_id("filter-chip")).to_have_count(2)
        expect(page.get_by_test_id("episode-row")).to_have_count(4)
        page.locator(f'[data-episode="{listed.episode_id}"]').click()
        page.get_by_test_id("verdict").wait_for()
        page.keyboard.press("2")
        tokens = generated(page, "1")
        tokens.first.wait_for()

        at = min(range(len(first.logprobs)), key=first.logprobs.__getitem__)  # the one that surprised most
        token = tokens.nth(at)
        red, _, blue = colour(token)
        assert blue > red, "a trained token is blue"
        said = facts(page, token)
        assert BLUE in said
        assert int(token.get_attribute("data-token-id")) == first.response_ids[at]
        assert number(said, "logprob") == pytest.approx(first.logprobs[at], abs=1e-3)
        assert number(said, "advantage") == pytest.approx(logged.credit[0].advantage, rel=1e-3)
        assert number(said, "importance ratio") == pytest.approx(1, abs=1e-3), "on-policy"
        assert f"version {first.policy_version}" in said

        token.click()
        link = page.url
        assert "token=" in link
        page.goto("about:blank")
        page.goto(link)  # a colleague opens it
        assert BLUE in facts(page, generated(page, "1").nth(at))
        page.goto("about:blank")


def test_tokens_of_a_validation_are_amber(page: Any, root: Path) -> None:
    with EpisodeLog(root / "math_agent") as log:
        listed = log.list(["split=validation"], limit=1)[0]
    with viewing(root) as viewer:
        page.goto(f"http://127.0.0.1:{viewer.port}/#/run/math_agent/episode/{listed.episode_id}?view=tokens")
        token = generated(page, "0").first
        token.wait_for()
        red, _, blue = colour(token)
        assert red > blue, "a generated token that is not trained is amber"
        said = facts(page, token)
        assert AMBER in said
        assert "validation" in said
        assert generated(page, "1").count() == 0
        page.goto("about:blank")


def newest(page: Any) -> int:
    """The last step that the page shows."""
    return max(int(row.get_attribute("data-step")) for row in page.get_by_test_id("step-row").all())


def test_a_run_is_followed_while_it_trains(page: Any, tmp_path: Path) -> None:
    process = running(tmp_path, 1000)
    try:
        deadline = time.monotonic() + 240
        while not list(tmp_path.glob("*/metrics.jsonl")) and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.2)
        with viewing(tmp_path) as viewer:
            page.goto(f"http://127.0.0.1:{viewer.port}/#/run/math_agent?tab=steps")
            page.locator('[data-testid="live-dot"][data-state="running"]').first.wait_for()
            steps = page.get_by_test_id("step-row")
            steps.first.wait_for(timeout=120_000)
            seen = newest(page)
            while newest(page) <= seen + 1:  # nobody touches the page
                assert time.monotonic() < deadline
                page.wait_for_timeout(200)
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)
            page.locator('[data-testid="live-dot"]:not([data-state="running"])').first.wait_for()
            page.goto("about:blank")  # before the viewer ends
    finally:
        process.kill()
        process.communicate()


def test_the_single_page_shows_the_same_without_a_server(page: Any, root: Path, tmp_path: Path) -> None:
    to = tmp_path / "one.html"
    command = [sys.executable, "-m", "astuner", "view", str(root / "math_agent"), "--export", str(to), "--limit", "30"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page.context.set_offline(True)
    page.goto(to.as_uri())
    page.locator('[data-testid="curve"] canvas').first.wait_for()
    page.keyboard.press("e")
    row = page.get_by_test_id("episode-row").first
    row.wait_for()
    with EpisodeLog(root / "math_agent") as log:
        first = log.read(row.get_attribute("data-episode")).episode.turns[0].generation
    row.click()
    page.get_by_test_id("verdict").wait_for()
    page.keyboard.press("2")
    token = page.locator('[data-testid="token"]:not([data-trained="prompt"])').first
    token.wait_for()
    assert int(token.get_attribute("data-token-id")) == first.response_ids[0]
    assert number(facts(page, token), "logprob") == pytest.approx(first.logprobs[0], abs=1e-3)


def hostile_task(of: Episode) -> Episode:
    task = replace(of.workflow_task.task, task_id=HOSTILE, main_query=HOSTILE, metadata={"answer": HOSTILE})
    return replace(of, workflow_task=replace(of.workflow_task, task=task, group_id=HOSTILE))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which every text of an episode tries to become part of the page."""
    folder = tmp_path_factory.mktemp("hostile")
    run = make_run(folder / NAMED, ended=True)
    call = {
        "id": HOSTILE,
        "type": "function",
        "function": {"name": HOSTILE, "arguments": json.dumps({HOSTILE: HOSTILE})},
    }
    attack = tuple(HOSTILE.encode())
    turns = (
        turn(0, attack, attack, agent=HOSTILE, branch_reason=HOSTILE, request=({"role": HOSTILE, "content": HOSTILE},),
             message={"role": "assistant", "content": HOSTILE, "tool_calls": [call]},
             tools=({"type": "function", "function": {"name": HOSTILE, "description": HOSTILE}},)),
        turn(1, (*attack, *attack, 65), attack, 0, agent=HOSTILE),
    )  # fmt: skip
    said = WorkflowOutput(reward=1.0, response=HOSTILE, metadata={HOSTILE: HOSTILE}, metrics={HOSTILE: 1.0})
    more = {"turns": turns, "output": said}
    good = hostile_task(episode("g0-0", 1.0, **more))
    failed = hostile_task(episode("g0-1", None, error=HOSTILE, **more))
    checked = episode("v0-0", 1.0, split=Split.VALIDATION, **more)
    named = replace(good.workflow_task, episode_id=HOSTILE)
    write_log(run, [(1, good), (1, failed), (0, checked), (2, replace(good, workflow_task=named))], {1: credited(good)})
    add_metrics(run, {"step": 2, "time": 102.0, HOSTILE: 1.0})
    with EpisodeLog(run) as log:
        add_label(run, log.find("g0-0").id, "g0-0", "bad", HOSTILE)
    byte_tokenizer(run / "episodes/tokenizer/tokenizer.json")
    alarm = {"step": 1, "time": 1.0, "rule": HOSTILE, "severity": "error", "message": HOSTILE, "advice": HOSTILE}
    (run / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")
    return folder


SPOOFED = """() => {
  const turned = /[\\u202a-\\u202e\\u2066-\\u2069]/, found = []
  const walker = document.createTreeWalker(document, NodeFilter.SHOW_TEXT | NodeFilter.SHOW_ELEMENT)
  for (let node; (node = walker.nextNode());) {
    if (node.parentElement?.id === "astuner-data") continue
    const names = ["title", "aria-label", "placeholder"]
    const shown = node.nodeType === 3 ? [node.data] : names.map((name) => node.getAttribute(name))
    found.push(...shown.filter((text) => turned.test(text)))
  }
  return found
}"""
"""Texts in the page, and in what pops up or is read out, with characters that turn the direction of writing."""


def test_no_text_of_an_episode_becomes_part_of_the_page(page: Any, hostile: Path, tmp_path: Path) -> None:
    to = tmp_path / "attack.html"
    command = [sys.executable, "-m", "astuner", "view", str(hostile / NAMED), "--export", str(to)]
    assert subprocess.run(command, capture_output=True).returncode == 0
    with viewing(hostile) as viewer:
        (run,) = (one["id"] for one in viewer.get("/api/runs").ok["runs"])
        episodes = [quote(name, safe="") for name in ("g0-0", "g0-1", HOSTILE)]
        metric, condition = urlencode({"m": HOSTILE}), urlencode({"where": f"group={HOSTILE}"})
        for start in (f"http://127.0.0.1:{viewer.port}/", to.as_uri()):
            page.goto("about:blank")
            page.goto(start)
            page.locator("h1").first.wait_for()
            assert page.evaluate(SPOOFED) == []
            of_run = (f"?{metric}", "?tab=steps&step=1", "/episodes", f"/episodes?{condition}")
            for where in (*of_run, *(f"/episode/{e}?view={v}" for e in episodes for v in VIEWS)):
                page.goto("about:blank")
                page.goto(f"{start}#/run/{run}{where}")
                expect(page.locator("body")).to_contain_text("owned")  # it is shown, as text
                expect(page.locator("body")).to_contain_text("⟨202e⟩")
                assert page.evaluate(SPOOFED) == [], where
                assert page.title() != "owned"
                assert page.locator("img, iframe, object, embed").count() == 0
                assert page.locator("script:not([src])").count() <= 2  # those of the single page: its data and itself
            page.goto("about:blank")


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's sources, with the packages that they are built and looked at with."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    source = tmp_path_factory.mktemp("source") / "web"
    shutil.copytree(WEB, source, ignore=shutil.ignore_patterns("node_modules"))
    npm(source, "ci", "--no-audit", "--no-fund")
    return source


def npm(source: Path, *command: str) -> None:
    done = subprocess.run(["npm", *command], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, f"npm {command}: {done.stdout[-3000:]}{done.stderr[-3000:]}"


LOOKS = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True},
}
AXE = """async () => (await axe.run()).violations.map(
  ({ id, nodes }) => `${id}: ${nodes.map((node) => node.html).join(" ").slice(0, 500)}`)"""
STICKING_OUT = """() => [...document.querySelectorAll(".cols > *, dd, h1, .facts *")]
  .filter((e) => e.clientWidth > 1 && e.scrollWidth > e.clientWidth + 5 && getComputedStyle(e).overflowX === "visible")
  .map((e) => e.outerHTML.slice(0, 200))"""
"""What prints over its neighbour."""


@pytest.mark.timeout(600)  # the registry may be slow
@pytest.mark.parametrize("look", LOOKS)
def test_every_page_is_accessible(chromium: Any, web: Path, hostile: Path, root: Path, look: str) -> None:
    """By axe-core's rules, all of them; and nothing prints over anything else."""
    axe = (web / "node_modules/axe-core/axe.min.js").read_text(encoding="utf-8")
    with EpisodeLog(root / "math_agent") as log:
        episode_id = log.list(["split=train"], limit=1)[0].episode_id
    for copy in ("math_agent", "again"):
        shutil.copytree(root / "math_agent", hostile / copy, dirs_exist_ok=True)
    if not (hostile / "sliced").exists():
        sliced_run(hostile / "sliced")
        sliced_run(hostile / "live", ended=False)
        make_bare(hostile / "bare")
    context = chromium.new_context(**LOOKS[look])
    page = context.new_page()
    errors: list[str] = []
    page.on("console", lambda said: errors.append(said.text) if said.type in ("error", "warning") else None)
    with as_running(hostile / "live"), viewing(hostile) as viewer:
        runs = {one["id"] for one in viewer.get("/api/runs").ok["runs"]}
        (attacked,) = runs - {"math_agent", "again", "sliced", "live", "bare"}
        paths = ["#/", "#/nowhere", "#/run/none", f"#/compare?run=math_agent&run={attacked}"]
        both = "#/compare?run=math_agent&run=again&step_a=0"
        paths += [both, f"{both}&left=math_agent/{episode_id}&right=again/{episode_id}"]
        for run, of in (("math_agent", episode_id), (attacked, "g0-0"), (attacked, "g0-1")):
            paths += [f"#/run/{run}{more}" for more in ("", "?tab=steps&step=1", "?tab=config", "/episodes")]
            paths += [f"#/run/{run}/episode/{of}?view={view}" for view in VIEWS]
        sliced = ("", "?tab=tasks", "?tab=config", "/episodes?where=layout%3Dscanned", "/episode/g1-2?view=tokens")
        paths += [f"#/run/sliced{more}" for more in sliced]
        paths += ["#/run/live", "#/run/bare", "#/run/bare/episodes", "#/compare?run=sliced&run=live"]
        wrong = {}
        for path in dict.fromkeys(paths):
            page.goto("about:blank")
            page.goto(f"http://127.0.0.1:{viewer.port}/{path}")
            page.locator("h1").first.wait_for(state="attached")
            page.locator('[role="status"]').wait_for(state="detached")  # what is on its way is there
            page.evaluate(axe)
            found = [*page.evaluate(AXE), *page.evaluate(STICKING_OUT)]
            found += ["wider than the screen"] if page.evaluate("document.body.scrollWidth > innerWidth") else []
            found += ["no h1, or two"] if page.locator("h1").count() != 1 else []
            if found:
                wrong[path] = found
        page.goto("about:blank")
    context.close()
    assert not wrong, json.dumps(wrong, indent=1)
    assert [text for text in errors if "404" not in text] == []  # pages of runs that do not exist


def test_a_run_is_read_from_its_verdict_to_the_transcripts(page: Any, tmp_path: Path) -> None:
    sliced_run(tmp_path / "sliced")
    live = sliced_run(tmp_path / "live", steps=7, ended=False)
    with viewing(tmp_path) as viewer:
        at = f"http://127.0.0.1:{viewer.port}/"
        page.goto(f"{at}#/run/sliced")
        outcome = page.get_by_test_id("outcome")
        expect(outcome).to_contain_text("Best validation")
        expect(outcome).to_contain_text("24 tasks")
        held_out = page.locator('[data-testid="curve"][data-name="val/success"]').first
        alarm = page.get_by_test_id("alarm").first
        tops = [part.bounding_box()["y"] for part in (outcome, held_out, alarm, page.locator("dl.facts"))]
        assert tops == sorted(tops), "verdict, held-out curve, current alarms, the rest"
        expect(page.get_by_test_id("past-alarms")).to_contain_text("zero signal (step 1)")
        expect(page.get_by_test_id("errors")).to_have_count(0)
        expect(page.get_by_test_id("limits")).to_contain_text("12 episodes")

        page.locator('[data-value="scanned"]').get_by_role("link").last.click()  # a number, and its transcripts
        expect(page.get_by_test_id("episode-row")).to_have_count(8)
        page.get_by_role("button", name="layout", exact=True).click()
        page.get_by_role("button", name="two columns").click()
        expect(page.get_by_test_id("episode-row")).to_have_count(8)
        expect(page.locator('[data-condition="layout=two columns"]')).to_have_count(1)

        page.get_by_role("link", name="won and lost").click()
        expect(page.get_by_test_id("lost").get_by_test_id("flip")).to_have_count(4)
        page.get_by_label("validation before").select_option("step 8")
        expect(page).to_have_url(re.compile("before=8"))
        page.get_by_test_id("lost").get_by_role("link", name="transcript of step 12").first.click()
        page.get_by_test_id("verdict").wait_for()
        page.goto("about:blank")
        with as_running(live):
            page.goto(f"{at}#/run/live")
            expect(page.get_by_test_id("progress")).to_contain_text("10 of 64")
            expect(page.get_by_test_id("remaining")).to_have_text("about 14\u2009min left")
            state = json.loads((live / "progress.json").read_text())
            state |= {"phase": "validation", "done": 3, "total": 24, "remaining_seconds": None}
            (live / "progress.json").write_text(json.dumps(state))
            expect(page.get_by_test_id("progress")).to_contain_text("validation 3 of 24")  # live
            expect(page.get_by_test_id("remaining")).to_have_text("remaining time not known yet")
        expect(page.get_by_test_id("stopped")).to_be_visible()  # its process is gone
        page.goto("about:blank")


def make_bare(run: Path, backbone: str = "local") -> Path:
    """Make a run without metrics and episodes."""
    make_run(run)
    (run / "metrics.jsonl").unlink()
    (run / "resolved.yaml").write_text(f"astuner: {{backbone: {backbone}, model: {{path: tiny-calculator}}}}")
    return run


def test_a_run_without_metrics_shows_what_to_do(page: Any, tmp_path: Path) -> None:
    run = make_bare(tmp_path / "bare")
    write_log(make_bare(tmp_path / "tried", "debug"), [(0, episode())])
    with viewing(tmp_path) as viewer:
        at, note = f"http://127.0.0.1:{viewer.port}/#/run", page.get_by_test_id("note")
        page.goto(f"{at}/bare")
        expect(note).to_contain_text("Run its command again to start it")
        with as_running(run):
            page.goto("about:blank")
            page.goto(f"{at}/bare")
            expect(note).to_contain_text("The first step has not finished")
        (run / "summary.json").write_text("{}")
        expect(note).to_contain_text("See run.log")
        for more, text in ("bare/episodes", "This run has no episodes"), ("tried", "A debug run checks the agent"):
            page.goto(f"{at}/{more}")
            expect(page.locator(".page")).to_contain_text(text)
        assert page.locator(".problem").or_(page.get_by_test_id("outcome")).count() == 0
        page.goto("about:blank")


def test_an_axis_fits_its_values(page: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "zeros")
    for step in range(1, 13):
        add_metrics(run, {"step": step, "time": 100.0 + step, "adv/zero_group_frac": 0.0, "entropy": 1.0})
    with viewing(tmp_path) as viewer:
        page.goto(f"http://127.0.0.1:{viewer.port}/#/run/zeros")
        page.locator('[data-testid="curve"] canvas').last.wait_for()
        ranges = page.locator('[data-testid="curve"] .plot').evaluate_all(
            "all => Object.fromEntries(all.map((e) => [e.closest('figure').dataset.name, e.dataset.range]))"
        )
        assert ranges["adv/zero_group_frac"] == "0 12, 0 0.1"
        assert ranges["entropy"].startswith("0 12, 0.9")
        page.goto("about:blank")


def test_the_report_logs_no_error(page: Any, tmp_path: Path) -> None:
    run = sliced_run(tmp_path / "sliced")
    write_report(RunDir(run), {})
    page.goto((run / "report.html").as_uri())
    page.locator("svg").first.wait_for()  # the fixture fails on any error in the console


def test_the_list_reads_like_an_exam_and_labels_are_given_by_keys(page: Any, tmp_path: Path) -> None:
    said = WorkflowOutput(reward=0.0, response="it is 5")
    attempts = [episode(f"g0-{i}", 0.0, output=said) for i in range(2)]
    failed = [episode(f"g1-{i}", None, error=f"refused at 127.0.0.1:{8000 + i} after {i} s") for i in range(8)]
    run = make_run(tmp_path / "root" / "exam", ended=True)
    write_log(run, [(1, one) for one in (*attempts, *failed)])
    for step in range(1, 9):
        alarm = {"step": step, "time": 1.0, "rule": "same", "severity": "warning", "message": f"{step} %", "advice": ""}
        with (run / "alarms.jsonl").open("a") as file:
            file.write(json.dumps(alarm) + "\n")
    with viewing(run.parent) as viewer:
        at = f"http://127.0.0.1:{viewer.port}/#/run/exam"
        page.goto(at)
        expect(page.get_by_test_id("alarm")).to_have_count(1)
        expect(page.get_by_test_id("times")).to_have_text("8 times since step 1")
        page.get_by_role("link", name="refused at # after # s").click()  # one row, whatever the address
        expect(page.get_by_test_id("episode-row")).to_have_count(8)
        page.get_by_role("button", name="where …").click()
        page.keyboard.type("step=1")  # without a click into the field
        page.keyboard.press("Enter")
        expect(page.get_by_test_id("filter-chip")).to_have_count(2)
        page.get_by_role("button", name="clear all").click()
        first = page.get_by_test_id("episode-row").first
        for text in ("What is g0?", "it is 5", "4", "wrong", "completed"):
            expect(first.get_by_text(text, exact=True).or_(first.get_by_text(f"✗ {text}"))).to_be_visible()
        page.get_by_role("button", name="sort by reward").click()
        expect(page).to_have_url(re.compile("order=reward"))

        first.click()
        expect(page.get_by_test_id("answer")).to_contain_text("it is 5")
        expect(page.get_by_test_id("expected")).to_contain_text("4")
        page.keyboard.press("b")
        label = page.get_by_test_id("label")
        expect(label.get_by_role("button", name="bad")).to_have_attribute("aria-pressed", "true")
        page.get_by_label("why").fill("off by one")
        page.keyboard.press("Enter")
        page.keyboard.press("Escape")
        page.keyboard.press("u")
        expect(page.locator('.tag.bad[title="off by one"]')).to_have_count(1)
        page.get_by_role("button", name="label").click()
        page.get_by_role("button", name="no label").click()
        expect(page.get_by_test_id("episode-row")).to_have_count(9)
        page.goto("about:blank")

    to = tmp_path / "sent.html"
    command = [sys.executable, "-m", "astuner", "view", str(run), "--export", str(to), "--where", "label=bad"]
    assert subprocess.run(command, capture_output=True).returncode == 0
    page.goto(f"{to.as_uri()}#/run/exam/episodes?where=label%3Dbad")
    expect(page.get_by_test_id("episode-row")).to_contain_text("bad")
    page.get_by_test_id("episode-row").click()
    expect(page.get_by_test_id("label")).to_contain_text("off by one")
    page.keyboard.press("g")
    expect(page.get_by_test_id("label").get_by_role("button")).to_have_count(0)  # it shows, and writes nothing


@pytest.mark.timeout(600)  # the registry may be slow
def test_the_page_that_is_packed_is_the_one_in_the_source(web: Path) -> None:
    """Who changes the source builds it again; the pages are compared, byte by byte."""
    for command in (["test"], ["run", "check"], ["run", "build", "--", "--outDir", BUILT]):
        npm(web, *command)

    def content(folder: Path) -> dict[str, bytes]:
        return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    packed, built = content(STATIC), content(web / BUILT)
    assert sorted(packed) == sorted(built)
    differing = [name for name in packed if packed[name] != built[name]]
    assert differing == [], "built from another source; type: cd plugins/astuner_view/web && npm ci && npm run build"
