"""``astuner new plugin NAME`` and ``astuner new experiment NAME``: write something that runs.

The texts are in ``templates``, as `string.Template`; nothing is ever overwritten.
"""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Mapping
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated, Any, NamedTuple

import typer

from astuner import __version__
from astuner.contracts.commands import new_app
from astuner.contracts.errors import ConfigError
from astuner.contracts.hookspecs import KINDS

app = new_app(no_args_is_help=True, help="Write a new plugin or experiment that runs.")


class Made(NamedTuple):
    """What is written for a kind."""

    module: str
    name: str
    """What the module calls it, with ``CAMEL`` or ``NAME`` for the plugin."""
    summary: str
    has_config: bool = False
    needs: str = ""
    """A package of ours beside the core."""
    tested_with: str = ""
    """What its tests want beside pytest."""


MADE = {
    "judge": Made("judge", "CAMELJudge", "1 when the final answer is the reference answer", True),
    "task reader": Made("task_reader", "CAMELTaskReader", "additions, the same ones every time", True),
    "workflow": Made("workflow", "CAMELWorkflow", "asks the model once"),
    "environment": Made("environment", "CAMELEnvironment", "guess a number"),
    "backbone": Made("backbone", "CAMELBackbone", "repeats the prompt, trains nothing"),
    "loss": Made("loss", "NAME_loss", "PPO's clip above only", tested_with="torch"),
    "advantage estimator": Made("advantages", "NAME_advantages", "the reward, less the median of its group"),
    "output check": Made("check", "NAME_check", "capital letters"),
    "chat family": Made("chat_family", "FAMILY", "turns between tags of its own"),
    "service": Made("service", "CAMELService", "a server of files", True),
    "log sink": Made("log_sink", "CAMELSink", "a line of text for each step"),
    "subscriber": Made("subscriber", "CAMELSubscriber", "remembers the best step"),
    "sentinel rule": Made("sentinel_rule", "CAMELRule", "the reward stands still", needs="astuner-report"),
    "command": Made("command", "NAME_command", "say what an experiment trains"),
    "diagnosis": Made("diagnosis", "NAME_diagnosis", "room on the disk"),
    "part": Made("part", "CAMELPart", "counts the seconds of episodes"),
    "config key": Made("config_key", "CAMELKeys", "what is said first"),
    "model": Made("models", "folders", ""),
    "alias": Made("aliases", "", ""),
}
"""Every kind there is, and the two other hooks: what is written for it."""
OF_NO_KIND = {"model": "models", "alias": "aliases"}
"""What is registered by a hook of another form -> the template of that hook."""
PART = "episode_context"
"""The one that is written, of those whose names the core fixes."""

NameArgument = Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="Letters, digits, - and _.")]
IntoOption = Annotated[Path, typer.Option("--into", metavar="DIR", help="Where the new folder is made.")]


@app.command()
def plugin(
    name: NameArgument,
    judge: Annotated[bool, typer.Option("--judge", help="How good a result is.")] = False,
    reader: Annotated[bool, typer.Option("--reader", help="Where tasks come from.")] = False,
    workflow: Annotated[bool, typer.Option("--workflow", help="What happens to one task.")] = False,
    environment: Annotated[bool, typer.Option("--environment", help="A world to act in.")] = False,
    backbone: Annotated[bool, typer.Option("--backbone", help="What runs the model.")] = False,
    loss: Annotated[bool, typer.Option("--loss", help="What a token's loss is.")] = False,
    advantages: Annotated[bool, typer.Option("--advantages", help="How rewards become advantages.")] = False,
    check: Annotated[bool, typer.Option("--check", help="What is wrong with a reply.")] = False,
    family: Annotated[bool, typer.Option("--family", help="How models write turns and tool calls.")] = False,
    service: Annotated[bool, typer.Option("--service", help="A server beside a run.")] = False,
    sink: Annotated[bool, typer.Option("--sink", help="Where a run's numbers go.")] = False,
    subscriber: Annotated[bool, typer.Option("--subscriber", help="Told what happens in every run.")] = False,
    rule: Annotated[bool, typer.Option("--rule", help="What can go wrong in a run, seen in its numbers.")] = False,
    command: Annotated[bool, typer.Option("--command", help="A command of astuner.")] = False,
    diagnosis: Annotated[bool, typer.Option("--diagnosis", help="A line of astuner doctor.")] = False,
    part: Annotated[bool, typer.Option("--part", help="A part that the core asks for.")] = False,
    key: Annotated[bool, typer.Option("--key", help="A key of the experiment file.")] = False,
    model: Annotated[bool, typer.Option("--model", help="Models by name.")] = False,
    alias: Annotated[bool, typer.Option("--alias", help="Older names of what others register.")] = False,
    into: IntoOption = Path("."),
) -> None:
    """Write a plugin with its tests; say what it is to hold (several are possible)."""
    asked = [judge, reader, workflow, environment, backbone, loss, advantages, check, family, service, sink]
    asked += [subscriber, rule, command, diagnosis, part, key, model, alias]
    kinds = [kind for kind, wanted in zip(MADE, asked, strict=True) if wanted]
    if not kinds:
        raise ConfigError(f"what is it to hold? type: astuner new plugin {name} --judge (or --reader, --workflow, …)")
    bare = normal_name(name).removeprefix("astuner-")
    if bare in ("core", "", "astuner"):
        raise ConfigError(f"{name!r} is the core's own name; choose another")
    write(into / f"astuner-{bare}", plugin_files(bare, kinds))
    typer.echo(f"try it:\n  pip install -e '{into / f'astuner-{bare}'}[test]'\n  pytest {into / f'astuner-{bare}'}")


