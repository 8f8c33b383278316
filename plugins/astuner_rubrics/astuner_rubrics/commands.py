"""Commands of ``astuner judge``: learn rubrics from labeled examples, and measure judges.

Invariant: stdout contains only the result (one document with ``--json``); progress is written to stderr.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from astuner.contracts.commands import JsonOption, new_app, write_json
from astuner.contracts.errors import ConfigError
from astuner.contracts.statistics import percent

if TYPE_CHECKING:
    from astuner_rubrics.learning import Result

app = new_app(
    no_args_is_help=True,
    help="""Learn rubrics from labeled examples, and measure how good a judge is.

\b
  astuner judge learn SAMPLES.jsonl --out rubrics.yaml   labeled examples -> an editable file of criteria
  astuner judge check JUDGE --labels LABELS.jsonl        agreement, biases, attacks and cost of a judge

\b
An example is one line of JSON; all lines of a file have the same form:
  {"question": "…", "answer": "…", "score": 3}
  {"question": "…", "answers": ["…", "…"], "preferred": 0}              0, 1 or "tie"
  {"question": "…", "answers": ["…", "…", "…"], "ranks": [2, 1, 3]}     1 is the best

\b
Use learned rubrics in a run:
  astuner: {task_judge: {judge: rubrics, rubrics: {file: rubrics.yaml, helper_model: NAME}}}
""",
)

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Experiment file with helper models.", show_default=False),
]
BaseUrlOption = Annotated[
    str | None,
    typer.Option("--base-url", metavar="URL", help="OpenAI-compatible server, up to /v1.", show_default=False),
]
ModelOption = Annotated[
    str | None, typer.Option("--model", metavar="NAME", help="Name of the model on the server.", show_default=False)
]
KeyOption = Annotated[
    str | None,
    typer.Option("--api-key-env", metavar="NAME", help="Variable that contains the API key.", show_default=False),
]

LEARN_EXAMPLES = """\
\b
Examples:
  astuner judge learn samples.jsonl --out rubrics.yaml --base-url http://127.0.0.1:8000/v1 --model NAME
  astuner judge learn samples.jsonl --out rubrics.yaml --config experiment.yaml --helper judge --dry-run
  astuner judge learn samples.jsonl --out rubrics.yaml --config experiment.yaml --themes 4 --votes 3

To continue after a stop, repeat the command: answers are stored in OUT.journal.jsonl and not requested again.
"""

CHECK_EXAMPLES = """\
\b
Examples:
  astuner judge check rubrics.yaml --labels labels.jsonl --base-url http://127.0.0.1:8000/v1 --model NAME
  astuner judge check llm_judge --labels labels.jsonl --config experiment.yaml --out card.html
  astuner judge check math_answer --labels labels.jsonl --attacks 3 --strict
"""


@app.command(epilog=LEARN_EXAMPLES)
def learn(
    samples: Annotated[Path, typer.Argument(metavar="SAMPLES.jsonl", help="Labeled examples, one per line.")],
    out: Annotated[Path, typer.Option(metavar="FILE.yaml", help="Rubric file to write.")] = Path("rubrics.yaml"),
    config: ConfigOption = None,
    helper: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Helper model to use. Default: the only one.", show_default=False),
    ] = None,
    base_url: BaseUrlOption = None,
    model: ModelOption = None,
    api_key_env: KeyOption = None,
    embedder: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Helper model for embeddings. Default: word statistics."),
    ] = None,
    proposals: Annotated[int, typer.Option(min=1, max=10, help="Maximum criteria proposed per example.")] = 3,
    max_epochs: Annotated[int, typer.Option(min=0, max=10, help="Maximum revisions per example.")] = 3,
    max_rubrics: Annotated[int, typer.Option(min=1, max=50, help="Maximum criteria in the file.")] = 10,
    themes: Annotated[int, typer.Option(min=0, max=20, help="Merge into at most N themes. 0: do not merge.")] = 0,
    votes: Annotated[int, typer.Option(min=1, max=25, help="Requests per verdict, in different orders.")] = 1,
    held_out: Annotated[
        float, typer.Option(min=0.1, max=0.9, help="Share of the examples used only to measure agreement.")
    ] = 0.3,
    scale: Annotated[
        tuple[float, float] | None,
        typer.Option(metavar="WORST BEST", help="Scale of the grades. Default: range of the labels, or 0 10."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the split.")] = 0,
    force: Annotated[
        bool, typer.Option("--force", help="Write the file despite objections. The file lists them.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace FILE even if it was edited or is not a rubric file.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the number of requests and exit.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Learn rubrics from labeled examples, and measure their agreement on held-out examples."""
    from astuner_rubrics.labels import read_labels
    from astuner_rubrics.learning import Settings, check_and_estimate, check_out, run_learning
    from astuner_rubrics.models import helpers_of

    settings = Settings(
        proposals=proposals, max_epochs=max_epochs, max_rubrics=max_rubrics, themes=themes, votes=votes,
        held_out=held_out, scale=scale, seed=seed, force=force,
    )  # fmt: skip
    if scale is not None and scale[0] >= scale[1]:
        raise ConfigError(f"--scale {scale[0]:g} {scale[1]:g}: the worst grade must be below the best")
    labels = read_labels(samples)
    if labels.repeated:
        _say(f"skipped duplicates of earlier lines: {', '.join(labels.repeated[:10])}")
    if dry_run:
        estimate = check_and_estimate(labels, settings)
        if as_json:
            write_json(asdict(estimate))
        else:
            typer.echo(str(estimate))
        return
    inputs = [samples] if config is None else [samples, config]
    check_out(out, inputs, overwrite=overwrite)
    helpers = helpers_of(config, base_url, model, api_key_env, scope=out)
    result, spent = run_learning(labels, settings, helpers, helper, embedder, out, _say, inputs=inputs,
                                 overwrite=overwrite)  # fmt: skip
    if as_json:
        conflicts = [{"examples": c.places, "criteria": c.criteria} for c in result.conflicts]
        rubrics = {"rubrics": result.rubrics.model_dump(mode="json"), "explained": result.explained}
        found = {"file": str(out), **rubrics, "candidates": result.candidates, "conflicts": conflicts}
        write_json({**found, "warnings": list(result.objections), "spent": spent})
    else:
        typer.echo(_as_text(result, out))


