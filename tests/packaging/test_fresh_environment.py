"""What a person gets who installs our wheels, and a stranger's beside them."""

import importlib.metadata
import itertools
import json
import re
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from astuner.contracts.hookspecs import KINDS
from astuner_testing.plugins import HEAVY
from tests.packaging import metadata as packaging_metadata
from tests.packaging.metadata import wanted

from .conftest import ROOT, Environment, build_wheel, metadata, pyproject, run, with_ours

ACME = ROOT / "examples" / "plugins" / "astuner-acme"
DOWNSTREAM = ROOT / "tests" / "packaging" / "downstream"
CPU = ROOT / "plugins" / "astuner_ray" / "cpu"
"""What both of the next need; no plugin."""
CPU_SUPPORT = {name: ROOT / "plugins" / f"astuner_{name}" / "cpu" for name in ("verl", "trinity")}
PROJECTS = [ROOT, *sorted((ROOT / "plugins").iterdir())]
TYPE = "type: make metadata"


def listed(environment, *flags):
    return {p["dist"]: p for p in json.loads(environment.astuner(*flags, "plugins", "--json"))}


def test_the_fresh_environment_has_the_cores_dependencies_and_nothing_heavy(fresh):
    code = "import importlib.metadata as m, json; print(json.dumps(sorted(d.name.lower() for d in m.distributions())))"
    there = set(json.loads(fresh.run("-c", code)))
    assert {"omegaconf", "packaging", "pluggy", "psutil", "pydantic", "python-dotenv", "typer"} <= there
    asked_for_by_typer = {"rich"}
    assert there & {*HEAVY, "pytest", "astuner-local"} <= asked_for_by_typer


def test_a_strangers_plugin_is_found_and_listed(fresh):
    acme = listed(fresh)["astuner-acme"]
    assert (acme["name"], acme["version"], acme["status"]) == ("acme", "1.0.0", "loaded")
    assert list(acme["provides"]["judge"]) == ["word_overlap"]
    assert "acme" not in listed(fresh, "-p", "no:acme")["astuner-acme"]["provides"]
    assert listed(fresh, "-p", "no:acme")["astuner-acme"]["status"] == "disabled"


def experiment(folder, judge, section=""):
    path = folder / "experiment.yaml"
    (folder / "tasks.jsonl").write_text('{"question": "2 + 2?"}\n')
    (folder / "workflow.py").write_text("class W:\n    async def execute(self, workflow_task, model_tuner): ...\n")
    path.write_text(
        f"astuner:\n  model:\n    path: x\n  task_judge:\n    judge: {judge}\n{section}"
        "  debug:\n    engine: openai\n  rollout:\n    workflow: workflow.py->W\n"
        "  task_reader:\n    type: jsonl\n    jsonl:\n      training:\n        file_path: tasks.jsonl\n"
    )
    return path


def test_an_experiment_uses_it_by_name(fresh, tmp_path):
    good = experiment(tmp_path, "word_overlap", "    word_overlap:\n      partial: false\n")
    fresh.astuner("config", "check", good)
    wrong = experiment(tmp_path, "word_overlap", "    word_overlap:\n      partail: false\n")
    assert "did you mean partial" in fresh.astuner("config", "check", wrong, code=1)
    assert "did you mean word_overlap" in fresh.astuner("config", "check", experiment(tmp_path, "word_overlp"), code=1)


