"""What this plugin offers, described without importing it."""

from __future__ import annotations

from astuner import Provider, hookimpl

_JUDGES = ("astuner.task_judge.math_answer_as_judge->", "astune.task_judge.math_answer_as_judge->", "")
_APPWORLD = "ExampleAgentScopeLearnProtocol"


@hookimpl
def register_parts() -> dict[str, Provider]:
    return {
        "older_spellings": Provider(
            target="astuner_compat.spellings:Spellings", summary="keys of older experiment files, in today's words"
        )
    }


@hookimpl
def register_aliases() -> dict[tuple[str, str], tuple[str, ...]]:
    return {
        ("task reader", "env_service"): (
            "TaskReaderEnvService",
            "astuner.task_reader.task_reader_base->TaskReaderEnvService",
        ),
        ("task reader", "huggingface"): ("huggingface_dat_repo",),
        ("task reader", "jsonl"): ("jsonl_dataset_file", "dataset_file"),
        ("task reader", "tracing"): ("feedback_tracing",),
        ("workflow", "appworld"): (
            f"tutorial.example_appworld.appworld->{_APPWORLD}",
            f"tutorial.appworld->{_APPWORLD}",
            f"tutorial/appworld.py->{_APPWORLD}",
            f"tutorial/example_appworld/appworld.py->{_APPWORLD}",
        ),
        ("workflow", "math_agent"): (
            "tutorial.math_agent->MathAgentWorkflow",
            "tutorial.example_math_agent.math_agent->MathAgentWorkflow",
            "MathAgentWorkflow",
        ),
        ("judge", "env_service"): (
            "EnvServiceJudge",
            "astuner.task_judge.env_service_as_judge->EnvServiceJudge",
            "ajet.task_judge.env_service_as_judge->EnvServiceJudge",
        ),
        ("judge", "math_answer"): tuple(f"{prefix}MathAnswerAsJudge" for prefix in _JUDGES),
        ("judge", "math_answer_llm"): tuple(f"{prefix}MathAnswerAndLlmAsJudge" for prefix in _JUDGES),
        ("judge", "rubrics"): ("rubrics_auto_grader",),
    }