@app.command(epilog=CHECK_EXAMPLES)
def check(
    judge: Annotated[
        str, typer.Argument(metavar="JUDGE", help="Registered name, module->Class, file.py->Class or rubric file.")
    ],
    labels: Annotated[Path, typer.Option(metavar="FILE.jsonl", help="Labeled answers, one example per line.")],
    config: ConfigOption = None,
    base_url: BaseUrlOption = None,
    model: ModelOption = None,
    api_key_env: KeyOption = None,
    override: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the experiment file."),
    ] = None,
    answer_field: Annotated[
        str, typer.Option(metavar="NAME", help="Output metadata field in which the judge expects the answer.")
    ] = "final_answer",
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Maximum number of examples.")] = 200,
    repeats: Annotated[int, typer.Option(min=1, max=20, help="Repeats for self-consistency. 1: skip it.")] = 3,
    attacks: Annotated[int, typer.Option(min=0, max=20, help="Wrong answers per attack. 0: skip attacks.")] = 1,
    at_once: Annotated[int, typer.Option(min=1, max=256, help="Maximum concurrent questions.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of random draws.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write the card to a .md, .html or .json file.", show_default=False),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 unless the judge is fit.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure a judge: agreement with labels, ties, biases, noise, attacks, cost and latency.

    The verdict is "fit", "use with care" or "do not use", with the lines of the card that decided it.
    """
    from astuner_rubrics.card import Plan, as_markdown, run_check, write
    from astuner_rubrics.labels import read_labels

    if out is not None and out.suffix not in (".md", ".html", ".htm", ".json"):
        raise ConfigError(f"--out {out}: use a file name with .md, .html or .json")
    plan = Plan(limit=limit, repeats=repeats, attacks=attacks, seed=seed)
    card = run_check(
        judge, read_labels(labels), plan, config=config, overrides=override or [], base_url=base_url, model=model,
        api_key_env=api_key_env, answer_field=answer_field, at_once=at_once, say=_say,
    )  # fmt: skip
    if out is not None:
        write(card, out)
    if as_json:
        write_json(card.as_dict())
    else:
        typer.echo(as_markdown(card))
    if strict and card.fitness != "fit":
        raise typer.Exit(1)


def _as_text(result: Result, out: Path) -> str:
    lines = [f"{out}: {len(result.rubrics.rubrics)} rubrics ({result.rubrics.mode.value})"]
    lines += [f"  {r.weight:g} x {r.criterion}" for r in result.rubrics.rubrics]
    lines.append(f"agreement on held-out examples: {result.held_out}; chance is {percent(result.held_out.chance)}")
    lines.append(f"agreement on training examples: {result.train}")
    if result.conflicts:
        lines.append(f"{len(result.conflicts)} pairs of examples remain in conflict, for example:")
        lines += [f"  {conflict}" for conflict in result.conflicts[:3]]
    lines += [f"warning: {text}" for text in result.objections]
    return "\n".join(lines)


_say = partial(typer.echo, err=True)