@app.command()
def experiment(
    name: NameArgument,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="For a real model, such as smollm2-135m, which sorts messages.")
    ] = None,
    into: IntoOption = Path("."),
) -> None:
    """Write an experiment that learns: an agent, its tasks, a YAML file, and settings for breakpoints in VS Code.

    The agent is written for the installed version of AgentScope, 2.x or 1.x, and for 2.x where none is installed. With
    --model, the agent needs no AgentScope.
    """
    bare = normal_name(name).replace("-", "_")
    write(into / bare, experiment_files(bare, model))
    runpy.run_path(str(into / bare / "make_tasks.py"))
    file = into / bare / f"{bare}.yaml"
    if model is None:
        typer.echo(_agentscope_note())
    typer.echo(f"try it:\n  astuner run {file} --backbone debug\nthen train:\n  astuner run {file} --backbone local")


def normal_name(text: str) -> str:
    """The name as package indexes normalise it (PEP 503): lower case, one ``-`` between words.

    :raises ConfigError: it is not a name, for instance a path.
    """
    if not re.fullmatch(r"[A-Za-z](?:[A-Za-z0-9._-]{0,48}[A-Za-z0-9])?", text):
        raise ConfigError(
            f"{text!r} cannot be a name: begin with a letter, go on with letters, digits, - and _ (at most 50)"
        )
    return re.sub(r"[-_.]+", "-", text).lower()


def plugin_files(bare: str, kinds: list[str]) -> dict[str, str]:
    """Relative path -> text of a plugin that holds ``kinds``."""
    package = f"astuner_{bare.replace('-', '_')}"
    major, minor = __version__.split(".")[:2]
    bound = f">={major}.{minor},<{major}.{int(minor) + 1}"
    needs = dict.fromkeys(["astuner-core", *filter(None, (MADE[kind].needs for kind in kinds))])
    tested_with = dict.fromkeys(filter(None, (MADE[kind].tested_with for kind in kinds)))
    registered = [kind for kind in kinds if kind in KINDS]
    values = {
        "name": bare,
        "dist": f"astuner-{bare}",
        "package": package,
        "offer": _offer(bare),
        "constant": _offer(bare).upper(),
        "bound": bound,
        "dependencies": "".join(f'  "{name}{bound}",  # the hooks may change after these\n' for name in needs),
        "tested_with": "".join(f', "{name}"' for name in tested_with),
        "what": " and ".join(kinds).capitalize() if len(kinds) < 4 else "Several parts",
        "imports": "from astuner import Provider, hookimpl" if registered else "from astuner import hookimpl",
        "kinds": "{\n" + "".join(f'        "{kind}",\n' for kind in registered) + "    }" if registered else "set()",
        "offers": "\n".join(f"- the {kind} `{_registered(bare, kind)}`" for kind in kinds),
    }
    if "model" in kinds:
        values["imports"] += f"\nfrom {package}.models import folders"
    of_kind = {kind: {**values, **_kind_values(bare, kind)} for kind in kinds}
    values["hooks"] = "".join(_fill(f"plugin/{_hook_template(kind)}", of_kind[kind]) for kind in kinds).rstrip()
    texts = {
        "pyproject.toml": _fill("plugin/pyproject.toml", values),
        "README.md": _fill("plugin/README.md", values),
        ".gitignore": _fill("plugin/gitignore", values),
        ".github/workflows/test.yml": _fill("plugin/github/workflows/test.yml", values),
        f"{package}/__init__.py": _fill("plugin/package/__init__.py", values),
        f"{package}/plugin.py": _fill("plugin/package/plugin.py", values),
        "tests/test_plugin.py": _fill("plugin/tests/test_plugin.py", values),
    }
    for its in of_kind.values():
        module = its["module"]
        if its["class_name"]:
            texts[f"{package}/{module}.py"] = _fill(f"plugin/package/{module}.py", its)
        texts[f"tests/test_{module}.py"] = _fill(f"plugin/tests/test_{module}.py", its)
    return texts


