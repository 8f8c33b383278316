"""What this plugin offers, described without importing it: the Quick Start's math agent and two judges."""

from __future__ import annotations

from astuner import Provider, hookimpl


@hookimpl
def register_workflows() -> dict[str, Provider]:
    return {
        "math_agent": Provider(
            target="astuner_math.workflow:MathAgentWorkflow",
            summary="an AgentScope ReAct agent that solves a math problem with Python, a calculator or neither",
            config="astuner_math.workflow:MathAgentConfig",
            requires=("agentscope", "astuner_sandbox"),
            install='pip install "astuner-math[agent]"',
        )
    }


@hookimpl
def register_judges() -> dict[str, Provider]:
    return {
        "math_answer": Provider(
            target="astuner_math.judges:MathAnswerAsJudge",
            summary="1 if the boxed answer equals the reference as mathematics, else 0",
            config="astuner_math.judges:MathAnswerConfig",
            requires=("math_verify",),
            install="pip install astuner-math",
        ),
        "math_answer_llm": Provider(
            target="astuner_math.llm_judge:MathAnswerAndLlmAsJudge",
            summary="as math_answer, and where that says no, a helper model decides",
            config="astuner_math.llm_judge:MathAnswerLlmConfig",
            requires=("math_verify",),
            install="pip install astuner-math",
        ),
    }
