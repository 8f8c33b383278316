"""Check that an installed plugin is found, fast to list, and matches its declaration."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import subprocess
import sys
from typing import Any

import typer

from astuner import CONTRACTS, Plugin, PluginManager, PluginStatus, import_target, missing_modules
from astuner.contracts.chat_family import Family
from astuner.contracts.hookspecs import Provider
from astuner.contracts.judge import Judge
from astuner.contracts.parts import PARTS

HEAVY = (
    "agentscope", "aiohttp", "anthropic", "datasets", "jsonschema", "matplotlib", "numpy", "openai", "pandas",
    "pyarrow", "ray", "rich", "sympy", "tensorboard", "torch", "transformers", "trinity", "verl", "vllm", "wandb",
)  # fmt: skip
"""Modules that take long to import; listing a plugin may need none of them."""

CONTRACTS = {
    **CONTRACTS,
    "workflow": "astuner.contracts.workflow:Workflow",
    "judge": "astuner.contracts.judge:Judge",
    "sentinel rule": "astuner_report.sentinel:Rule",
}
"""Base classes of published parts; only a user's own file may be less strict."""

FUNCTIONS = {"output check": "OutputView", "loss": "LossInput", "advantage estimator": "Compared"}
"""Kinds whose targets are plain functions without options, and the type of their argument."""

OF_NO_KIND = ("locate_model", "register_aliases")
"""Hooks that register no kind; a plugin may contain only these."""

LONGEST_SUMMARY = 100


def check_plugin(name: str) -> Plugin:
    """Check the installed plugin ``name``, and return its description by the loader.

    - exactly one installed distribution has the entry point, and it declares ``astuner-core`` with an upper bound;
    - importing its module in a new interpreter imports nothing heavy;
    - it loads, and registers at least one thing;
    - every provider has a one-line summary; its target can be imported and is of the right kind (or one of its
      ``requires`` is missing, and ``install`` contains the command to type);
    - every key of its config is documented, and the defaults are valid.
    """
    found = [ep for ep in importlib.metadata.entry_points(group="astuner") if ep.name == name]
    assert found, (
        f"the plugin {name!r} is not installed. Add to pyproject.toml: [project.entry-points.astuner] "
        f'{name} = "astuner_{name}.plugin", then run: pip install -e .'
    )
    assert len(found) == 1, f"{len(found)} installed distributions have the plugin {name!r}. Uninstall all but one"
    _check_requirement(name, found[0])
    _check_cheap(name, found[0].value)
    manager = PluginManager().load(found)
    plugin = manager.plugins[0]
    assert plugin.status is PluginStatus.LOADED, f"the plugin {name!r} is {plugin.status.value}: {plugin.reason}"
    offers = plugin.provides or any(hasattr(plugin.module, hook) for hook in OF_NO_KIND)
    assert offers, f"the plugin {name!r} registers nothing. Implement one of the hooks with @hookimpl"
    for kind, offered in plugin.provides.items():
        for given, provider in offered.items():
            _check_provider(kind, given, provider)
    return plugin


def _check_requirement(name: str, entry: importlib.metadata.EntryPoint) -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    assert entry.dist is not None
    needs = [Requirement(text) for text in entry.dist.requires or ()]
    core = [n for n in needs if canonicalize_name(n.name) == "astuner-core"]
    assert core, f'{entry.dist.name} does not depend on astuner-core. Add "astuner-core>=0.1,<0.2" to its dependencies'
    bounded = any(s.operator in ("<", "<=", "==", "~=", "===") for s in core[0].specifier)
    assert bounded, (
        f'{entry.dist.name} accepts any later {core[0]}, but hooks may change. Write "astuner-core>=0.1,<0.2"'
    )