def experiment_files(bare: str, model: str | None = None) -> dict[str, str]:
    """Relative path -> text of an experiment.

    :param model: the name or folder of a real model; None: the tiny one, which calculates.
    """
    camel, kind = _camel(bare), "experiment" if model is None else "experiment_model"
    values = {
        "name": bare,
        "class_name": camel if camel.endswith("Agent") else f"{camel}Agent",
        "judge_name": f"{camel}Judge",
        "model": json.dumps(model),
        "agentscope": str(_agentscope_major()),
        "other_agentscope": str(3 - _agentscope_major()),
    }
    same_name = ["README.md", "make_tasks.py", "test_workflow.py", *(["judge.py"] if model else [])]
    workflow = "workflow" if model else f"workflow_agentscope{values['agentscope']}"
    return {
        f"{bare}.yaml": _fill(f"{kind}/experiment.yaml", values),
        "workflow.py": _fill(f"{kind}/{workflow}.py", values),
        ".vscode/launch.json": _fill("experiment/vscode/launch.json", values),
        **{path: _fill(f"{kind}/{path}", values) for path in same_name},
    }


def _agentscope_version() -> str | None:
    try:
        return metadata.version("agentscope")
    except metadata.PackageNotFoundError:
        return None


def _agentscope_major() -> int:
    """Return 1 if AgentScope 1.x is installed, and 2 otherwise."""
    return 1 if (_agentscope_version() or "").startswith("1.") else 2


def _agentscope_note() -> str:
    version = _agentscope_version()
    state = f"{version} is installed" if version else "install it: pip install astuner-agentscope"
    return f"workflow.py is written for AgentScope {_agentscope_major()}.x ({state})"


def write(folder: Path, texts: Mapping[str, str]) -> None:
    """Make ``folder`` with these files; all of it or, when the folder exists, nothing.

    :raises ConfigError: the folder exists, or cannot be made.
    """
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"{folder} exists and is left alone; choose another name, or --into another folder") from None
    except OSError as e:
        raise ConfigError(f"cannot make {folder}: {e.strerror}; choose a place with --into DIR") from None
    for relative, text in texts.items():
        path = folder / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        typer.echo(f"wrote {path}")


def _kind_values(bare: str, kind: str) -> dict[str, Any]:
    made, camel = MADE[kind], _camel(bare)
    return {
        "hook": KINDS.get(kind, ""),
        "module": made.module,
        "registered": _registered(bare, kind),
        "class_name": made.name.replace("CAMEL", camel).replace("NAME", _offer(bare)),
        "config_name": f"{camel}{kind.title().replace(' ', '')}Config",
        "engine_name": f"{camel}Engine",
        "summary": made.summary,
    }


def _hook_template(kind: str) -> str:
    if kind in OF_NO_KIND:
        return f"hook_{OF_NO_KIND[kind]}"
    return "hook" if MADE[kind].has_config else "hook_without_config"


def _registered(bare: str, kind: str) -> str:
    """The name under which it is found."""
    return {"part": PART, "model": f"{bare}/NAME", "alias": f"{_offer(bare)}_lines"}.get(kind, _offer(bare))


def _offer(bare: str) -> str:
    """What the config says; a plugin's name is good enough while it offers one thing of a kind."""
    return bare.replace("-", "_")


def _camel(bare: str) -> str:
    return "".join(part.capitalize() for part in re.split(r"[-_]", bare))


def _fill(name: str, values: Mapping[str, str]) -> str:
    text = (files("astuner_testing") / "templates" / f"{name}.template").read_text(encoding="utf-8")
    return Template(text).substitute(values)