def test_help_imports_nothing_heavy(fresh):
    code = (
        "import sys\nfrom astuner.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'omegaconf', 'pydantic', 'yaml', 'rich', 'astuner_acme.judge'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    assert "Usage: astuner" in fresh.run("-c", code)


@pytest.fixture(scope="module")
def author(tmp_path_factory, fresh, wheels):
    """What `fresh` has, and what an author of plugins uses."""
    see = fresh.folder.glob("lib/python*/site-packages")
    environment = Environment(tmp_path_factory.mktemp("author") / "venv", see=see)
    environment.install("--no-deps", wheels["astuner-testing"])
    return environment


def test_what_only_authors_use_is_a_package_of_its_own(fresh):
    shown = run(fresh.python, "-c", "from astuner.testing import check_judge", code=1)
    assert "astuner.testing.check_judge needs a separate package: pip install astuner-testing" in shown
    assert "pip install astuner-testing" in fresh.astuner("new", "experiment", "sums", code=2)


def test_it_passes_the_conformance_checks_there(author):
    author.run(
        "-c",
        "from astuner import WorkflowOutput\n"
        "from astuner.testing import check_judge, check_plugin, workflow_task\n"
        "from astuner_acme.judge import WordOverlapJudge\n"
        "check_plugin('acme')\n"
        "output = WorkflowOutput(metadata={'final_answer': 'red house'})\n"
        "assert check_judge(WordOverlapJudge(), workflow_task(answer='a red house'), output).reward == 0.8\n",
    )


def test_the_doctor_finds_nothing_that_stops_a_run(fresh):
    findings = json.loads(fresh.astuner("doctor", "--json"))
    assert [f for f in findings if f["level"] == "fail"] == []
    assert {f["what"] for f in findings if f["level"] == "warn"} >= {"backbones"}


def variant(tmp_path, name, *, dist=None, plugin=None, requires="astuner-core>=0.1,<0.2", code=None):
    """Build a changed copy of the third party's plugin."""
    dist, plugin = dist or f"astuner-{name}", plugin or name
    package = f"astuner_{name}"
    project = tmp_path / dist
    (project / package).mkdir(parents=True)
    text = (ACME / "pyproject.toml").read_text().replace("astuner_acme", package).replace("astuner-acme", dist)
    text = re.sub(r'"astuner-core[^"]*"', f'"{requires}"', text).replace("\nacme =", f"\n{plugin} =")
    (project / "pyproject.toml").write_text(text)
    (project / "README.md").write_text("x")
    for source in (ACME / "astuner_acme").glob("*.py"):
        (project / package / source.name).write_text(source.read_text().replace("astuner_acme", package))
    if code is not None:
        (project / package / "plugin.py").write_text(code)
    return build_wheel(project, tmp_path / "wheels")


def test_broken_strangers_leave_everything_else_working(fresh, tmp_path):
    (tmp_path / "wheels").mkdir()
    wrong_hook = "from astuner import hookimpl\n\n@hookimpl\ndef register_judgez():\n    return {}\n"
    broken = [
        variant(tmp_path, "lost", code="import a_library_nobody_installed\n"),
        variant(tmp_path, "typo", code=wrong_hook),
        variant(tmp_path, "old", requires="astuner-core<0.1"),
        variant(tmp_path, "same"),  # registers the judge that acme registers
        variant(tmp_path, "twin", plugin="typo"),  # calls its plugin as another one does
    ]
    other = Environment(tmp_path / "venv", see=fresh.folder.glob("lib/python*/site-packages"))
    other.install("--no-deps", *broken)
    astuner = (other.python, "-m", "astuner")
    found = {p["dist"]: p for p in json.loads(run(*astuner, "plugins", "--json"))}
    assert {dist: p["status"] for dist, p in found.items()} == {
        "astuner-core": "loaded",
        "astuner-acme": "loaded",
        "astuner-debug": "loaded",
        "astuner-models": "loaded",
        "astuner-lost": "broken",
        "astuner-old": "incompatible",
        "astuner-same": "loaded",
        "astuner-twin": "duplicate",
        "astuner-typo": "duplicate",
    }
    assert "a_library_nobody_installed" in found["astuner-lost"]["reason"]
    assert "needs astuner-core<0.1, but 0.1" in found["astuner-old"]["reason"]
    assert "-p no:" in found["astuner-twin"]["reason"]
    without_twin = {p["dist"]: p for p in json.loads(run(*astuner, "-p", "no:astuner-twin", "plugins", "--json"))}
    assert without_twin["astuner-typo"]["status"] == "broken"
    assert "register_judgez" in without_twin["astuner-typo"]["reason"]
    table = run(*astuner, "plugins")
    assert "INCOMPATIBLE" in table
    run(*astuner, "plugins", "--strict", code=1)
    run(*astuner, "--help")
    clash = run(*astuner, "config", "check", experiment(tmp_path, "word_overlap"), code=1)
    assert "acme/word_overlap" in clash
    assert "same/word_overlap" in clash
    run(*astuner, "config", "check", experiment(tmp_path, "acme/word_overlap"))
    run(*astuner, "-p", "no:same", "config", "check", experiment(tmp_path, "word_overlap"))


def test_what_astuner_new_writes_installs_and_its_tests_pass(fresh, author, wheels, third_parties, tmp_path):
    """A plugin of every kind there is, in an environment that sees the wheels' environment, and what others publish."""
    kinds = re.findall(r"^  (--\w+)  ", run(author.python, "-m", "astuner", "new", "plugin", "--help"), re.M)
    author.run("-m", "astuner", "new", "plugin", "shop", *kinds, "--into", tmp_path)
    project = tmp_path / "astuner-shop"
    (tmp_path / "wheels").mkdir()
    wheel = build_wheel(project, tmp_path / "wheels")
    see = [*fresh.folder.glob("lib/python*/site-packages"), third_parties]
    other = Environment(tmp_path / "venv", see=see)
    ours = ("astuner-agentscope", "astuner-debug", "astuner-math", "astuner-report", "astuner-testing")
    other.install("--no-deps", wheel, *with_ours(wheels, *ours))
    shown = run(other.python, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "tests", cwd=project)
    assert re.search(r"^25 passed", shown, re.M), shown
    found = {p["dist"]: p for p in json.loads(run(other.python, "-m", "astuner", "plugins", "--json"))}["astuner-shop"]
    assert (found["status"], len(found["provides"])) == ("loaded", len(KINDS))
    author.run("-m", "astuner", "new", "plugin", "older", "--alias", "--model", "--into", tmp_path)  # of no kind
    other.install("--no-deps", build_wheel(tmp_path / "astuner-older", tmp_path / "wheels"))
    tests = tmp_path / "astuner-older" / "tests"
    shown = run(other.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests, cwd=tests.parent)
    assert "3 passed" in shown, shown
    author.run("-m", "astuner", "new", "experiment", "sums", "--into", tmp_path)
    shown = run(other.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", ".", cwd=tmp_path / "sums")
    assert "1 passed" in shown
    file = tmp_path / "sums" / "sums.yaml"
    run(other.python, "-m", "astuner", "config", "check", file, "astuner.debug.engine=openai")  # nothing local is here


def test_plugins_built_for_the_release_before_run_as_they_are(wheels, third_parties, tmp_path):
    """Wheels and tests of strangers, from before; see `downstream/README.md`."""
    other = Environment(tmp_path / "venv", see=[third_parties])
    older = sorted(DOWNSTREAM.glob("*.whl"))
    other.install("--no-deps", *older, *with_ours(wheels, "astuner-compat", "astuner-env", "astuner-testing"))
    tests = shutil.copytree(DOWNSTREAM / "tests", tmp_path / "tests")  # out of reach of this project's settings
    shown = run(other.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests, cwd=tmp_path)
    assert "15 passed" in shown, shown
    found = {dist: plugin["status"] for dist, plugin in listed(other).items()}
    assert (found["astuner-acme"], found["astuner-older"]) == ("loaded", "loaded")


WALK = """
from astuner import Environment, StepResult, Task


class Walk(Environment):
    @classmethod
    def tasks(cls, split, params):
        return [Task(task_id=f"{split}-1"), Task(task_id=f"{split}-2")]

    def reset(self, task):
        self.left = int(task.task_id.rpartition("-")[2])
        return StepResult(observation=f"{self.left} to go")

    def step(self, action):
        self.left -= action["content"] == "walk"
        return StepResult(observation=f"{self.left} to go", reward=float(not self.left), terminated=not self.left)

    def evaluate(self):
        return float(not self.left)
"""


def test_environments_are_listed_and_played_with_what_the_wheels_bring(wheels, tmp_path):
    other = Environment(tmp_path / "venv")
    other.install(*with_ours(wheels, "astuner-appworld", "astuner-testing"))
    plugins = listed(other)
    assert {dist: plugins[dist]["status"] for dist in ("astuner-env", "astuner-appworld")} == {
        "astuner-env": "loaded",
        "astuner-appworld": "loaded",
    }
    found = {row["name"]: row for row in json.loads(other.astuner("env", "list", "--json"))}
    assert found["appworld"]["missing"] == "astuner env setup appworld"
    assert found["frozen_lake"]["missing"] == 'pip install "astuner-env[gymnasium]"'
    other.run("-c", "from astuner.testing import check_plugin\nfor name in ('env', 'appworld'): check_plugin(name)")
    (tmp_path / "walk.py").write_text(WALK)
    tried = ("env", "try", f"{tmp_path / 'walk.py'}->Walk", "train-2", "--json")
    events = [json.loads(line) for line in other.astuner(*tried, stdin="walk\nstand\nwalk\n").splitlines()]
    assert [event["event"] for event in events] == ["start", "step", "step", "step", "end"]
    assert (events[-1]["reason"], events[-1]["reward"], events[-1]["evaluation"]["score"]) == ("terminated", 1, 1)


TRINITY = """
from astuner import Provider, hookimpl


@hookimpl
def register_backbones():
    return {"trinity": Provider(target="astuner_trinity.backbone:TrinityBackbone", conflicts=("astuner-verl",))}
"""


def test_verl_is_listed_without_being_there_and_refuses_to_live_beside_trinity(fresh, wheels, tmp_path):
    other = Environment(tmp_path / "venv", see=fresh.folder.glob("lib/python*/site-packages"))
    other.install("--no-deps", *with_ours(wheels, "astuner-verl"))
    astuner = (other.python, "-m", "astuner")
    train = (*astuner, "run", experiment(tmp_path, "word_overlap"), "--backbone")

    def installed():
        return {p["dist"]: p for p in json.loads(run(*astuner, "plugins", "--json"))}

    backbone = installed()["astuner-verl"]["provides"]["backbone"]["verl"]
    assert {"verl", "ray", "transfer_queue"} <= set(backbone["missing"])
    assert backbone["install"] in run(*astuner, "plugins", "-v")
    lacking = run(*train, "verl", code=2)
    assert "needs verl, which is not installed" in lacking
    assert "pip install" in lacking
    import_it = "from astuner_verl.native import WITHOUT_FLASH_ATTENTION, platform_settings as of"
    asked = f"{import_it}\nassert of({{}}) == WITHOUT_FLASH_ATTENTION\nof({{'VERL_PLATFORM': 'cpu'}})"
    assert "pip install -e plugins/astuner_verl/cpu" in run(other.python, "-c", asked, code=1)

    (tmp_path / "wheels").mkdir()
    other.install("--no-deps", variant(tmp_path, "trinity", code=TRINITY))
    assert {installed()[dist]["status"] for dist in ("astuner-verl", "astuner-trinity")} == {"loaded"}
    for mine, others in (("verl", "astuner-trinity"), ("trinity", "astuner-verl")):
        refused = run(*train, mine, code=2)
        assert f"cannot share an environment with {others} " in refused
        assert f"python3 -m venv .venv-{mine}" in refused
        assert f"pip uninstall {others}" in refused


def test_the_wheels_hold_what_is_needed_and_nothing_more(wheels):
    for dist, wheel in wheels.items():
        names = zipfile.ZipFile(wheel).namelist()
        tops = {n.partition("/")[0] for n in names}
        package = "astuner" if dist == "astuner-core" else dist.replace("-", "_")
        packages = {package, "astune"} if dist == "astuner-compat" else {package}  # the first name of astuner
        assert {t for t in tops if not t.endswith(".dist-info")} == (packages if dist != "astuner" else set()), dist
        if dist == "astuner":  # no code: what it brings is in its dependencies
            continue
        assert f"{package}/py.typed" in names, dist
        assert not [n for n in names if "__pycache__" in n or n.startswith("tests/")], dist
        ours = [n for n in names if not n.startswith("astuner_testing/templates/")]  # those hold tests for others
        assert not [n for n in ours if "/test_" in n or n.endswith(("/conftest.py", ".pyc"))], dist
        root = _folder_of(package).parent
        here = {p.relative_to(root).as_posix() for name in packages for p in (root / name).rglob("*") if p.is_file()}
        assert {n for n in here if "__pycache__" not in n} == {n for n in names if ".dist-info/" not in n}, dist
    assert [n for n in zipfile.ZipFile(wheels["astuner-testing"]).namelist() if n.endswith(".template")]
    for backbone in (*CPU_SUPPORT, "ray"):
        assert not [name for name in zipfile.ZipFile(wheels[f"astuner-{backbone}"]).namelist() if "cpu" in name]
    appworld = set(zipfile.ZipFile(wheels["astuner-appworld"]).namelist())
    # run by path, in another interpreter
    scripts = ("probe.py", "synthetic/__main__.py", "synthetic/evaluations/answer.txt")
    assert {f"astuner_appworld/{name}" for name in scripts} <= appworld


def test_an_sdist_holds_what_git_knows_and_nothing_else(wheels):
    made_by_the_builder = {"PKG-INFO", ".gitignore"}
    for folder in (ROOT, *packaging_metadata.OURS):
        (sdist,) = wheels[pyproject(folder)["project"]["name"]].parent.glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
        tracked = set(run("git", "ls-files", cwd=folder).splitlines())
        assert not names - made_by_the_builder - tracked, sdist.name
        assert {"LICENSE", "README.md", "pyproject.toml"} <= names, sdist.name
        assert not [name for name in names if name.startswith("cpu/")], sdist.name


def _folder_of(package):
    """Where the sources of a package lie."""
    projects = (ROOT / "astuner_core", *(ROOT / "plugins").iterdir(), CPU, *CPU_SUPPORT.values(), ACME)
    (folder,) = (p for p in projects if (p / package).is_dir())
    return folder / package


def test_versions_agree_and_every_plugin_bounds_what_is_ours():
    import astuner

    projects = [pyproject(p)["project"] for p in PROJECTS]
    assert {p["version"] for p in projects} == {astuner.__version__}
    major, minor = astuner.__version__.split(".")[:2]
    bound = f">={major}.{minor},<{major}.{int(minor) + 1}"
    for project in projects[1:]:
        needed = [*project["dependencies"], *itertools.chain(*project.get("optional-dependencies", {}).values())]
        ours = [re.sub(r"\[.*?\]", "", text) for text in needed if text.startswith("astuner-")]
        assert f"astuner-core{bound}" in ours, project["name"]
        assert all(text.endswith(bound) for text in ours), f"{project['name']}: {ours}"
        installed = importlib.metadata.version(project["name"])
        assert installed == project["version"], f"{project['name']} {installed} is installed; type: make"
    for backbone, folder in CPU_SUPPORT.items():
        support = pyproject(folder)["project"]
        assert support["version"] == astuner.__version__
        wanted = {f"astuner-{name}=={astuner.__version__}" for name in (backbone, "cpu")}
        assert wanted <= set(support["dependencies"])
    assert pyproject(CPU)["project"]["version"] == astuner.__version__


def test_all_distributions_say_alike_what_the_roots_project_says():
    for path, text in wanted().items():
        assert path.read_text("utf-8") == text, f"{path.parent.name}: {TYPE}"
        assert path.with_name("LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes(), f"{path.parent.name}: {TYPE}"


def test_a_new_version_is_given_to_all_that_has_one(tmp_path, monkeypatch):
    """On a copy: one command, and nothing of ours still says the old one or excludes the new one."""
    names = [p.relative_to(ROOT) for p in wanted()]
    for name in [Path("pyproject.toml"), Path("LICENSE"), Path("astuner_core/astuner/__init__.py"), *names]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    moved = {n: tmp_path / getattr(packaging_metadata, n).relative_to(ROOT) for n in ("ROOT", "EXAMPLE")}
    moved["OURS"] = [tmp_path / folder.relative_to(ROOT) for folder in packaging_metadata.OURS]
    for name, value in moved.items():
        monkeypatch.setattr(packaging_metadata, name, value)
    packaging_metadata.main("3.4.5")
    for folder in (tmp_path, *moved["OURS"]):
        said = pyproject(folder)["project"]
        assert said["version"] == "3.4.5"
        needed = [*said["dependencies"], *itertools.chain(*said.get("optional-dependencies", {}).values())]
        ours = [Requirement(text) for text in needed if text.startswith("astuner")]
        assert all(of.specifier.contains("3.4.5") and not of.specifier.contains("3.5.0") for of in ours), said["name"]
    assert '"astuner-core>=3.4,<3.5"' in (tmp_path / names[-1]).read_text()
    lines = (tmp_path / "astuner_core/astuner/__init__.py").read_text().splitlines()
    assert {'__version__ = "3.4.5"', 'API_VERSION = "3.4"'} <= set(lines)


def test_a_wheel_says_what_its_project_says(wheels):
    for project in PROJECTS:
        said = pyproject(project)["project"]
        shown = metadata(wheels[said["name"]])
        assert (shown["Version"], shown["License-Expression"]) == (said["version"], "Apache-2.0"), said["name"]
        assert shown["Summary"].startswith("ASTuner: "), said["name"]
        assert shown.get_payload().lstrip().startswith("# "), said["name"]
        relative = re.findall(r"\]\((?!https?:|#)[^)\s]*\)", shown.get_payload())
        assert not relative, f"{said['name']}: {relative[0]} leads nowhere on an index"
        assert shown["License-File"] == "LICENSE", said["name"]
        needed = {re.split(r"[ \[<>=!;~]", line)[0].lower() for line in shown.get_all("Requires-Dist")}
        named = [*said["dependencies"], *itertools.chain(*said.get("optional-dependencies", {}).values())]
        assert needed == {re.split(r"[ \[<>=!;~]", line)[0].lower() for line in named}, said["name"]


def test_what_a_newcomer_installs_from_a_clone_is_what_the_package_astuner_names():
    said = pyproject(ROOT / "plugins" / "astuner")["project"]["dependencies"]
    named = {re.split(r"[<>=]", text)[0] for text in said} | {"astuner"}
    lines = (ROOT / "requirements" / "newcomer.txt").read_text().splitlines()
    paths = [line.removeprefix("-e ").removeprefix("plugins/") for line in lines if not line.startswith("#")]
    assert {"astuner-core" if path == "." else path.replace("_", "-") for path in paths} == named


ALONE = [p.name.replace("_", "-") for p in PROJECTS[1:] if p.name != "astuner"]


@pytest.mark.parametrize("dist", ALONE)
def test_it_installs_alone_with_the_core_and_what_it_names(dist, wheels, third_parties, tmp_path):
    """Of ours nothing else is there; what others publish is."""
    other = Environment(tmp_path / "venv", see=[third_parties])
    other.install("--no-deps", *with_ours(wheels, dist))
    package = dist.replace("-", "_")
    other.run("-W", "error::FutureWarning:astuner", "-c", f"import {package}")
    ours = {found["dist"]: found for found in json.loads(run(other.python, "-m", "astuner", "plugins", "--json"))}
    assert {d: p["reason"] for d, p in ours.items() if p["status"] != "loaded"} == {}
    folder = ROOT / "plugins" / package
    if "entry-points.astuner]" in (folder / "pyproject.toml").read_text():
        assert dist in ours
        kinds = [kind for kind, names in ours[dist]["provides"].items() if names]
        assert kinds, f"{dist} has a plugin that offers nothing"
