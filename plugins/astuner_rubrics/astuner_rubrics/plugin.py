"""What astuner-rubrics offers, described without importing it."""

from __future__ import annotations

from astuner import Provider, hookimpl


@hookimpl
def register_judges() -> dict[str, Provider]:
    return {
        "llm_judge": Provider(
            target="astuner_rubrics.llm_judge:LlmJudge",
            summary="how good an answer is by criteria in plain words, as a helper model says",
            config="astuner_rubrics.llm_judge:LlmJudgeConfig",
        ),
        "rubrics": Provider(
            target="astuner_rubrics.rubrics_judge:PointwiseRubrics",
            summary="how good an answer is by a file of rubrics, as learned by astuner judge learn",
            config="astuner_rubrics.rubrics_judge:RubricsConfig",
        ),
        "relative": Provider(
            target="astuner_rubrics.relative:RelativeJudge",
            summary="which attempts at a task are better than the others, as a helper model says; needs no labels",
            config="astuner_rubrics.relative:RelativeConfig",
        ),
    }


@hookimpl
def register_commands() -> dict[str, Provider]:
    return {
        "judge": Provider(
            target="astuner_rubrics.commands:app",
            summary="learn rubrics from labelled examples, and measure how good a judge is",
        )
    }
