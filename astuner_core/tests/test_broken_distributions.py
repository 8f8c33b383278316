"""Distributions that are broken in every way that was thought of, on ``sys.path`` of a real ``astuner plugins``.

``python -m astuner_core.tests.test_broken_distributions 1000 SEED`` breaks as many at random.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

from astuner_core.tests.test_mutated_files import mutated

GOOD = '[judge.polite]\ntarget = "json:loads"\n'
RAISES = "class E(BaseException):\n    def __str__(self):\n        raise self\nraise E"
MODULES = {
    "system_exit": "raise SystemExit(0)",
    "keyboard_interrupt": "raise KeyboardInterrupt",
    "generator_exit": "raise GeneratorExit",
    "base_exception": "class E(BaseException): pass\nraise E('mine')",
    "str_raises": "class E(Exception):\n    def __str__(self):\n        raise ValueError('again')\nraise E",
    "str_raises_itself": RAISES,
    "half_a_surrogate": "raise ValueError('\\udc80 \\x1b[2J \\0')",
    "long": "raise ValueError('x' * 10**6)",
    "no_module": None,
    "not_python": "def (",
    "not_utf8": b"x = '\xff'\n",
    "nul": b"x = 1\0",
    "recursion": "def f(): f()\nf()",
    "memory": "raise MemoryError",
    "is_no_module": "import sys\nclass M:\n    def __getattr__(self, name):\n        raise SystemExit(name)\n"
    "sys.modules[__name__] = M()",
    "aliases_raise": "from astuner import hookimpl\n@hookimpl\ndef register_aliases():\n    raise SystemExit",
    "aliases_wrong": "from astuner import hookimpl\n@hookimpl\ndef register_aliases():\n    return {('judge', 'x'): 5}",
    "aliases_no_dict": "from astuner import hookimpl\n@hookimpl\ndef register_aliases():\n    return 5",
    "requires_wrong": "from astuner import Provider, hookimpl\n@hookimpl\ndef register_judges():\n"
    "    return {'x': Provider(target='json:loads', requires=5)}",
}
"""Name -> what the module of the plugin holds."""
TABLES = {
    "toml_cut": "[judge.polite\n",
    "toml_not_utf8": b"[judge.polite]\ntarget = '\xff'\n",
    "toml_no_table": "judge = 5\n",
    "toml_aliases": "aliases = 5\n",
    "toml_aliases_of_kind": "[aliases]\njudge = 5\n",
    "toml_aliases_wrong": "[aliases.judge]\npolite = 5\n",
    "toml_requires": '[judge.polite]\ntarget = "json:loads"\nrequires = 5\n',
    "toml_target": "[judge.polite]\ntarget = 5\n",
    "toml_deep": "x = " + "[" * 3000 + "]" * 3000,
    "toml_folder": "",
}
"""Name -> what its ``plugin.toml`` holds."""
INFO = {
    "points_not_utf8": ("entry_points.txt", b"[astuner]\n\xff = x\n"),
    "points_no_value": ("entry_points.txt", b"[astuner]\npoints_no_value\n"),
    "points_wrong_value": ("entry_points.txt", b"[astuner]\npoints_wrong_value = !!\n"),
    "metadata_not_utf8": ("METADATA", b"Name: \xff\n"),
    "metadata_empty": ("METADATA", b""),
    "metadata_no_version": ("METADATA", b"Metadata-Version: 2.1\nName: metadata-no-version\n"),
    "metadata_requires": ("METADATA", b"Name: metadata-requires\nVersion: 1\nRequires-Dist: !!\n"),
    "metadata_missing": ("METADATA", None),
}
"""Name -> the file of its ``.dist-info`` that is another, and what it holds."""


def plant(site: Path, name: str, *, module: str | bytes | None = "", tables: str | bytes = GOOD) -> Path:
    """Install a plugin into ``site``; its ``.dist-info``."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[astuner]\n{name} = planted_{name}\n")
    if module is not None:
        package = site / f"planted_{name}"
        package.mkdir()
        (package / "__init__.py").write_bytes(module if isinstance(module, bytes) else module.encode())
        (package / "plugin.toml").write_bytes(tables if isinstance(tables, bytes) else tables.encode())
    return info


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    for name, module in MODULES.items():
        plant(folder, name, module=module)
    for name, tables in TABLES.items():
        plant(folder, name, tables=tables)
    toml = folder / "planted_toml_folder" / "plugin.toml"
    toml.unlink()
    toml.mkdir()
    for name, (file, content) in INFO.items():
        where = plant(folder, name) / file
        where.unlink()
        if content is not None:
            where.write_bytes(content)
    plant(folder, "whole")
    plant(folder, "prints", module="print('hello')")
    plant(folder, "needs_broken", tables=f'{GOOD}requires = ["planted_system_exit.sub", ""]\n')
    return folder


def astuner(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "astuner", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)


