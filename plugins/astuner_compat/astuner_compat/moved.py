"""Where modules of ``astuner`` went when it was cut into rooms and packages; their old names work for one release.

An old name gives the very module that has the new one, with a `DeprecationWarning` that says so: `isinstance` and
patching hold. The core finds this file by its entry point in the group ``astuner.older_modules``, and not before a name
of ``astuner`` is not found.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_ROOMS = {
    "contracts": "backbone diagnosis environment errors hookspecs interrupt judge log_sink metric_names service"
    " task_reader types workflow",
    "plugins": "registry user_code",
    "rollout": "completions_engine model_tuner queueing",
    "runs": "breakpoints hub launch plan preflight run_dir"
    " serving tasks",
    "support": "collector http_client json_lines locks processes strict_json threads",
}
"""Room -> what lay beside it, under the same name, before."""

MOVED = {
    "astuner.config.places": "astuner.contracts.places",
    "astuner.config.secrets": "astuner.contracts.secrets",
    "astuner.config.whereabouts": "astuner.config.explain",
    "astuner.config.base": "astuner.contracts.section",
    "astuner.config.helper_models": "astuner_helpers.settings",
    "astuner.config.sentinel": "astuner_report.sentinel.settings",
    "astuner.config.telemetry": "astuner_trackers.telemetry.settings",
    "astuner.config.legacy": "astuner_compat.spellings",
    "astuner.plugins.moved": "astuner_compat.moved",
    **{f"astuner.{name}": f"astuner.{room}.{name}" for room, names in _ROOMS.items() for name in names.split()},
    "astuner.companions": "astuner.runs.services",
    "astuner.report": "astuner.runs.result",
    "astuner.books": "astuner.runs.run",
    "astuner.experiment": "astuner.runs.run",
    "astuner.runs.books": "astuner.runs.run",
    "astuner.runs.experiment": "astuner.runs.run",
    "astuner.rollout.group_judging": "astuner.rollout.judging",
    "astuner.rollout.roster": "astuner.rollout.agents",
    "astuner.rollout.sampling": "astuner.rollout.models",
    "astuner.rollout.ahead": "astuner.rollout.pool",
    "astuner.rollout.elsewhere": "astuner.rollout.steps",
    "astuner.cli.chat": "astuner_debug.chat_command",
    "astuner.debug_session": "astuner_debug.breakpoints",
    "astuner.debugger": "astuner_debug.breakpoints",
    "astuner.builtin.fields": "astuner.contracts.rows",
    "astuner.builtin.huggingface": "astuner_datasets.reader",
    "astuner.cli.export": "astuner_export.export_command",
    "astuner.export": "astuner_export.model",
    "astuner.chat.agentscope": "astuner_agentscope.face",
    "astuner.chat.agentscope1": "astuner_agentscope.agentscope1",
    "astuner.chat.agentscope2": "astuner_agentscope.agentscope2",
    "astuner.chat.fast_encode": "astuner.chat.template",
    "astuner.chat.errors": "astuner.contracts.errors",
    "astuner.chat.messages": "astuner.contracts.messages",
    "astuner.chat.answer": "astuner.contracts.messages",
    "astuner.chat.tool_calls": "astuner.contracts.chat_family",
    "astuner.builtin.environments": "astuner_env.readers",
    "astuner.env_service": "astuner_env.env_service",
    "astuner.environment_setup": "astuner_env.environment_setup",
    "astuner.older_environment": "astuner_env.older_environment",
    "astuner.older_state": "astuner_env.older_state",
    "astuner.access_file": "astuner_gateway.access_file",
    "astuner.builtin.feedback": "astuner_gateway.feedback",
    "astuner.builtin.program": "astuner_gateway.program",
    "astuner.cli.serve": "astuner_gateway.serve_command",
    "astuner.endpoint": "astuner_gateway.endpoint",
    "astuner.endpoint.anthropic_answer": "astuner_gateway.endpoint.anthropic_messages",
    "astuner.endpoint.json_body": "astuner_gateway.gate",
    "astuner.endpoint.responses_answer": "astuner_gateway.endpoint.openai_responses",
    "astuner.endpoint.sse": "astuner_gateway.endpoint.request",
    "astuner.listening": "astuner_gateway.listening",
    "astuner.served": "astuner_gateway.served",
    "astuner.served.access": "astuner_gateway.listening",
    "astuner.served.server": "astuner_gateway.gate",
    "astuner.builtin.weighted": "astuner_helpers.weighted",
    "astuner.helper_models": "astuner_helpers",
    "astuner.rollout.members": "astuner_helpers.members",
    "astuner.rollout.checks": "astuner_checks.named",
    "astuner.rollout.external": "astuner_helpers.external",
    "astuner.untrusted": "astuner_helpers.untrusted",
    "astuner.aside": "astuner_ray.redirect",
    "astuner.builtin.ray_service": "astuner_ray.service",
    "astuner.native": "astuner_ray.native",
    "astuner.ray_cluster": "astuner_ray.cluster",
    "astuner.ray_fleet": "astuner_ray.fleet",
    "astuner.ray_node": "astuner_ray.node",
    "astuner.ray_worker": "astuner_ray.worker",
    "astuner.step_states": "astuner_ray.step_states",
    "astuner.training.before_update": "astuner_ray.training.before_update",
    "astuner.training.loss": "astuner_ray.training.loss",
    "astuner.training.optim": "astuner_ray.training.optim",
    "astuner.training.optim_settings": "astuner_ray.training.optim_settings",
    "astuner.objective": "astuner_objectives.step",
    "astuner.schedule": "astuner_objectives.schedule",
    "astuner.training": "astuner_objectives",
    "astuner.training.objective": "astuner_objectives.step",
    "astuner.cli.check": "astuner_record.check_command",
    "astuner.cli.replay": "astuner_record.replay_command",
    "astuner.compare.statistics": "astuner_record.statistics",
    "astuner.episode_log": "astuner_record.episode_log",
    "astuner.replay": "astuner_record.replay",
    "astuner.rollout.certificate": "astuner_record.certificate",
    "astuner.token_check": "astuner_record.token_check",
    "astuner.cli.diff": "astuner_report.diff_command",
    "astuner.cli.report": "astuner_report.report_command",
    "astuner.compare": "astuner_report.compare",
    "astuner.curve": "astuner_report.curve",
    "astuner.run_report": "astuner_report.run_report",
    "astuner.sentinel": "astuner_report.sentinel",
    "astuner.isolation": "astuner_sandbox.isolation",
    "astuner.sandbox": "astuner_sandbox",
    "astuner.builtin.mlflow_sink": "astuner_trackers.trackers",
    "astuner.builtin.studio": "astuner_trackers.studio",
    "astuner.builtin.studio_messages": "astuner_trackers.studio",
    "astuner.builtin.trackers": "astuner_trackers.trackers",
    "astuner.telemetry": "astuner_trackers.telemetry",
}
"""The module's name before -> its name now. What lay in a package that moved went with it."""