def _check_cheap(name: str, module: str) -> None:
    """Check the imports in a new interpreter, because this one may have imported anything already."""
    code = (
        "import importlib, json, sys\n"
        f"importlib.import_module({module!r})\n"
        "print(json.dumps(sorted({m.partition('.')[0] for m in sys.modules})))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert shown.returncode == 0, f"importing {module} fails:\n{shown.stderr.strip()}"
    heavy = sorted(set(HEAVY) & set(json.loads(shown.stdout.splitlines()[-1])))
    assert not heavy, (
        f"importing {module} (the plugin {name!r}) imports {', '.join(heavy)}, which slows `astuner --help`. "
        "Refer to it in Provider(target=…), and import it in the target's module"
    )


def _check_provider(kind: str, name: str, provider: Provider) -> None:
    where = f"the {kind} {name!r}"
    summary = provider.summary
    assert summary, f"{where} has no summary, which `astuner plugins -v` shows"
    assert len(summary.splitlines()[0]) == len(summary) <= LONGEST_SUMMARY, (
        f"{where}: the summary must be one line of {LONGEST_SUMMARY}"
    )
    in_a_group = kind == "command" and " " in name  # shown in a list of commands, whose first lines are sentences
    assert in_a_group or not summary.endswith("."), f"{where}: the summary ends with a period. Remove it"
    missing = missing_modules(provider)
    if missing:
        assert provider.install, (
            f"{where} needs {missing[0]} but does not describe how to install it. Set install='pip install …'"
        )
        return
    target = import_target(provider.target)
    if kind == "command":
        is_one = isinstance(target, typer.Typer) or inspect.isfunction(target)
        assert is_one, f"{where}: {provider.target} is {target!r}, but must be a function or a typer.Typer"
    elif kind == "diagnosis":
        assert callable(target), f"{where}: {provider.target} is {target!r}, but must be a function without arguments"
    elif kind == "chat family":
        assert isinstance(target, Family), f"{where}: {provider.target} is {target!r}, but must be a Family"
        assert provider.config is None, f"{where} has a config, which is never read: families have no options"
    elif kind in FUNCTIONS:
        plain = callable(target) and not inspect.isclass(target) and not inspect.iscoroutinefunction(target)
        assert plain, f"{where}: {provider.target} is {target!r}, but must be a plain function of one {FUNCTIONS[kind]}"
        assert provider.config is None, f"{where} has a config, which is never read: functions have no options"
    elif kind == "judge" and inspect.isfunction(target):
        made = inspect.signature(target).return_annotation
        assert made in (Judge, Judge.__name__), (
            f"{where}: {provider.target} is a function without the return type Judge. Use a class, or a function that "
            "returns a judge for its section"
        )
    else:
        contract = PARTS[name] if kind == "part" else import_target(CONTRACTS[kind])
        public = contract.__module__ if kind in ("part", "config key", "sentinel rule") else "astuner"
        assert inspect.isclass(target), f"{where}: {provider.target} is {target!r}, not a class"
        assert issubclass(target, contract), (
            f"{where}: {provider.target} must be a subclass of {public}.{contract.__name__}"
        )
        unfinished = sorted(getattr(target, "__abstractmethods__", ()))
        assert not unfinished, f"{where}: {provider.target} does not implement {', '.join(unfinished)}"
    if kind == "config key":
        key = name.rpartition(".")[2]
        assert list(target.model_fields) == [key], f"{where}: {provider.target} must have exactly one field, {key}"
        _check_config(where, target)
    if provider.config is not None:
        _check_config(where, import_target(provider.config))


def _check_config(where: str, model: Any) -> None:
    from pydantic import BaseModel

    assert inspect.isclass(model), f"{where}: its config is {model!r}, not a class"
    assert issubclass(model, BaseModel), f"{where}: its config must be a pydantic model, not {model!r}"
    extra = model.model_config.get("extra")
    assert extra == "forbid", (
        f"{where}: {model.__name__} ignores misspelled keys. Set model_config = ConfigDict(extra='forbid')"
    )
    bare = [n for n, f in model.model_fields.items() if not f.description]
    assert not bare, (
        f"{where}: {model.__name__}.{bare[0]} is not documented. Write a docstring below it and set "
        "ConfigDict(use_attribute_docstrings=True)"
    )
    if not any(f.is_required() for f in model.model_fields.values()):
        model.model_validate(model().model_dump())
