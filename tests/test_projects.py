"""What a package imports is what its pyproject names: no more of ours, and nothing of others that is not said."""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.table import table

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest there

ROOT = Path(__file__).resolve().parents[1]
PROJECTS = [
    ROOT / "astuner_core" / "astuner",
    *sorted(folder for pattern in ("*/astuner_*", "*/cpu/astuner_*") for folder in (ROOT / "plugins").glob(pattern)),
]
NAMES = {
    "bs4": "beautifulsoup4",
    "docx": "python-docx",
    "dotenv": "python-dotenv",
    "hydra": "hydra-core",
    "mlflow": "mlflow-skinny",
    "markdown_it": "markdown-it-py",
    "opentelemetry": "opentelemetry-sdk",
    "transfer_queue": "transferqueue",
    "trinity": "trinity-rft",
    "yaml": "pyyaml",
}
"""Module -> the distribution that has it, where that is called otherwise."""
WITH_THE_CORE = {
    "omegaconf", "packaging", "pluggy", "psutil", "pydantic", "pydantic-core", "python-dotenv", "pyyaml", "typer",
}  # fmt: skip
"""The core's dependencies, and what those bring: pydantic has pydantic-core, omegaconf has PyYAML."""
NOT_NAMED = {
    "astuner": {
        "pandas": "for users of `RunResult.to_pandas`",
        "jinja2": "with transformers, whose tokenizers it is for",
        "openai": "for who asks for an openai client, and has it",
        "transformers": "where a backbone has it",
    },
    "astuner_appworld": {
        name: "in the interpreter that AppWorld has"
        for name in ("appworld", "fastapi", "fastapi-login", "freezegun", "ipython", "pytest", "traitlets")
    },
    "astuner_cpu": {"verl": "with the backbone that imports that module"},
    "astuner_datasets": {"huggingface-hub": "with datasets"},
    "astuner_debug": {"pydevd": "with debugpy", "ray": "where a backbone has it"},
    "astuner_flywheel": {
        "google": "protobuf, with opentelemetry-proto",
        "numpy": "with datasketch",
        "opentelemetry-sdk": "opentelemetry.proto, which is opentelemetry-proto",
    },
    "astuner_helpers": {"agentscope": "for who names a model class of AgentScope, and has it"},
    "astuner_local": {"tokenizers": "with transformers"},
    "astuner_models": {
        "ipython": "part of every notebook",
        "huggingface-hub": "with datasets, or with transformers",
        "transformers": "where a backbone has it",
    },
    "astuner_objectives": {"torch": "the backbone's to choose"},
    "astuner_ray": {
        "numpy": "with the engine, as the next two",
        "torch": "the engine's to choose",
        "transformers": "the engine's to choose",
    },
    "astuner_sandbox": {"agentscope": "for who gives the tool to an agent of AgentScope"},
    "astuner_testing": {
        "tokenizers": "with transformers",
        "torch": "where a loss is",
        "transformers": "where a tokenizer is",
    },
    "astuner_trinity": {"hydra-core": "with verl", "torch": "with verl"},
    "astuner_trinity_cpu": {
        name: "with astuner-trinity or astuner-cpu" for name in ("ray", "torch", "trinity-rft", "verl")
    },
    "astuner_verl": {"torch": "with verl"},
    "astuner_verl_cpu": {name: "with astuner-verl or astuner-cpu" for name in ("ray", "torch", "verl")},
}
"""What a package may import without naming it, and where it comes from then."""


def _imported(package: Path) -> set[str]:
    """Top-level modules that it imports when it runs, wherever in its code; not those for type checkers alone."""
    found = set()
    for file in package.rglob("*.py"):
        for node in _running(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {package.name, "_pytest"}


def _running(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from itertools.chain.from_iterable(map(_running, child.orelse))
            yield from child.orelse
            continue
        yield child
        yield from _running(child)


def _project(package: Path) -> dict[str, set[str]]:
    """What its pyproject names, without versions: ``always``, ``extras``, and for its ``tests``."""
    folder = ROOT if package.name == "astuner" else package.parent
    said = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    extras = itertools.chain(*said["project"].get("optional-dependencies", {}).values())
    named = {
        "always": said["project"]["dependencies"],
        "extras": extras,
        "tests": said.get("dependency-groups", {}).get("test", ()),
    }
    return {where: {_name(text) for text in texts} for where, texts in named.items()}


def _name(requirement: str) -> str:
    return re.split(r"[\s\[<>=!;~]", requirement)[0].lower().replace("_", "-")


@table("package", PROJECTS, ids=lambda path: path.name)
def test_it_names_what_it_imports(package: Path) -> None:
    named = _project(package)
    imported = {NAMES.get(module, module.lower().replace("_", "-")) for module in _imported(package)}
    imported = {"astuner-core" if name == "astuner" else name for name in imported}
    excused = {*WITH_THE_CORE, *NOT_NAMED.get(package.name, {})}
    if "astuner-agentscope" in named["extras"]:
        excused.add("agentscope")  # its extras v1 and v2 bring it
    assert imported - named["always"] - named["extras"] - excused == set()
    assert {*NOT_NAMED.get(package.name, {})} - imported == set(), "excused, and not imported"


@table("package", PROJECTS[1:], ids=lambda path: path.name)
def test_it_names_no_package_of_ours_that_it_does_not_import(package: Path) -> None:
    named = _project(package)
    ours = {name for name in named["always"] if name.startswith("astuner-")}
    imported = {module.replace("_", "-") for module in _imported(package)}
    for_its_cpu = {f"astuner-{package.name.split('_')[1]}"} if package.name.endswith("_cpu") else set()
    assert ours - imported - for_its_cpu <= {"astuner-core"}
    lent = {"astuner-agentscope"}  # for AgentScope itself
    assert {name for name in named["extras"] if name.startswith("astuner-")} - imported - lent == set()


@table("tests", sorted((ROOT / "plugins").glob("*/tests")), ids=lambda path: path.parent.name)
def test_its_tests_import_what_of_ours_it_names_or_its_test_group_names(tests: Path) -> None:
    """What they need without importing it, `make test-packages` finds out."""
    named = _project(tests)
    own = tests.parent.name.replace("_", "-")
    imported = {name for module in _imported(tests) if (name := module.replace("_", "-")).startswith("astuner-")}
    assert imported - named["always"] - named["tests"] - {own} == set()
    assert named["tests"] & {*named["always"], own} == set(), "named twice"
    assert named["tests"] <= {p.name.replace("_", "-") for p in PROJECTS}, "of ours; of others: requirements/test.txt"
