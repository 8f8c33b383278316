"""Write the generated parts of pages: command help, keys, hooks, Python API, fields, chat families.

A part is the text between ``<!-- generated: NAME -->`` and ``<!-- end -->``. ``python docs/generate.py`` rewrites all
parts in place; ``--check`` lists outdated parts. Third-party plugins are disabled, so the result does not depend on
them.
"""

from __future__ import annotations

import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from families import families, vocabularies

ROOT = Path(__file__).resolve().parent.parent
OURS = {"astuner-core", *(folder.name.replace("_", "-") for folder in (ROOT / "plugins").iterdir())}
PART = re.compile(r"(<!-- generated: ([a-z ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def manager() -> Any:
    """Return the plugins of this repository, with third-party plugins disabled."""
    from astuner.plugins.loader import load_plugins

    return load_plugins(others())


def others() -> list[str]:
    """Return the installed distributions of third-party plugins."""
    from astuner.plugins.loader import load_plugins

    return sorted({plugin.dist for plugin in load_plugins().plugins} - OURS)


# ------------------------------------------------------------------------------------------------------------ commands


def commands() -> str:
    """Return the help texts of all commands, except hidden ones."""
    import typer

    from astuner.cli import COMMANDS, app
    from astuner.contracts.hookspecs import is_hidden

    without = [word for dist in others() for word in ("-p", f"no:{dist}")]
    context = _context(typer.main.get_command(app), "astuner", None, without)
    texts = [_help(context)]
    provided = [name for _, name, provider in manager().offers("command") if not is_hidden(provider)]
    for name in [*COMMANDS, *provided]:
        command = _context(context.command.get_command(context, name), name, context)
        texts.append(_help(command))
        for sub in command.command.list_commands(command) if hasattr(command.command, "list_commands") else ():
            texts.append(_help(_context(command.command.get_command(command, sub), sub, command)))
    return "\n".join(texts)


def _context(command: Any, name: str, parent: Any, arguments: Sequence[str] = ()) -> Any:
    return command.make_context(name, list(arguments), parent=parent, resilient_parsing=True, terminal_width=100)


def _help(context: Any) -> str:
    return f"### `{context.command_path}`\n\n```text\n{context.command.get_help(context).rstrip()}\n```\n"


# ---------------------------------------------------------------------------------------------------------------- keys


def keys() -> str:
    """Return one table per section, in the order of the schema."""
    from astuner.config.checking import describe_field
    from astuner_debug.explain_command import reference

    tables: dict[str, list[str]] = {}
    for info in reference(manager()):
        section, _, name = info.key.rpartition(".")
        if (named := _named_sections().get(info.key)) is not None:
            for inner, field in named.model_fields.items():
                doc = " ".join((field.description or "").split())
                row = _row(inner, describe_field(field), field.default, doc, required=field.is_required())
                tables.setdefault(f"{info.key}.NAME", []).append(row)
        elif not info.keys and info.type != "section":  # a section without keys has subsections of plugins only
            row = _row(name, info.type, info.default, info.doc, required=info.required)
            tables.setdefault(section, []).append(row)
    head = "| key | value | default | meaning |\n|---|---|---|---|\n"
    return "\n".join(f"### `{section}`\n\n{head}" + "\n".join(rows) + "\n" for section, rows in tables.items())


def _named_sections() -> dict[str, Any]:
    """Return the keys that map user-defined names to sections -> the section's model."""
    from astuner.config.schema import Section, with_packages

    found = {}
    for name, field in with_packages(manager()).model_fields.items():
        model = (*get_args(field.annotation), None, None)[1]
        if get_origin(field.annotation) is dict and isinstance(model, type) and issubclass(model, Section):
            found[f"astuner.{name}"] = model
    return found


def _row(name: str, kind: str, default: Any, doc: str, *, required: bool = False) -> str:
    written = "*required*" if required else _code(json.dumps(default, ensure_ascii=False))
    return f"| `{name}` | {_cell(kind)} | {written} | {_cell(doc)} |"


def losses() -> str:
    """Return the table of keys that ``algorithm.loss`` implies."""
    from astuner.config.loading import by_loss

    rows = [
        f"| `{loss}` | {', '.join(f'`{key}: {_yaml(value)}`' for key, value in implied.items()) or 'none'} |"
        for _, loss, _ in manager().offers("loss")
        for implied in [by_loss(loss, manager())]
    ]
    return "| `loss` | implied values |\n|---|---|\n" + "\n".join(rows) + "\n"


def refused() -> str:
    """Return the keys that the `local` backbone restricts to certain values."""
    from astuner.plugins import registry

    backbone = registry.resolve(manager(), "backbone", "local")
    rows = [
        f"| `astuner.{key}` | {' or '.join(f'`{_yaml(value)}`' for value in allowed)} |"
        for key, allowed in backbone.capabilities.only.items()
    ]
    return "| key | supported values |\n|---|---|\n" + "\n".join(rows) + "\n"


def engine_keys(package: str, engine: str) -> str:
    """Return tables of the engine's keys: converted keys, constant keys, and keys that users cannot set."""
    section, converted, fixed = package.removeprefix("astuner_"), [], []
    table = import_module(f"{package}.table").TABLE
    for row in table.rows:
        name = f"`{row.native}`{' ●' if row.locked else ''}"
        if row.ours:
            means = "; ".join(filter(None, (row.says or "the same", row.why)))
            converted.append(f"| {', '.join(f'`{key}`' for key in row.ours)} | {name} | {_cell(means)} |")
        else:
            fixed.append(f"| {name} | `{row.says}` | {_cell(row.why)} |")
    locked = [f"| `{key}` | {_cell(why)} |" for key, why in table.locked.items()]
    parts = (
        f"Keys with ● cannot be set below `{section}:`.",
        f"| `astuner.` key | {engine} key | value |\n|---|---|---|\n" + "\n".join(converted),
        "These keys are the same in every experiment:",
        f"| {engine} key | value | reason |\n|---|---|---|\n" + "\n".join(fixed),
        f"These keys and sections also cannot be set below `{section}:`:",
        f"| {engine} key or section | reason or alternative |\n|---|---|\n" + "\n".join(locked),
    )
    return "\n\n".join(parts) + "\n"


def engine_refused(package: str) -> str:
    """Return the keys that a backbone restricts to certain values or rejects."""
    capabilities = import_module(f"{package}.table").TABLE.capabilities
    rows = []
    for key in sorted({*capabilities.only, *capabilities.instead}):
        allowed = capabilities.only.get(key)
        possible = " or ".join(f"`{_yaml(value)}`" for value in allowed) if allowed is not None else "none"
        rows.append(f"| `astuner.{key}` | {possible} | {_cell(capabilities.instead[key])} |")
    return "| key | supported values | reason or alternative |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def renamed() -> str:
    """Return the table of legacy keys and their current names."""
    from astuner_compat.spellings import RENAMED, RETIRED

    rows = [f"| `{old}` | `{new}` |" for old, new in RENAMED.items()]
    rows += [f"| `{old}` | removed: {_cell(retired.reason)} |" for old, retired in RETIRED.items()]
    return "| legacy key | current key |\n|---|---|\n" + "\n".join(sorted(rows)) + "\n"


# ------------------------------------------------------------------------------------------------------------- metrics

WHEN = {"step": "every step", "update": "every update", "validation": "every validation", "sometimes": "sometimes"}
"""`astuner_testing.metrics.Metric.when` -> text."""


def metrics(table: str) -> str:
    """Return one table of metrics."""
    from astuner_testing.metrics import metrics as known

    rows = []
    for metric in known():
        if metric.table == table:
            names = " and ".join(f"`{backbone}`" for backbone in metric.backbones)
            only = f", {names} only" if names else ""
            cells = (_code(metric.name), _cell(metric.meaning), metric.unit, metric.better, WHEN[metric.when] + only)
            rows.append("| " + " | ".join(cells) + " |")
    return "| name | meaning | unit | better | logged |\n|---|---|---|---|---|\n" + "\n".join(rows) + "\n"


# --------------------------------------------------------------------------------------------------------------- hooks


def hooks() -> str:
    """Return all hooks with signature and documentation."""
    texts = []
    for name, (hook, text) in all_hooks().items():
        signature = str(inspect.signature(hook)).replace("'", "")  # annotations are kept as text
        texts.append(f"### `{name}`\n\n```text\n{name}{signature}\n```\n\n{text.strip()}\n")
    return "\n".join(texts)


def all_hooks() -> dict[str, tuple[Callable[..., Any], str]]:
    """Return the name of each hook -> function and documentation, from ``hooks.yaml`` or its docstring."""
    from astuner.contracts import hookspecs

    listings = yaml.safe_load(Path(hookspecs.__file__).with_name("hooks.yaml").read_text(encoding="utf-8"))
    found = {name: f for name, f in vars(hookspecs).items() if hasattr(f, f"{hookspecs.PROJECT}_spec")}
    texts = {**listings, **{name: _markdown(inspect.getdoc(found[name]) or "") for name in found.keys() - listings}}
    order = [*listings, *(name for name in found if name not in listings)]
    return {name: (found[name], texts[name]) for name in order}


def provider() -> str:
    """Return the fields of `Provider`."""
    from astuner.contracts import hookspecs

    return _fields_of_class(hookspecs.Provider)


def environment_provider() -> str:
    """Return the additional fields of `EnvironmentProvider`."""
    from astuner.contracts import hookspecs

    return _fields_of_class(hookspecs.EnvironmentProvider)


def _fields_of_class(described: type) -> str:
    """Return a table of the fields that a dataclass declares, with the docstrings under them."""
    import ast

    tree = ast.parse(inspect.getsource(described)).body[0]
    assert isinstance(tree, ast.ClassDef)
    rows = []
    for field, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
            text = inspect.cleandoc(ast.literal_eval(after.value))
            default = f" = {ast.unparse(field.value)}" if field.value else ""
            declared = f"{ast.unparse(field.target)}: {ast.unparse(field.annotation)}{default}"
            rows.append(f"| {_code(declared)} | {_cell(_markdown(text))} |")
    return "| field | meaning |\n|---|---|\n" + "\n".join(rows) + "\n"


# ------------------------------------------------------------------------------------------------------------ endpoint

DIALECTS = ("openai_chat", "openai_responses", "anthropic_messages")


def fields() -> str:
    """Return how each field of a request is handled, by route."""
    note = (
        "For trained agents, `sampling: run` ignores the sampling parameters, effort and verbosity that these tables "
        "list as\nrejected, except `logit_bias`.\n"
    )
    tables = (_fields_of(import_module(f"astuner_gateway.endpoint.{name}")) for name in DIALECTS)
    return "\n".join(["### Supported fields\n", note, *tables])


def _fields_of(module: Any) -> str:
    honoured, labels = [], []
    refused: dict[str, list[str]] = {}
    for path, field in _every_field(module):
        if field.read is not None:
            honoured.append(f"`{path}`")
        elif field.always_harmless:
            labels.append(f"`{path}`")
        else:
            passes = " or ".join(f"`{json.dumps(value)}`" for value in field.harmless)
            refused.setdefault(field.why, []).append(f"`{path}`" + (f" ({passes})" if passes else ""))
    rows = [f"| {', '.join(names)} | {_cell(why)} |" for why, names in refused.items()]
    return (
        f"### `POST {module.DIALECT.route}`\n\nSupported: {', '.join(honoured)}.\n\n"
        f"Accepted without effect: {', '.join(labels)}.\n\n"
        "| rejected parameter (accepted values) | reason |\n|---|---|\n" + "\n".join(rows) + "\n"
    )


def program_keys() -> str:
    """Return the keys of the workflow `program`."""
    from astuner_gateway.program import ProgramConfig

    rows = []
    for name, field in ProgramConfig.model_fields.items():
        default = f" Default: `{field.default}`." if isinstance(field.default, str) else ""
        rows.append(f"| `{name}` | {_cell(' '.join((field.description or '').split()))}{default} |")
    return "| key of `astuner.rollout.program` | meaning |\n|---|---|\n" + "\n".join(rows) + "\n"


def _every_field(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield path and entry of every field; nested fields replace the object that contains them."""
    for name, field in module.FIELDS.fields.items():
        inner = getattr(field.read, "fields", {})
        yield from ((f"{name}.{below}", entry) for below, entry in inner.items()) if inner else [(name, field)]


# ---------------------------------------------------------------------------------------------------------- Python API


API = ROOT / "docs" / "api"
TOPICS: dict[str, dict[str, list[str]]] = yaml.safe_load(API.with_name("api_topics.yaml").read_text(encoding="utf-8"))


def api(topic: str) -> str:
    """Return the public names of a topic, with links to their source and first sentences."""
    rows = [
        f"| [`{path}`]({_file_of(module)}) | {_first_sentence(_definitions(module)[path.rpartition('.')[2]])} |"
        for module, path in _names_by_topic()[topic]
    ]
    return "| name | description |\n|---|---|\n" + "\n".join(rows) + "\n"


def api_index() -> str:
    """Return the names of every topic, with links to the topic's page."""
    rows = []
    for topic, names in _names_by_topic().items():
        links = (f"[`{path.rpartition('.')[2]}`]({topic}.md)" for _, path in names)
        title = (API / f"{topic}.md").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        rows.append(f"| [{title}]({topic}.md) | {', '.join(links)} |")
    return "| page | names |\n|---|---|\n" + "\n".join(rows) + "\n"


def api_pages() -> str:
    """Return the pages of the Python API for ``docs/README.md``, with their titles and first names."""
    rows = ["| [api/README.md](api/README.md) | every public name |"]
    for topic, listed in TOPICS.items():
        names = ", ".join(f"`{name.rpartition('.')[2]}`" for name in listed["first"])
        rows.append(f"| [api/{topic}.md](api/{topic}.md) | {names} |")
    return "| | |\n|---|---|\n" + "\n".join(rows) + "\n"


@cache
def _names_by_topic() -> dict[str, list[tuple[str, str]]]:
    """Return topic -> module and import path of each public name, in the order of its page.

    :raises SystemExit: A module with public names belongs to no topic.
    """
    public = _public_names()
    if left := public.keys() - {module for listed in TOPICS.values() for module in listed["modules"]}:
        raise SystemExit(f"docs/api_topics.yaml: add {', '.join(sorted(left))} to the modules of a topic")
    place = {name: (module, path) for module, paths in public.items() for name, path in paths.items()}
    first = {
        topic: [place.get(name) or (name.rpartition(".")[0], name) for name in listed["first"]]
        for topic, listed in TOPICS.items()
    }
    listed_first = {name for names in first.values() for name in names}
    return {
        topic: [
            *first[topic],
            *(
                (module, path)
                for module in listed["modules"]
                for path in public[module].values()
                if (module, path) not in listed_first
            ),
        ]
        for topic, listed in TOPICS.items()
    }


def _public_names() -> dict[str, dict[str, str]]:
    """Return module -> its public names -> their import paths, in source order.

    Public are the names of `astuner` and `astuner.testing`, and the documented names of `astuner.contracts`.
    """
    exported: dict[tuple[str, str], str] = {}
    for package in map(import_module, ("astuner", "astuner.testing")):
        home, _ = import_module("astuner").public_names(package.__name__, str(package.__file__))
        for name in package.__all__:
            module = home.get(name, package.__name__)
            if name in home and name not in _definitions(module):  # re-exported
                module = getattr(package, name).__module__
            exported[module, name] = f"{package.__name__}.{name}"
    modules = {module for module, _ in exported}
    contracts = import_module("astuner.contracts")
    modules |= {f"{contracts.__name__}.{module.name}" for module in pkgutil.iter_modules(contracts.__path__)}
    public = {}
    for module in sorted(modules):
        shown = {
            name: exported.get((module, name), f"{module}.{name}")
            for name, text in _definitions(module).items()
            if (module, name) in exported or (text and module.startswith("astuner.contracts."))
        }
        if shown:
            public[module] = shown
    return public


@cache
def _definitions(module: str) -> dict[str, str]:
    """Return the classes, functions and constants that a module defines, without private names -> their docstrings."""
    import ast

    tree = ast.parse(Path(str(import_module(module).__file__)).read_text(encoding="utf-8"))
    documented = {}
    for node, after in zip(tree.body, [*tree.body[1:], ast.Pass()], strict=True):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            documented[node.name] = ast.get_docstring(node) or ""
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            documented[ast.unparse(target)] = inspect.cleandoc(str(text))
    return {name: text for name, text in documented.items() if name.isidentifier() and not name.startswith("_")}


def _file_of(module: str) -> str:
    return f"../../{Path(str(import_module(module).__file__)).relative_to(ROOT).as_posix()}"


def _first_sentence(docstring: str) -> str:
    paragraph = _markdown(docstring).partition("\n\n")[0]
    return _cell(re.split(r"(?<=[.:]) (?=[A-Z])", paragraph.replace("\n", " "))[0])


# ------------------------------------------------------------------------------------------------------------- gallery


def gallery() -> str:
    """Return all examples as listed in `examples/README.md`, with their curves; examples without a curve last."""
    table = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    proves = dict(re.findall(r"^\| \[(\w+)\]\(\w+/README.md\) \| (.+?) \|", table, re.MULTILINE))
    if left := {page.parent.name for page in (ROOT / "examples").glob("*/README.md")} - proves.keys():
        raise SystemExit(f"examples/README.md: add a row to the table for {', '.join(sorted(left))}")
    texts, without = [], []
    for name, said in proves.items():
        line = f"[{name}](../examples/{name}/README.md): {_from_docs(said)}"
        if (ROOT / "examples" / name / "curve.png").is_file():
            picture = f"![Reward per step, and success on held-out tasks, of {name}](../examples/{name}/curve.png)"
            texts.append(f"## {name}\n\n{line}.\n\n{picture}\n")
        else:
            without.append(f"- {line}\n")
    return "\n".join([*texts, "## Without a curve\n", "".join(without)])


def _from_docs(markdown: str) -> str:
    """Convert the links of a text in examples/ for a page in docs/."""
    return re.sub(r"\]\((?!\.\./|https?:)", "](../examples/", markdown).replace("](../docs/", "](")


# ------------------------------------------------------------------------------------------------------------ families


def approximations() -> str:
    """Return the differences that ``merge_level: text`` ignores."""
    from astuner.contracts.types import APPROXIMATIONS

    rows = [f"| `{name}` | {_cell(text)} |" for name, text in APPROXIMATIONS.items()]
    return "| counted as | difference |\n|---|---|\n" + "\n".join(rows) + "\n"


# ---------------------------------------------------------------------------------------------------------------- text


def _markdown(text: str) -> str:
    """Convert a docstring to Markdown: roles and double backticks to code, parameters to text, without the example."""
    text = text.partition("\nExample::")[0].rstrip()
    text = re.sub(r":class:`~?(?:\w+\.)*(\w+)`", r"`\1`", text).replace("``", "`")
    return re.sub(r"^:param (\w+): ", r"`\1`: ", text, flags=re.MULTILINE)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{_cell(text)}`"


def _yaml(value: Any) -> str:
    return json.dumps(value)


def explanations() -> str:
    """Return the table of sentinel rules that explain other rules."""
    from astuner_report.sentinel.rules import EXPLAINS

    told = {f"`{name}`": ", ".join(f"`{other}`" for other in others) for name, others in EXPLAINS.items() if others}
    rows = [f"| {name} | {others} |" for name, others in told.items()]
    return "\n".join(["", "| Alarm | Suppressed consequences |", "|---|---|", *rows, ""])


PARTS: dict[str, Callable[[], str]] = {
    **{f"api {topic}": partial(api, topic) for topic in TOPICS},
    "api index": api_index,
    "api pages": api_pages,
    "approximations": approximations,
    "commands": commands,
    "endpoint fields": fields,
    "environment provider": environment_provider,
    "explanations": explanations,
    "families": families,
    "gallery": gallery,
    "hooks": hooks,
    "keys": keys,
    "local refuses": refused,
    "losses": losses,
    **{f"{table} metrics": partial(metrics, table) for table in ("episodes", "samples", "update", "speed")},
    "validation metrics": partial(metrics, "validation"),
    "older keys": renamed,
    "program keys": program_keys,
    "provider": provider,
    "trinity keys": partial(engine_keys, "astuner_trinity", "Trinity"),
    "trinity refuses": partial(engine_refused, "astuner_trinity"),
    "vocabularies": vocabularies,
    "verl keys": partial(engine_keys, "astuner_verl", "VERL"),
    "verl refuses": partial(engine_refused, "astuner_verl"),
}


def rewritten(text: str) -> str:
    """Return ``text`` with up-to-date generated parts.

    :raises KeyError: A part is unknown.
    """
    return PART.sub(lambda match: f"{match[1]}\n{PARTS[match[2]]()}\n{match[3]}", text)


def main(arguments: list[str]) -> int:
    stale = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := rewritten(text)) != text:
            stale.append(page)
            if "--check" not in arguments:
                page.write_text(new, encoding="utf-8")
    for page in stale:
        print(f"{page.relative_to(ROOT)}: {'outdated' if '--check' in arguments else 'updated'}")
    if stale and "--check" in arguments:
        print("Update the pages with: make docs")
    return int(bool(stale) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
