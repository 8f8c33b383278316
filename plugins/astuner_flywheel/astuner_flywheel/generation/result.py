"""From accepted tasks to training and validation files, with a report of everything that happened.

Invariant: the files are made from ``tasks.jsonl`` alone, in the order of the material, so however often a generation
was interrupted, the result is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from astuner import Task
from astuner_flywheel.generation import prompts
from astuner_flywheel.generation.config import DataGenerationConfig
from astuner_flywheel.generation.folder import Folder
from astuner_flywheel.generation.making import Making
from astuner_flywheel.generation.material import Material
from astuner_flywheel.generation.rows import kept_row, sample_row, task_of
from astuner_flywheel.generation.standing import Standing
from astuner_flywheel.splits import Sides, separate, split
from astuner_helpers import Helper


def result_settings(config: DataGenerationConfig) -> dict[str, Any]:
    """What the result depends on beside the material's fingerprint; may change from run to run of one folder."""
    return config.model_dump(mode="json", include=_RESULT)


_RESULT = {"tasks", "validation_share", "use_seeds", "leak_threshold"}


def write_result(config: DataGenerationConfig, material: Material, folder: Folder, standing: Standing) -> Sides:
    """Split what was accepted, and write both files."""
    rows = sorted(standing.accepted.values(), key=lambda row: (row["index"], row["number"]))
    made = [task_of(kept_row(row)) for row in rows[: config.tasks]]
    samples = [task_of(sample_row(sample)) for sample in material.samples]
    threshold, numbers = config.leak_threshold, config.numbers_tell_apart
    if config.use_seeds == "validation":
        sides = separate(made, samples, threshold=threshold, numbers_tell_apart=numbers)
    else:
        pool = made + (samples if config.use_seeds == "train" else [])
        share, seed = config.validation_share, config.seed
        groups = _by_evidence(pool)
        sides = split(
            pool,
            validation_share=share,
            seed=seed,
            threshold=threshold,
            numbers_tell_apart=numbers,
            group=lambda task: groups.get(task.task_id, ""),
        )
    folder.write_rows(folder.train, [_row(task) for task in sides.train])
    folder.write_rows(folder.validation, [_row(task) for task in sides.validation])
    return sides


def report(
    config: DataGenerationConfig,
    material: Material,
    making: Making,
    helpers: Sequence[Helper],
    *,
    sides: Sides | None,
    stopped: str = "",
) -> dict[str, Any]:
    """Everything that happened, as JSON; ``sides`` is None where it was stopped before the end."""
    standing = making.standing
    repeats = sum(standing.rejected[reason] for reason in ("near-duplicate", "near in meaning"))
    return {
        "finished": sides is not None,
        "stopped": stopped,
        "settings": result_settings(config),
        "wanted": config.tasks,
        "made": min(len(standing.accepted), config.tasks),
        "split": sides.report() if sides is not None else None,
        "rejected": dict(sorted(standing.rejected.items())),
        "duplicates": repeats,
        "spare": len(standing.waiting),
        "requests_answered": standing.answered,
        "failed": dict(making.failed),
        "refused": dict(standing.refused),
        "remarks": [making.luck.told] if making.luck.told else [],
        "material": {
            "documents": {document.path: len(document.text) for document in material.documents},
            "notes": {document.path: list(document.notes) for document in material.documents if document.notes},
            "passages": len(material.chunks),
            "samples": len(material.samples),
            "skipped": material.skipped,
            "ignored": material.ignored,
        },
        "model": helpers[0].model,
        "prompt_version": prompts.VERSION,
        "usage": {helper.name: asdict(helper.usage()) for helper in helpers},
    }


def summary(found: Mapping[str, Any], folder: Folder, *, files: bool = True) -> str:
    """The report in a few lines, for a person."""
    lines = [f"{found['made']} of {found['wanted']} tasks"]
    sides = found["split"]
    if sides is not None and files:
        lines[0] += f": {sides['train']} in {folder.train}, {sides['validation']} in {folder.validation}"
        if sides["leaks"]:
            moved = len(sides["leaks"])
            lines.append(f"{moved} stood on the other side of a near-duplicate and were moved or dropped (report.json)")
        lines += sides["notes"]
    if found["rejected"]:
        lines.append("rejected: " + ", ".join(f"{count} {reason}" for reason, count in found["rejected"].items()))
    if found["failed"]:
        lines.append(f"requests without an answer: {len(found['failed'])} (report.json); a larger --tasks asks again")
    if found.get("refused"):
        lines.append(f"requests that the helper would not answer: {len(found['refused'])} (report.json)")
    if found["material"]["skipped"]:
        lines.append(f"documents skipped: {'; '.join(found['material']['skipped'].values())}")
    if "earlier" in found:
        lines.append(f"what was there before is in {found['earlier']}")
    for name, usage in found["usage"].items():
        used = f"{usage['prompt_tokens'] + usage['completion_tokens']:,} tokens"
        cost = f", {usage['cost']:.4g} in money" if usage["cost"] else ""
        lines.append(f"{name}: {usage['calls']} requests, {used}{cost}; {usage['cached']} answers from the cache")
    return "\n".join(lines)


def progress_line(standing: Standing) -> str:
    """How far it is, in one line."""
    rejected = ", ".join(f"{count} {reason}" for reason, count in standing.rejected.most_common(3))
    wanted = standing.wanted + len(standing.accepted)
    parts = [
        f"{len(standing.accepted)} of {wanted} tasks",
        f"{standing.answered} requests for tasks answered",
        f"{len(standing.waiting)} waiting",
        f"{sum(standing.rejected.values())} rejected{f' ({rejected})' * bool(rejected)}",
    ]
    return " · ".join(parts)


def _by_evidence(tasks: Sequence[Task]) -> dict[str, str]:
    """Task -> the stretch of a document that decides it; tasks that share a sentence give each other away."""
    spans = []
    for task in tasks:
        provenance = task.metadata["provenance"]
        if provenance.get("span") is not None:
            spans.append((provenance["sha256"], *provenance["span"], task.task_id))
    groups: dict[str, str] = {}
    before, reach, name = "", -1, ""
    for sha256, start, end, task_id in sorted(spans):
        if sha256 != before or start >= reach:
            before, reach, name = sha256, end, f"{sha256}:{start}"
        reach = max(reach, end)
        groups[task_id] = name
    return groups


def _row(task: Task) -> dict[str, Any]:
    names = ("task_id", "main_query", "init_messages")
    inner = {name: value for name, value in task.metadata.items() if name not in names}
    history = {"init_messages": list(task.init_messages)} if task.init_messages else {}
    return {"task_id": task.task_id, "main_query": task.main_query, **history, "metadata": inner}
