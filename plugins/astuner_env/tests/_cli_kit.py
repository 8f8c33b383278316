"""A stranger's environment, as if it were installed, and a wheel that a package index would have."""

import os
import subprocess
import sys
import textwrap
import zipfile
from types import SimpleNamespace

WORLD = '''
"""Walk along a corridor to its end."""

from astuner import Environment, Evaluation, Task
from astuner.contracts.environment import StepResult


class Corridor(Environment):
    @classmethod
    def tasks(cls, split, params):
        if split not in ("train", "validation"):
            raise ValueError(f"there is no split {split!r}; there are train and validation")
        first = 0 if split == "train" else 10
        for length in range(first + 2, first + 5):
            yield Task(task_id=f"length-{length}", main_query="Walk to the end.", env_type="corridor")

    def reset(self, task):
        name, _, length = task.task_id.partition("-")
        if name != "length" or not length.isdecimal():
            raise ValueError(f"there is no task {task.task_id!r}")
        self.length, self.at, self.steps = int(length), int(self.params.get("start", 0)), 0
        rules = {"role": "system", "content": "Say right or left."}
        return StepResult(observation=self._view(), messages=(rules, {"role": "user", "content": self._view()}))

    def step(self, action):
        self.steps += 1
        said = action.get("content") or ""
        for call in action.get("tool_calls") or ():
            said += call["function"]["arguments"]
        if "boom" in said:
            raise RuntimeError("the corridor fell in")
        self.at += ("right" in said) - ("left" in said)
        over = self.at >= self.length
        return StepResult(
            observation=self._view(), reward=float(over), terminated=over, truncated=self.steps >= 10 and not over,
            info={"said": said},
        )

    def evaluate(self):
        return Evaluation(score=max(self.at, 0) / self.length, success=self.at >= self.length, details={"at": self.at})

    def describe(self):
        return {"rules": "Walk to the end.", "tools": [{"type": "function", "function": {"name": "go"}}]}

    def _view(self):
        return f"You are at {self.at} of {self.length}."
'''

SETUP = '''
"""Brings the corridor's data."""

from dataclasses import replace

from astuner_env.environment_setup import EnvironmentSetup, Finding
from astuner.contracts.errors import RunError


class CorridorSetup(EnvironmentSetup):
    options = {"colour": "of the walls"}

    def check(self, options):
        if options.get("colour") == "unchecked":
            raise RunError("no checks today; colour=white")

    def setup(self, settings, folder, options, say):
        if options.get("colour") == "plaid":
            raise ZeroDivisionError("no plaid")
        if options.get("colour") == "none":
            raise RunError("walls need a colour; type: astuner env setup corridor colour=white")
        say("painting")
        (folder / "paint").write_text(options.get("colour", "white"))
        return replace(settings, environ={"CORRIDOR_PAINT": str(folder / "paint")})

    def doctor(self, settings):
        painted = "CORRIDOR_PAINT" in settings.environ
        return [Finding(what="painted" if painted else "not painted", ok=painted, hint="astuner env setup corridor")]
'''

PLUGIN = """
from astuner import EnvironmentProvider, hookimpl

@hookimpl
def register_environments():
    return {
        "corridor": EnvironmentProvider(
            target="astuner_corridor.world:Corridor", summary="a corridor", lent=("astuner_corridor",), memory_mb=30
        ),
        "far_corridor": EnvironmentProvider(
            target="astuner_corridor.world:Corridor", summary="a corridor with an interpreter of its own",
            python=">=3.8", packages=("tinyworld>=1.0,<2",), requires=("tinyworld",), lent=("astuner_corridor",),
            setup="astuner_corridor.painting:CorridorSetup", splits=("train",), memory_mb=30,
        ),
    }
"""


def write_plugin(folder):
    """Write the stranger's plugin as it lies in a folder of installed packages."""
    package = folder / "astuner_corridor"
    package.mkdir(parents=True)
    for name, text in (("__init__", ""), ("world", WORLD), ("painting", SETUP), ("plugin", PLUGIN)):
        (package / f"{name}.py").write_text(text)
    info = folder / "astuner_corridor-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: astuner-corridor\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[astuner]\ncorridor = astuner_corridor.plugin\n")
    return folder


def write_wheel(folder, version="1.0"):
    """A wheel of the package ``tinyworld``."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"tinyworld-{version}.dist-info"
    texts = {
        "tinyworld.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tinyworld\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    texts[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in (*texts, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"tinyworld-{version}-py3-none-any.whl", "w") as wheel:
        for name, text in texts.items():
            wheel.writestr(name, text)
    return folder


def astuner(*arguments, home, see=None, stdin=None, cwd=None, timeout=240, **variables):
    """Run the command as a person does; gives exit code, stdout and stderr."""
    shown = subprocess.run(
        [sys.executable, "-m", "astuner", *map(str, arguments)],
        input=stdin, capture_output=True, text=True, check=False, timeout=timeout, cwd=cwd,
        env=environ(home, see, **variables),
    )  # fmt: skip
    return SimpleNamespace(code=shown.returncode, out=shown.stdout, err=shown.stderr)


def environ(home, see=None, **variables):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ASTUNER", "PIP_"))}
    return {**kept, "ASTUNER_HOME": str(home), **({"PYTHONPATH": str(see)} if see else {}), **variables}


def script(path, text):
    """An executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + textwrap.dedent(text))
    path.chmod(0o755)
    return path
