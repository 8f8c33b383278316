"""ASTuner tunes AgentScope agents with reinforcement learning.

The names below are the public ones; each is imported when first touched, so ``import astuner`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from astuner.backbone import Backbone as Backbone
    from astuner.backbone import InferenceEngine as InferenceEngine
    from astuner.breakpoints import bp as bp
    from astuner.config import load_config as load_config
    from astuner.environment import Environment as Environment
    from astuner.environment import Evaluation as Evaluation
    from astuner.environment import StepResult as StepResult
    from astuner.errors import AstunerError as AstunerError
    from astuner.errors import ConfigError as ConfigError
    from astuner.errors import PluginError as PluginError
    from astuner.hookspecs import EnvironmentProvider as EnvironmentProvider
    from astuner.hookspecs import Provider as Provider
    from astuner.hookspecs import hookimpl as hookimpl
    from astuner.judge import Judge as Judge
    from astuner.launch import run as run
    from astuner.log_sink import LogSink as LogSink
    from astuner.model_tuner import ModelTuner as ModelTuner
    from astuner.service import Service as Service
    from astuner.task_reader import TaskReader as TaskReader
    from astuner.types import Episode as Episode
    from astuner.types import Generation as Generation
    from astuner.types import JudgeOutput as JudgeOutput
    from astuner.types import Sample as Sample
    from astuner.types import StopReason as StopReason
    from astuner.types import Task as Task
    from astuner.types import WorkflowOutput as WorkflowOutput
    from astuner.types import WorkflowTask as WorkflowTask
    from astuner.workflow import Workflow as Workflow

__version__ = "0.1.0"

_HOME = {
    "AstunerError": "errors",
    "Backbone": "backbone",
    "ConfigError": "errors",
    "Environment": "environment",
    "EnvironmentProvider": "hookspecs",
    "Episode": "types",
    "Evaluation": "environment",
    "Generation": "types",
    "InferenceEngine": "backbone",
    "Judge": "judge",
    "JudgeOutput": "types",
    "LogSink": "log_sink",
    "ModelTuner": "model_tuner",
    "PluginError": "errors",
    "Provider": "hookspecs",
    "Sample": "types",
    "Service": "service",
    "StepResult": "environment",
    "StopReason": "types",
    "Task": "types",
    "TaskReader": "task_reader",
    "Workflow": "workflow",
    "WorkflowOutput": "types",
    "WorkflowTask": "types",
    "bp": "breakpoints",
    "hookimpl": "hookspecs",
    "load_config": "config",
    "run": "launch",
}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'astuner' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"astuner.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
