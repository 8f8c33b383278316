"""The lines that install VERL and Trinity with what generates on GPUs have a solution; nothing is installed."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT

UV = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
GPU_MACHINE = ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28"]
PINS = {
    "verl": {"verl": "0.9.1", "vllm": "0.24.0", "torch": "2.11.0", "transformers": "5.9.0", "tensordict": "0.10.0"},
    "trinity": {"trinity-rft": "0.6.0", "verl": "0.8.0", "torch": "2.11.0", "tensordict": "0.10.0"},
}
"""What the pages promise."""

pytestmark = pytest.mark.skipif(UV is None, reason="uv is not installed; type: pip install uv")


def dry(*words):
    """What uv would do, as it says it: a distribution -> its version, where that is one of an index."""
    done = subprocess.run([UV, *words, "--dry-run"], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return dict(re.findall(r"^ \+ ([\w-]+)(?:==(\S+)| @ \S+)?", done.stderr, re.M))


def command(backbone, page):
    """The one command of the page that has the extra."""
    (found,) = re.findall(rf"^uv pip install .*astuner_{backbone}\[vllm\].*$", page.read_text("utf-8"), re.M)
    return found


@pytest.mark.parametrize("backbone", PINS)
def test_one_command_has_a_solution_for_python_3_11(backbone, tmp_path):
    typed = command(backbone, ROOT / "docs" / "backbones" / f"{backbone}.md")
    assert command(backbone, ROOT / "plugins" / f"astuner_{backbone}" / "README.md") == typed
    uv, *words = shlex.split(typed)
    assert uv == "uv"
    words[words.index("--python") + 1] = sys.executable
    found = dry(*words, "--target", tmp_path / "nothing", *GPU_MACHINE)  # an empty folder: all of it is to be found
    assert {name: found.get(name) for name in PINS[backbone]} == PINS[backbone]
    assert {"astuner-core", "astuner-math", "astuner-agentscope", "astuner-ray", f"astuner-{backbone}"} <= set(found)
    assert "vllm" in found
    assert "flash-attn" not in found


@pytest.mark.parametrize("backbone", PINS)
def test_what_uv_reads_from_the_project_has_one_too(backbone):
    project = ROOT / "plugins" / f"astuner_{backbone}"
    found = dry("sync", "--project", project, "--extra", "vllm", "--python", sys.executable)
    assert {name: found.get(name) for name in PINS[backbone]} == PINS[backbone]
    assert "vllm" in found
    assert not (project / "uv.lock").exists()
