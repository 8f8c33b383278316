"""Write a runnable plugin or experiment: ``astuner new plugin NAME`` and ``astuner new experiment NAME``.

The texts are `string.Template` files in ``templates``. Existing files are never overwritten.
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

app = new_app(no_args_is_help=True, help="Create a plugin or an experiment that runs.")


class Made(NamedTuple):
    """Files that are written for a kind."""

    module: str
    name: str
    """Name in the module, with ``CAMEL`` or ``NAME`` for the plugin."""
    summary: str
    has_config: bool = False
    needs: str = ""
    """Additional first-party package, apart from the core."""
    tested_with: str = ""
    """Packages that its tests need in addition to pytest."""


MADE = {
    "judge": Made("judge", "CAMELJudge", "1 if the final answer is the reference answer", True),
    "task reader": Made("task_reader", "CAMELTaskReader", "additions, the same ones every time", True),
    "workflow": Made("workflow", "CAMELWorkflow", "call the model once"),
    "environment": Made("environment", "CAMELEnvironment", "guess a number"),
    "backbone": Made("backbone", "CAMELBackbone", "repeat the prompt, without training"),
    "loss": Made("loss", "NAME_loss", "PPO loss clipped above only", tested_with="torch"),
    "advantage estimator": Made("advantages", "NAME_advantages", "reward minus the median of its group"),
    "output check": Made("check", "NAME_check", "capital letters"),
    "chat family": Made("chat_family", "FAMILY", "turns between custom tags"),
    "service": Made("service", "CAMELService", "a file server", True),
    "log sink": Made("log_sink", "CAMELSink", "one line of text per step"),
    "subscriber": Made("subscriber", "CAMELSubscriber", "report the best step"),
    "sentinel rule": Made("sentinel_rule", "CAMELRule", "the reward does not change", needs="astuner-report"),
    "command": Made("command", "NAME_command", "show what an experiment trains"),
    "diagnosis": Made("diagnosis", "NAME_diagnosis", "free disk space"),
    "part": Made("part", "CAMELPart", "count the seconds of episodes"),
    "config key": Made("config_key", "CAMELKeys", "the greeting"),
    "model": Made("models", "folders", ""),
    "alias": Made("aliases", "", ""),
}
"""Files for every kind and for the two other hooks."""
OF_NO_KIND = {"model": "models", "alias": "aliases"}
"""Registered names without a kind -> template of their hook."""
PART = "episode_context"
"""Part that is written, of the parts that the core defines."""

NameArgument = Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="Letters, digits, - and _.")]
IntoOption = Annotated[Path, typer.Option("--into", metavar="DIR", help="Parent directory of the new one.")]


@app.command()
def plugin(
    name: NameArgument,
    judge: Annotated[bool, typer.Option("--judge", help="Add a judge: score results.")] = False,
    reader: Annotated[bool, typer.Option("--reader", help="Add a task reader: load tasks.")] = False,
    workflow: Annotated[bool, typer.Option("--workflow", help="Add a workflow: run one task.")] = False,
    environment: Annotated[bool, typer.Option("--environment", help="Add an environment.")] = False,
    backbone: Annotated[bool, typer.Option("--backbone", help="Add a backbone: run the model.")] = False,
    loss: Annotated[bool, typer.Option("--loss", help="Add a loss: compute a token's loss.")] = False,
    advantages: Annotated[bool, typer.Option("--advantages", help="Add an advantage estimator.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Add an output check: reject replies.")] = False,
    family: Annotated[bool, typer.Option("--family", help="Add a chat family: format turns and tool calls.")] = False,
    service: Annotated[bool, typer.Option("--service", help="Add a service: run a server with a run.")] = False,
    sink: Annotated[bool, typer.Option("--sink", help="Add a log sink: export metrics.")] = False,
    subscriber: Annotated[bool, typer.Option("--subscriber", help="Add a subscriber: receive events of runs.")] = False,
    rule: Annotated[bool, typer.Option("--rule", help="Add a sentinel rule: raise an alarm on metrics.")] = False,
    command: Annotated[bool, typer.Option("--command", help="Add a command of astuner.")] = False,
    diagnosis: Annotated[bool, typer.Option("--diagnosis", help="Add a line to astuner doctor.")] = False,
    part: Annotated[bool, typer.Option("--part", help="Add a part: implement an interface of the core.")] = False,
    key: Annotated[bool, typer.Option("--key", help="Add a key of the experiment file.")] = False,
    model: Annotated[bool, typer.Option("--model", help="Add models by name.")] = False,
    alias: Annotated[bool, typer.Option("--alias", help="Add older names of registered names.")] = False,
    into: IntoOption = Path("."),
) -> None:
    """Create a plugin with its tests; combine options for several kinds."""
    asked = [judge, reader, workflow, environment, backbone, loss, advantages, check, family, service, sink]
    asked += [subscriber, rule, command, diagnosis, part, key, model, alias]
    kinds = [kind for kind, wanted in zip(MADE, asked, strict=True) if wanted]
    if not kinds:
        raise ConfigError(f"no kind selected. Type: astuner new plugin {name} --judge (or --reader, --workflow, …)")
    bare = normal_name(name).removeprefix("astuner-")
    if bare in ("core", "", "astuner"):
        raise ConfigError(f"{name!r} is the name of the core. Choose another name")
    write(into / f"astuner-{bare}", plugin_files(bare, kinds))
    typer.echo(f"Try it:\n  pip install -e '{into / f'astuner-{bare}'}[test]'\n  pytest {into / f'astuner-{bare}'}")


@app.command()
def experiment(
    name: NameArgument,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Create a message sorter for a real model, e.g. smollm2-135m.")
    ] = None,
    into: IntoOption = Path("."),
) -> None:
    """Create an experiment that learns: an agent, its tasks, a YAML file, and breakpoint settings for VS Code.

    The agent uses the installed AgentScope version, 2.x or 1.x, and 2.x if none is installed. With --model, the agent
    needs no AgentScope.
    """
    bare = normal_name(name).replace("-", "_")
    write(into / bare, experiment_files(bare, model))
    runpy.run_path(str(into / bare / "make_tasks.py"))
    file = into / bare / f"{bare}.yaml"
    if model is None:
        typer.echo(_agentscope_note())
    typer.echo(f"Try it:\n  astuner run {file} --backbone debug\nThen train:\n  astuner run {file} --backbone local")


def normal_name(text: str) -> str:
    """Return a name normalized as in package indexes (PEP 503): lower case, one ``-`` between words.

    :raises ConfigError: The text is not a name, for instance a path.
    """
    if not re.fullmatch(r"[A-Za-z](?:[A-Za-z0-9._-]{0,48}[A-Za-z0-9])?", text):
        raise ConfigError(
            f"{text!r} is not a valid name. Start with a letter, then use letters, digits, - and _ (at most 50)"
        )
    return re.sub(r"[-_.]+", "-", text).lower()


def plugin_files(bare: str, kinds: list[str]) -> dict[str, str]:
    """Return the texts of a plugin with ``kinds`` by relative path."""
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
        "dependencies": "".join(f'  "{name}{bound}",  # hooks may change in later versions\n' for name in needs),
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
    """Return the texts of an experiment by relative path.

    :param model: Name or directory of a real model; None for the tiny one, which calculates.
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
    return f"workflow.py uses AgentScope {_agentscope_major()}.x ({state})"


def write(folder: Path, texts: Mapping[str, str]) -> None:
    """Create ``folder`` with these files, or nothing if the directory exists.

    :raises ConfigError: The directory exists or cannot be created.
    """
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"{folder} already exists. Choose another name, or another directory with --into") from None
    except OSError as e:
        raise ConfigError(f"cannot create {folder}: {e.strerror}. Choose another directory with --into DIR") from None
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
    """Return the name under which it is registered."""
    return {"part": PART, "model": f"{bare}/NAME", "alias": f"{_offer(bare)}_lines"}.get(kind, _offer(bare))


def _offer(bare: str) -> str:
    """Return the name in the config: the name of the plugin, if it offers one thing of a kind."""
    return bare.replace("-", "_")


def _camel(bare: str) -> str:
    return "".join(part.capitalize() for part in re.split(r"[-_]", bare))


def _fill(name: str, values: Mapping[str, str]) -> str:
    text = (files("astuner_testing") / "templates" / f"{name}.template").read_text(encoding="utf-8")
    return Template(text).substitute(values)
