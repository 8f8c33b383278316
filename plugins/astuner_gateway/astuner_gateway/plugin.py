"""What this plugin offers, described without importing it."""

from __future__ import annotations

from astuner import Provider, hookimpl


@hookimpl
def register_task_readers() -> dict[str, Provider]:
    return {
        "conversations": Provider(
            target="astuner_gateway.feedback.tasks:ConversationsTaskReader",
            summary="empty tasks, for training from users' conversations (--with feedback)",
            config="astuner_gateway.feedback.settings:ConversationsConfig",
        ),
    }


@hookimpl
def register_workflows() -> dict[str, Provider]:
    return {
        "program": Provider(
            target="astuner_gateway.program:ProgramWorkflow",
            summary="any program that speaks to an OpenAI- or Anthropic-style endpoint, in any language",
            config="astuner_gateway.program:ProgramConfig",
            requires=("aiohttp",),
            install="pip install astuner-gateway",
            aliases=("command",),
        ),
        "feedback": Provider(
            target="astuner_gateway.feedback.workflow:FeedbackWorkflow",
            summary="conversations of real users, rated by them (--with feedback)",
            config="astuner_gateway.feedback.settings:WorkflowConfig",
            requires=("aiohttp",),
            install="pip install astuner-gateway",
        ),
    }


@hookimpl
def register_services() -> dict[str, Provider]:
    return {
        "feedback": Provider(
            target="astuner_gateway.feedback.service:FeedbackService",
            summary="an OpenAI-style endpoint for an application, whose users' ratings are the rewards",
            config="astuner_gateway.feedback.settings:ServiceConfig",
            requires=("aiohttp",),
            install="pip install astuner-gateway",
        ),
    }


@hookimpl
def register_commands() -> dict[str, Provider]:
    return {
        "serve": Provider(
            target="astuner_gateway.serve_command:app",
            summary="answer as OpenAI's API does, with the model of an experiment",
        ),
    }


@hookimpl
def register_parts() -> dict[str, Provider]:
    return {
        "endpoint": Provider(
            target="astuner_gateway.endpoint:Endpoint",
            summary="an episode's model as OpenAI's and Anthropic's clients ask it, over HTTP",
        ),
    }
