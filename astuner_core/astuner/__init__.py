"""ASTuner tunes AgentScope agents with reinforcement learning.

The names below are the public ones; each is imported when first touched, so ``import astuner`` costs nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from astuner.config import Config as Config
    from astuner.config import load_config as load_config
    from astuner.config.schema import Optim as Optim
    from astuner.config.schema import TrainerCommon as TrainerCommon
    from astuner.contracts.backbone import Backbone as Backbone
    from astuner.contracts.backbone import InferenceEngine as InferenceEngine
    from astuner.contracts.building import BuildContext as BuildContext
    from astuner.contracts.environment import Environment as Environment
    from astuner.contracts.environment import Evaluation as Evaluation
    from astuner.contracts.environment import StepResult as StepResult
    from astuner.contracts.errors import AstunerError as AstunerError
    from astuner.contracts.errors import ConfigError as ConfigError
    from astuner.contracts.errors import PluginError as PluginError
    from astuner.contracts.hookspecs import EnvironmentProvider as EnvironmentProvider
    from astuner.contracts.hookspecs import Provider as Provider
    from astuner.contracts.hookspecs import hookimpl as hookimpl
    from astuner.contracts.judge import Judge as Judge
    from astuner.contracts.log_sink import LogSink as LogSink
    from astuner.contracts.run import Run as Run
    from astuner.contracts.service import Service as Service
    from astuner.contracts.task_reader import TaskReader as TaskReader
    from astuner.contracts.types import Episode as Episode
    from astuner.contracts.types import Generation as Generation
    from astuner.contracts.types import JudgeOutput as JudgeOutput
    from astuner.contracts.types import Sample as Sample
    from astuner.contracts.types import StopReason as StopReason
    from astuner.contracts.types import Task as Task
    from astuner.contracts.types import WorkflowOutput as WorkflowOutput
    from astuner.contracts.types import WorkflowTask as WorkflowTask
    from astuner.contracts.workflow import Workflow as Workflow
    from astuner.rollout.agents import AgentRegistry as AgentRegistry
    from astuner.rollout.metrics import update_metrics as update_metrics
    from astuner.rollout.model_tuner import ModelTuner as ModelTuner
    from astuner.rollout.models import Models as Models
    from astuner.rollout.models import PolicyModel as PolicyModel
    from astuner.rollout.models import one_model as one_model
    from astuner.rollout.models import sampling_for as sampling_for
    from astuner.rollout.pool import Draw as Draw
    from astuner.rollout.pool import Group as Group
    from astuner.rollout.pool import RolloutPool as RolloutPool
    from astuner.rollout.runner import EpisodeRunner as EpisodeRunner
    from astuner.rollout.samples import build_samples as build_samples
    from astuner.rollout.steps import Ending as Ending
    from astuner.rollout.steps import StepRollout as StepRollout
    from astuner.runs.breakpoints import bp as bp
    from astuner.runs.hub import hub_downloads as hub_downloads
    from astuner.runs.hub import hub_problem as hub_problem
    from astuner.runs.hub import require_model as require_model
    from astuner.runs.launch import run as run
    from astuner.runs.run_dir import RunDir as RunDir
    from astuner.runs.services import run_service as run_service
    from astuner.runs.services import run_services as run_services
    from astuner.runs.serving import Serving as Serving
    from astuner.runs.serving import evaluate as evaluate
    from astuner.runs.serving import find_backbone as find_backbone
    from astuner.runs.serving import find_checkpoint as find_checkpoint
    from astuner.runs.serving import load_tokenizer as load_tokenizer
    from astuner.runs.serving import make_codec as make_codec
    from astuner.runs.serving import serve as serve
    from astuner.runs.serving import serve_policies as serve_policies
    from astuner.runs.tasks import planned_steps as planned_steps
    from astuner.runs.tasks import read_tasks as read_tasks

__version__ = "0.1.0"
API_VERSION = "0.1"
"""What plugins are written for; one states it as its own requirement, ``astuner-core>=0.1,<0.2``, which is read before
the plugin is imported."""

_HOME = {
    "AgentRegistry": "rollout.agents",
    "AstunerError": "contracts.errors",
    "Backbone": "contracts.backbone",
    "BuildContext": "contracts.building",
    "Config": "config",
    "ConfigError": "contracts.errors",
    "Draw": "rollout.pool",
    "Ending": "rollout.steps",
    "Environment": "contracts.environment",
    "EnvironmentProvider": "contracts.hookspecs",
    "Episode": "contracts.types",
    "EpisodeRunner": "rollout.runner",
    "Evaluation": "contracts.environment",
    "Generation": "contracts.types",
    "Group": "rollout.pool",
    "InferenceEngine": "contracts.backbone",
    "Judge": "contracts.judge",
    "JudgeOutput": "contracts.types",
    "LogSink": "contracts.log_sink",
    "ModelTuner": "rollout.model_tuner",
    "Models": "rollout.models",
    "Optim": "config.schema",
    "PluginError": "contracts.errors",
    "PolicyModel": "rollout.models",
    "Provider": "contracts.hookspecs",
    "RolloutPool": "rollout.pool",
    "Run": "contracts.run",
    "RunDir": "runs.run_dir",
    "Sample": "contracts.types",
    "Service": "contracts.service",
    "Serving": "runs.serving",
    "StepResult": "contracts.environment",
    "StepRollout": "rollout.steps",
    "StopReason": "contracts.types",
    "Task": "contracts.types",
    "TaskReader": "contracts.task_reader",
    "TrainerCommon": "config.schema",
    "Workflow": "contracts.workflow",
    "WorkflowOutput": "contracts.types",
    "WorkflowTask": "contracts.types",
    "bp": "runs.breakpoints",
    "build_samples": "rollout.samples",
    "evaluate": "runs.serving",
    "find_backbone": "runs.serving",
    "find_checkpoint": "runs.serving",
    "hookimpl": "contracts.hookspecs",
    "hub_downloads": "runs.hub",
    "hub_problem": "runs.hub",
    "load_config": "config",
    "load_tokenizer": "runs.serving",
    "make_codec": "runs.serving",
    "one_model": "rollout.models",
    "planned_steps": "runs.tasks",
    "read_tasks": "runs.tasks",
    "require_model": "runs.hub",
    "run": "runs.launch",
    "run_service": "runs.services",
    "run_services": "runs.services",
    "sampling_for": "rollout.models",
    "serve": "runs.serving",
    "serve_policies": "runs.serving",
    "update_metrics": "rollout.metrics",
}

__all__ = ["API_VERSION", "__version__", *sorted(_HOME)]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        if not name.startswith("_") and _Moved.find_spec(f"astuner.{name}") is not None:
            return import_module(f"astuner.{name}")
        raise AttributeError(f"module 'astuner' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"astuner.{_HOME[name]}"), name)
    return value


def older_modules() -> Iterator[Any]:
    """What knows the older names of modules: a package that is installed names it by an entry point.

    It is a finder of modules (`importlib.abc.MetaPathFinder`).
    """
    from importlib.metadata import entry_points

    for entry in entry_points(group="astuner.older_modules"):
        yield entry.load()


class _Moved:
    """Asked for a module that nobody finds: it may have had this name before."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> Any:
        if not name.startswith("astuner."):
            return None
        return next((spec for older in older_modules() if (spec := older.find_spec(name, path, target))), None)


sys.meta_path.append(_Moved)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