def test_each_is_listed_with_the_reason_and_the_others_work(site: Path):
    shown = astuner(site, "plugins", "--json")
    assert (shown.returncode, "Traceback" in shown.stderr) == (0, False), shown.stderr
    found = {plugin["name"]: plugin for plugin in json.loads(shown.stdout)}
    broken = {*MODULES, *TABLES, *INFO} - {"metadata_requires"}
    assert {name: found[name]["status"] for name in sorted(broken)} == dict.fromkeys(sorted(broken), "broken")
    assert found["metadata_requires"]["status"] == "incompatible"
    assert all(0 < len(found[name]["reason"]) < 11_000 for name in broken)
    assert all(found[name]["reason"].isprintable() for name in broken)
    assert found["system_exit"]["reason"] == "SystemExit: 0"
    assert found["str_raises"]["reason"] == "E: <E, whose text cannot be made: ValueError>"
    for name in ("points_not_utf8", "metadata_not_utf8"):
        assert f"{site / name}-1.0.dist-info cannot be read (UnicodeDecodeError" in found[name]["reason"]
    for name in ("core", "whole", "prints", "needs_broken"):
        assert (found[name]["status"], found[name]["reason"]) == ("loaded", "")
    assert found["needs_broken"]["provides"]["judge"]["polite"]["missing"] == ["planted_system_exit.sub", ""]


def test_other_commands_work_beside_them_and_a_broken_one_can_be_turned_off(site: Path, tmp_path: Path):
    assert "BROKEN" in (shown := astuner(site, "plugins")).stdout
    assert astuner(site, "plugins", "--strict").returncode == 1
    off = astuner(site, "plugins", "--json", "-p", "no:points_not_utf8")
    assert {p["name"]: p["status"] for p in json.loads(off.stdout)}["points_not_utf8"] == "disabled", shown.stderr
    assert astuner(site, "--help").returncode == 0
    (tmp_path / "tasks.jsonl").write_text('{"query": "1+1"}\n')
    file = tmp_path / "x.yaml"
    file.write_text(
        "astuner:\n  model: {path: tiny-calculator}\n  rollout: {workflow: nobody}\n"
        "  task_reader: {type: jsonl, jsonl: {training: {file_path: tasks.jsonl}}}\n"
    )
    checked = astuner(site, "run", str(file), "--dry-run")
    assert (checked.returncode, "Traceback" in checked.stderr) == (2, False), checked.stderr
    assert "unknown workflow 'nobody'" in checked.stderr


def test_a_name_that_moved_is_found_beside_them(site: Path):
    code = "import astuner\ntry:\n    import astuner.nowhere\nexcept ModuleNotFoundError:\n    print('not there')"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert shown.stdout == "not there\n", shown.stderr


HOOKS = """from astuner import Provider, hookimpl
@hookimpl
def register_judges():
    return {"rude": Provider(target="json:loads", requires=("json",), aliases=("old",))}
@hookimpl
def register_aliases():
    return {("judge", "polite"): ["older"]}
"""
AT_ONCE = 50


def fuzz(number: int, seed: int, folder: Path) -> tuple[Counter[str], list[str], float]:
    """What became of so many mutated plugins; what went wrong; and the longest time that a command took for
    `AT_ONCE` of them."""
    counts, wrong, slowest = Counter[str](), list[str](), 0.0
    for batch in range(0, number, AT_ONCE):
        site = folder / f"site-{batch}"
        site.mkdir()
        plant(site, "whole")
        for i in range(batch, min(number, batch + AT_ONCE)):
            draw, name = random.Random(f"{seed}/{i}"), f"mutated{i}"
            info = plant(site, name, module=HOOKS, tables=f'{GOOD}requires = ["json"]\n[aliases]\njudge.x = ["y"]\n')
            module = site / f"planted_{name}"
            for file in draw.sample(
                [info / "METADATA", info / "entry_points.txt", *sorted(module.iterdir())], draw.choice((1, 1, 2))
            ):
                file.write_bytes(mutated(file.read_text(), draw))
        began = time.perf_counter()
        shown = astuner(site, "plugins", "--json")
        slowest = max(slowest, time.perf_counter() - began)
        try:
            found = json.loads(shown.stdout)
            counts.update(plugin["status"] for plugin in found if "astuner" not in plugin["dist"])
            states = {plugin["name"]: plugin["status"] for plugin in found}
            assert (shown.returncode, states["core"], states["whole"]) == (0, "loaded", "loaded"), states
            assert "Traceback" not in shown.stderr
        except (AssertionError, ValueError, KeyError) as e:
            wrong.append(f"{site}: {e!r}\n{shown.stderr[-3000:]}")
    return counts, wrong, slowest


@pytest.mark.slow
def test_no_mutated_plugin_stops_the_others(tmp_path: Path):
    counts, wrong, _ = fuzz(AT_ONCE, 19, tmp_path)
    assert not wrong, "\n\n".join(wrong)
    assert counts["loaded"] > 1 < counts["broken"], counts


if __name__ == "__main__":
    how, failed, longest = fuzz(int(sys.argv[1]), int(sys.argv[2]), Path(tempfile.mkdtemp()))
    print(dict(how), *failed[:5], f"slowest {longest:.1f} s for {AT_ONCE}, {len(failed)} wrong", sep="\n\n")
