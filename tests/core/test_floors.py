"""The house has floors: a module imports lower ones only, and nothing heavy when it is imported."""

import ast
from pathlib import Path

import pytest

import astuner
from astuner.testing.plugins import HEAVY as HEAVY_TO_LIST

ROOT = Path(__file__).parents[2]
CORE = Path(astuner.__file__).parent

FLOORS = {
    0: "errors types json_lines untrusted",
    1: "task_reader workflow judge environment environment_setup older_environment older_state service backbone"
    " log_sink processes aside http_client http_connections isolation strict_json listening threads diagnosis"
    " breakpoints debugger debug_session metric_names access_file queueing locks collector",
    2: "hookspecs plugins registry user_code config",
    3: "rollout chat endpoint model_tuner objective schedule training experiment launch serving plan curve report books"
    " tasks interrupt run_dir native token_check env_service sandbox companions ray_cluster ray_node ray_worker"
    " ray_fleet export completions_engine step_states"
    " replay compare episode_log telemetry sink_threads sentinel run_report helper_models",
    4: "builtin served",
    5: "cli templates __main__",
}
FLOOR_OF = {module: floor for floor, modules in FLOORS.items() for module in modules.split()}
BESIDE = "testing"
TRAINING = "training"
"""The room that a running backbone's trainer imports, and nobody else of the core: it may need torch at once."""
HEAVY = {*HEAVY_TO_LIST, "peft", "swanlab", "tokenizers", "trl"} - {"numpy"}
LONGEST = 400


def imports(tree, *, at_import_only):
    """Absolute names imported by a module, without those for type checkers only."""
    left = list(ast.iter_child_nodes(tree))
    while left:
        node = left.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            left += node.orelse
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and at_import_only:
            continue
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write the whole module name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            left += ast.iter_child_nodes(node)


def room(name):
    """``astuner.config.places`` -> ``config``; a public name (``astuner.Task``) -> the room it lives in."""
    parts = name.split(".")
    if len(parts) < 2 or parts[0] != "astuner":
        return None
    return astuner._HOME.get(parts[1], parts[1]).partition(".")[0]


def breach(own_room, tree):
    """The first import that goes up, or None."""
    for name in imports(tree, at_import_only=False):
        other = room(name)
        if other in (None, "__version__", own_room):
            continue
        if other == BESIDE:
            return f"{name}: nothing in the house may need the testing kit"
        floor = 3 if own_room == BESIDE else FLOOR_OF[own_room]
        if FLOOR_OF[other] > floor:
            return f"{name} is on floor {FLOOR_OF[other]}, {own_room} on floor {floor}"
    return None


def heavy(tree, own_room=None):
    """What a module must not import when it is imported; the room for trainers counts as torch does."""
    names = imports(tree, at_import_only=True)
    found = {TRAINING if room(name) == TRAINING else name.partition(".")[0] for name in names}
    return sorted(found & (HEAVY - {"torch"} if own_room == TRAINING else HEAVY | {TRAINING}))


def parse(path):
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


MODULES = sorted(p for p in CORE.rglob("*.py") if p != CORE / "__init__.py")
PLUGIN_MODULES = sorted(p for p in (ROOT / "plugins").glob("*/astuner_*/**/*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(CORE)))
def test_a_module_imports_lower_floors_only(path):
    own = path.relative_to(CORE).parts[0].removesuffix(".py")
    assert own in FLOOR_OF or own == BESIDE, f"on which floor is {own}? say so in FLOORS"
    assert breach(own, parse(path)) is None


@pytest.mark.parametrize("path", [CORE / "__init__.py", *MODULES], ids=lambda p: str(p.relative_to(CORE)))
def test_no_module_of_the_core_imports_anything_heavy(path):
    assert heavy(parse(path), path.relative_to(CORE).parts[0]) == []


@pytest.mark.parametrize(
    "path", [CORE / "__init__.py", *MODULES, *PLUGIN_MODULES], ids=lambda p: "/".join(p.parts[-3:])
)
def test_no_module_is_too_long_and_each_says_what_it_is(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST
    assert ast.get_docstring(parse(path)), f"{path} does not say what it is for"


def test_there_are_plugins_to_look_at():
    assert {p.parts[-2] for p in PLUGIN_MODULES} >= {"astuner_local", "astuner_math"}


@pytest.mark.parametrize("path", PLUGIN_MODULES, ids=lambda p: "/".join(p.parts[-3:]))
def test_a_plugin_uses_what_is_public_and_no_other_plugin(path):
    package = path.relative_to(ROOT / "plugins").parts[1]
    for name in imports(parse(path), at_import_only=False):
        top = name.partition(".")[0]
        assert not top.startswith("astuner_") or top == package, f"{path} imports another plugin: {name}"
        assert room(name) not in ("builtin", "cli", "templates", BESIDE), f"{path} imports {name}"
    if path.name == "plugin.py":
        assert heavy(parse(path)) == []


@pytest.mark.parametrize(
    ("own", "text", "says"),
    [
        ("types", "import astuner.errors", None),
        ("judge", "from astuner.types import Task", None),
        ("judge", "from astuner import Task", None),
        ("judge", "from astuner.registry import find", "floor 2"),
        ("judge", "def late():\n    from astuner import load_config", "floor 2"),
        ("judge", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from astuner.cli import main", None),
        ("rollout", "import astuner.builtin.jsonl", "floor 4"),
        ("config", "import json, astuner.testing.fakes", "testing kit"),
        ("testing", "from astuner.cli import main", "floor 5"),
        ("testing", "from astuner.launch import run", None),
    ],
)
def test_a_breach_would_be_seen(own, text, says):
    found = breach(own, ast.parse(text))
    assert found is None if says is None else says in found


def test_a_heavy_import_would_be_seen():
    assert heavy(ast.parse("try:\n    import torch.nn\nexcept ImportError:\n    pass")) == ["torch"]
    assert heavy(ast.parse("class A:\n    from rich import print\n    def f(self):\n        import ray")) == ["rich"]
    of_a_trainer = ast.parse("import torch\nfrom astuner.training import optim")
    assert heavy(of_a_trainer, "rollout") == ["torch", "training"]
    assert heavy(of_a_trainer, "training") == []
    assert heavy(ast.parse("import torch, ray"), "training") == ["ray"]
