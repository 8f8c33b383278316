"""The changelog, and what a release is made by."""

import datetime
import re
import subprocess

import pytest
import yaml

from tests.packaging.dist import PYTHONS
from tests.packaging.metadata import EXAMPLE, OURS, VERSION
from tests.packaging.release import problem, sections
from tests.table import table

from .conftest import ROOT

WORKFLOWS = {p.stem: yaml.safe_load(p.read_text("utf-8")) for p in (ROOT / ".github" / "workflows").glob("*.yml")}
PYPROJECT = (ROOT / "pyproject.toml").read_text("utf-8")
(VERSION_HERE,) = VERSION.findall(PYPROJECT)
SOURCE = re.findall(r'^urls\.Source = "(.*)"$', PYPROJECT, re.M)[0]
DATED = f"# Changelog\n\n## {VERSION_HERE} (2027-01-31)\n\nText.\n"


def test_the_changelog_begins_with_this_version():
    version, date = sections((ROOT / "CHANGELOG.md").read_text("utf-8"))[0]
    assert version == VERSION_HERE
    assert date is None or date <= datetime.date.today()


@table(
    ("text", "what"),
    [
        ("", "newest version"),
        ("## 1.0.0\n", "write: ## 0.1.0"),
        ("## 1.0 (unreleased)\n", "write: ## 0.1.0"),
        ("## 1.0.0 (2027-02-30)\n", "day"),
        ("## 1.0.0 (unreleased)\n## 1.0.0 (2027-01-31)\n", "each once"),
        ("## 0.9.0 (unreleased)\n## 0.10.0 (2027-01-31)\n", "newest version comes first"),
        ("## 1.1.0 (2027-01-31)\n## 1.0.0 (unreleased)\n", "have a date"),
        ("## 1.1.0 (2027-01-31)\n## 1.0.0 (2027-02-01)\n", "none before"),
    ],
)
def test_a_changelog_with_a_fault_is_refused(text, what):
    with pytest.raises(ValueError, match=what):
        sections(text)


@table(
    ("tag", "changelog", "repository", "what"),
    [
        (f"v{VERSION_HERE}", DATED, SOURCE, None),
        (f"v{VERSION_HERE}", DATED, "", None),
        ("v9.9.9", DATED, SOURCE, "type: make metadata VERSION=9.9.9"),
        (f"v{VERSION_HERE}", DATED.replace("2027-01-31", "unreleased"), SOURCE, "write: ## "),
        (f"v{VERSION_HERE}", "## 9.9.9 (2027-01-31)\n", SOURCE, "write: ## "),
        (f"v{VERSION_HERE}", DATED, "https://github.com/somebody/fork", "correct urls"),
    ],
)
def test_what_is_not_ready_is_not_released(tag, changelog, repository, what):
    found = problem(tag, changelog, PYPROJECT, repository)
    assert found == "" if what is None else what in found


def test_all_distributions_are_built():
    """What `make dist` builds is each project that git knows."""
    tracked = subprocess.run(
        ["git", "ls-files", "*pyproject.toml"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert {ROOT / line for line in tracked.stdout.split()} == {p / "pyproject.toml" for p in (ROOT, *OURS, EXAMPLE)}
    assert [f"Programming Language :: Python :: {version}" in PYPROJECT for version in PYTHONS] == [True] * len(PYTHONS)


def test_workflows_pin_what_they_use_and_ask_for_no_more_than_they_need():
    assert set(WORKFLOWS) == {"ci", "release"}
    for name, workflow in WORKFLOWS.items():
        assert workflow["permissions"] == {"contents": "read"}, name
        for job in workflow["jobs"].values():
            for step in job["steps"]:
                assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step.get("uses", f"a/b@{0:040}")), step
                if step.get("uses", "").startswith("actions/checkout@"):
                    assert step["with"]["persist-credentials"] is False
    jobs = WORKFLOWS["release"]["jobs"]
    assert [name for name, job in jobs.items() if "permissions" in job] == ["publish"]


def test_a_release_builds_with_make_dist_and_publishes_that_by_who_it_is():
    build, publish = (WORKFLOWS["release"]["jobs"][name] for name in ("build", "publish"))
    typed = [step["run"] for step in build["steps"] if "run" in step]
    assert typed == ['python -m tests.packaging.release "$GITHUB_REF_NAME"', "make dist"]
    assert publish["needs"] == "build"
    assert publish["environment"] == "pypi"
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["steps"][-1]["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert not [step for step in publish["steps"] if "password" in step.get("with", {}) or "run" in step]
    handed = [step["with"] for job in (build, publish) for step in job["steps"] if "artifact" in step.get("uses", "")]
    assert [(of["name"], of["path"]) for of in handed] == [("dist", "dist/")] * 2


def test_ci_runs_both_tiers():
    job = WORKFLOWS["ci"]["jobs"]["test"]
    assert job["strategy"]["matrix"]["target"] == ["test", "test-all"]
    assert job["steps"][-1]["run"] == "make ${{ matrix.target }}"
    assert [line.rpartition(" ")[2] for line in (ROOT / ".ci" / "run").read_text().splitlines()[-2:]] == [
        "test",
        "test-all",
    ]


def test_issues_are_asked_for_in_forms_that_can_be_shown():
    """As GitHub reads them: what a form has to have, and what makes it refuse one."""
    forms = [yaml.safe_load(p.read_text("utf-8")) for p in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml")]
    assert len({form["name"] for form in forms}) == len(forms) == 3
    for form in forms:
        assert form["description"]
        labels = [field["attributes"]["label"] for field in form["body"]]
        assert len(set(labels)) == len(labels)
        for field in form["body"]:
            options = field["attributes"].get("options", [""])
            assert all(isinstance(o, str) or o["label"] for o in options), "YAML reads yes and no as something else"
            assert field["type"] in ("checkboxes", "dropdown", "input", "textarea")
    assert any("astuner doctor --json" in field["attributes"]["label"] for form in forms for field in form["body"])