def place_now(name: str) -> str | None:
    """What the module ``name`` of before is called now; None where it has not moved."""
    old, rest = name, ""
    while old not in MOVED:
        old, dot, last = old.rpartition(".")
        if not dot:
            return None
        rest = f".{last}{rest}"
    return MOVED[old] + rest


class Finder(MetaPathFinder):
    """Finds modules by the names they had.

    It has to come first once one was found: what is in a package that moved would be found in its folder, and be
    loaded a second time under its old name.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith("astuner.") or (now := place_now(name)) is None:
            return None
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        return ModuleSpec(name, _AtItsPlace(name, now))


FINDER = Finder()


class _AtItsPlace(Loader):
    """Loads nothing: gives the module that is there under its new name."""

    def __init__(self, old: str, now: str) -> None:
        self._old, self._now = old, now
        self._spec: Any = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        package = self._now.partition(".")[0]
        try:
            module = importlib.import_module(self._now)
        except ModuleNotFoundError as e:
            if e.name != package:
                raise
            raise ModuleNotFoundError(
                f"{self._old} is {self._now} now, which comes with a package of its own: "
                f"pip install {package.replace('_', '-')}",
                name=package,
            ) from None
        _warn(f"{self._old} is {self._now} now; the old name goes with the next release")
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # importlib has put that of the old name there


_BETWEEN = (__file__, importlib.__file__, str(sys.modules["astuner"].__file__))


def _warn(text: str) -> None:
    """At the line that used the old name, however many frames of the import system are between."""
    frame = sys._getframe(1)
    while frame.f_back and (frame.f_code.co_filename in _BETWEEN or frame.f_code.co_filename.startswith("<frozen ")):
        frame = frame.f_back
    module, seen = frame.f_globals.get("__name__", ""), frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, DeprecationWarning, frame.f_code.co_filename, frame.f_lineno, module, seen)
