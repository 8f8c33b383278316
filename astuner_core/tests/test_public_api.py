"""The public names and their shapes, pinned: whoever changes one changes this page, the docs and the changelog.

Enough of each is written down that code which uses it would notice: parameters with their kinds and defaults, fields
in their order, abstract methods, and which error is which.
"""

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import astuner
from astuner.contracts import errors
from tests.table import table

ROOT = Path(__file__).parents[2]

NAMES = (
    "API_VERSION AgentRegistry AgentSection AlgorithmSection AstunerError AstunerSection Backbone BuildContext "
    "CONTRACTS ChatCodec ChatRequest ChatTemplate Clock Config ConfigError Conversation DISABLE_PLUGINS DebugSection "
    "Draw EncodedPrompt Ending EndpointSection Environment EnvironmentProvider Episode EpisodeLog EpisodeRecorder "
    "EpisodeRunner EpisodeState EpisodesHere Evaluation ExternalSpeaker Generation Group InferenceEngine Judge "
    "JudgeOutput Judging LockTaken LogSink LoggedEpisode LoraSection ModelSection ModelTuner Models NoVerdict Offer "
    "Optim OutOfTime Plugin PluginError PluginManager PluginStatus PolicyModel PolicySpeaker Preflight Provider "
    "RecordedProcess RolloutPool Run RunDir RunResult "
    "STRUCTURED_TOOL Said Sample Service Serving StepResult StepRollout StopReason TOKEN_VARIABLE Task TaskReader "
    "TimeLimits TrainerCommon Tuning Workflow WorkflowOutput WorkflowTask __version__ append_jsonl ask_group_judge "
    "ask_judge astuner_home bp build_judge build_samples check_section check_unlocked debug_folder "
    "describe_failure describe_field end_loop estimate_advantages evaluate evaluate_groups field_at find_backbone "
    "find_checkpoint find_loss find_offer find_optional_part find_part find_provider find_user_file forget_process "
    "home_folder honoured_by hookimpl hub_downloads hub_problem import_target import_user_code in_daemon_thread "
    "is_code is_folder_name is_same_process key_models key_spellings load_config load_plugins load_tokenizer lock_file "
    "log_file make_codec make_judge missing_modules one_model planned_steps policy_folder process_start_time "
    "raised_at read_config read_jsonl read_tasks record_process recorded_process recorded_processes require_model run "
    "run_service run_services sampling_for section_of serve serve_policies to_html token_loss tune unfinished upwards "
    "user_module walk_fields write_jsonl"
)

FIELDS = {
    "BuildContext": "config name= dry_run= purpose= folder= helpers=",
    "Episode": (
        "workflow_task turns output verdict reward_source= stop_reason error= seconds= retries= external= started="
    ),
    "EnvironmentProvider": (
        "target summary= config= requires= install= conflicts= aliases= splits= python= packages= lent= preload= "
        "setup= create_timeout= step_timeout= evaluate_timeout= memory_mb= "
        "max_memory_mb= max_processes="
    ),
    "Evaluation": "score success= details=",
    "Generation": "prompt_ids response_ids logprobs finish_reason policy_version",
    "JudgeOutput": "reward is_success= metrics= rewards=",
    "Provider": "target summary= config= requires= install= conflicts= aliases=",
    "Sample": (
        "episode_id group_id agent input_ids loss_mask logprobs policy_version reward advantage= token_weight= "
        "role= policy="
    ),
    "StepResult": "observation reward= terminated= truncated= info= messages=",
    "Task": "task_id main_query= init_messages= env_type= metadata=",
    "WorkflowOutput": "reward= is_success= response= metadata= metrics= evaluation=",
    "WorkflowTask": "task episode_id group_id split= attempt=",
}
"""Dataclass -> its fields; ``=`` marks one with a default."""

METHODS = {
    "Backbone": {
        "from_config": "(section, context)",
        "check": "(self)",
        "native": "(self)",
        "latest_state": "(self, folder)",
        "saved_states": "(self, run_dir)",
        "has_saved_state": "(self, run_dir)",
        "lend": "(self, folder, interrupt, note)",
        "plan": "(self)",
        "serve": "abstract (self, model_path=None)",
        "train": "abstract (self, run)",
    },
    "Environment": {
        "close": "(self)",
        "describe": "(self)",
        "evaluate": "abstract (self)",
        "interrupt": "(self)",
        "reset": "abstract (self, task)",
        "step": "abstract (self, action)",
        "tasks": "abstract (split, params)",
    },
    "InferenceEngine": {
        "generate": "abstract (self, prompt_ids, sampling, *, session='')",
    },
    "Judge": {
        "from_config": "(section, context)",
        "judge": "abstract (self, workflow_task, output)",
    },
    "LogSink": {
        "check": "(config)",
        "close": "(self)",
        "episode": "(self, step, episode)",
        "for_run": "(context)",
        "from_config": "(section, context)",
        "handle": "(self, event)",
        "note": "(self, text)",
        "numbers": "(self)",
        "open": "(self, run_dir, run_name, settings)",
        "progress": "(self, progress)",
        "remark": "(text)",
        "state": "(self)",
        "step": "abstract (self, step, metrics)",
        "summary": "(self)",
        "wants": "(self, event)",
    },
    "ModelTuner": {
        "__call__": "(self, *args, **options)",
        "as_agentscope_model": "(self, agent_name=None, role=None)",
        "as_openai_client": "(self, agent_name=None, role=None, **client_options)",
        "base_url_and_key": "(self, agent_name=None, role=None)",
        "chat": (
            "(self, messages, tools=None, *, agent_name=None, role=None, max_tokens=None, temperature=None, "
            "top_p=None, stop=None, seed=None, tool_choice=None, response_schema=None)"
        ),
        "chat_sync": "(self, messages, tools=None, **options)",
        "close": "(self)",
        "count_prompt_tokens": (
            "(self, messages, tools=None, *, agent_name=None, role=None, tool_choice=None, response_schema=None)"
        ),
        "find_waiting": "(self, output)",
        "gym_step": "(self, action)",
        "gym_step_async": "(self, action)",
        "leave_out": "(self, turn_indices)",
        "prompt_template": "(self, agent_name=None, role=None)",
    },
    "Run": {
        "check_stop": "(self)",
        "credit": "(self, rollout, *, policy_version, penalties=None)",
        "draw": "(self, step, split=...)",
        "end": "(self, step, group)",
        "is_due": "(self, what, step)",
        "prefetch": "(self, host, groups)",
        "publish": "(self, event)",
        "restore": "(self, state, step)",
        "rollout": "(self, models, step)",
        "state": "(self)",
        "take": "(self, step, group_ids)",
        "try_out": "(self, models, *, tasks, max_parallel)",
        "validate": "(self, models, step)",
    },
    "Service": {
        "address": "(self)",
        "environ": "(self)",
        "from_config": "(section, context)",
        "is_ready": "abstract (self)",
        "start": "abstract (self, *, url='', log=None)",
        "stop": "abstract (self)",
    },
    "TaskReader": {
        "from_config": "(section, context)",
        "missing": "(section, base_dir)",
        "read": "abstract (self, split)",
    },
    "Workflow": {
        "from_config": "(section, context)",
        "execute": "abstract (self, workflow_task, model_tuner)",
    },
}
"""Class -> what a subclass implements (abstract first) or calls; parameters without annotations."""

FUNCTIONS = {
    "astuner.append_jsonl": "(path, row)",
    "astuner.ask_group_judge": "(judge, attempts, about, wait=..., who='')",
    "astuner.ask_judge": "(judge, workflow_task, output, about, wait=..., who='')",
    "astuner.astuner_home": "()",
    "astuner.bp": "(tag, *, once=True)",
    "astuner.build_judge": "(config)",
    "astuner.build_samples": "(episode, *, max_samples=30)",
    "astuner.check_section": "(model, tree, prefix, report, *, elsewhere=())",
    "astuner.check_unlocked": "(path)",
    "astuner.contracts.commands.all_overrides": "(overrides, run_dir=None)",
    "astuner.contracts.commands.command_line": "(ctx)",
    "astuner.contracts.commands.only_data_on_stdout": "(wanted)",
    "astuner.contracts.commands.write_json": "(data)",
    "astuner.debug_folder": "(folder)",
    "astuner.describe_failure": "(episode)",
    "astuner.end_loop": "(loop, seconds)",
    "astuner.estimate_advantages": "(name, estimator, compared)",
    "astuner.evaluate": (
        "(path, overrides=(), *, backbone=None, checkpoint='best', tasks=None, repeat=None, services=(), "
        "disabled_plugins=())"
    ),
    "astuner.find_backbone": "(config)",
    "astuner.find_checkpoint": "(config, checkpoint)",
    "astuner.find_offer": "(manager, kind, reference)",
    "astuner.find_optional_part": "(manager, name)",
    "astuner.find_part": "(manager, name, *, wanted_by)",
    "astuner.find_provider": "(manager, kind, reference)",
    "astuner.find_user_file": "(reference, base_dir=None)",
    "astuner.forget_process": "(pid)",
    "astuner.hub_downloads": "(kind)",
    "astuner.hub_problem": "(name, downloaded)",
    "astuner.import_target": "(target)",
    "astuner.import_user_code": "(reference, base_dir=None)",
    "astuner.in_daemon_thread": "(function, *args, name='astuner')",
    "astuner.is_code": "(reference)",
    "astuner.is_folder_name": "(path)",
    "astuner.is_same_process": "(pid, started)",
    "astuner.key_spellings": "(model)",
    "astuner.load_config": "(path, overrides=(), *, backbone=None, disabled_plugins=(), plugins=None)",
    "astuner.load_plugins": "(disabled=())",
    "astuner.load_tokenizer": "(model, revision=None, *, trust_remote_code=False)",
    "astuner.lock_file": "(path)",
    "astuner.log_file": "(what)",
    "astuner.make_codec": "(config, tokenizer)",
    "astuner.make_judge": "(reference, section, context)",
    "astuner.missing_modules": "(provider)",
    "astuner.one_model": "(engine, codec)",
    "astuner.planned_steps": "(config, tasks)",
    "astuner.policy_folder": "(checkpoint, policy)",
    "astuner.process_start_time": "(pid)",
    "astuner.raised_at": "(error, *, caller='')",
    "astuner.read_config": "(path, overrides=(), *, backbone=None, disabled_plugins=(), plugins=None)",
    "astuner.read_jsonl": "(path)",
    "astuner.read_tasks": "(config, *, dry_run=False)",
    "astuner.record_process": "(pid, what, run_dir='')",
    "astuner.recorded_process": "(pid, what, run_dir='')",
    "astuner.recorded_processes": "(run_dir=None)",
    "astuner.require_model": "(path)",
    "astuner.run": (
        "(path, overrides=(), *, backbone=None, resume='auto', dry_run=False, services=(), disabled_plugins=(), "
        "debug_tags=(), debug_listen=False, listeners=(), interrupt=None)"
    ),
    "astuner.tune": (
        "(workflow, *, judge=None, tasks, validation=None, model, backbone='local', name=None, "
        "folder='launcher_record', settings=None, wait=True, **options)"
    ),
    "astuner.run_service": "(service, what, url, log)",
    "astuner.run_services": "(config, names, run_dir=None, *, dry_run=False)",
    "astuner.sampling_for": "(config, split)",
    "astuner.serve": "(path, overrides=(), *, backbone=None, checkpoint='best', services=(), disabled_plugins=())",
    "astuner.serve_policies": "(backbone, config, checkpoint=None)",
    "astuner.support.processes.recorded_process": "(pid, what, run_dir='')",
    "astuner.testing.check_backbone": "(backbone_cls, config, *, max_tokens=8)",
    "astuner.testing.check_environment": "(env_cls, *, params=None, act=None, steps=3, split='train')",
    "astuner.testing.check_judge": "(judge, workflow_task, output)",
    "astuner.testing.check_metrics": "(rows, *, backbone)",
    "astuner.testing.check_output_check": "(check, wrong, *, ordinary=..., tools=None)",
    "astuner.testing.check_plugin": "(name)",
    "astuner.testing.check_task_reader": "(reader, *, splits=..., first=200)",
    "astuner.testing.check_workflow": "(workflow_cls, workflow_task, *, replies=..., config=None)",
    "astuner.testing.fake_config": "(folder, text='', overrides=(), *, disabled_plugins=())",
    "astuner.testing.make_tokenizer": (
        "(chat_template=None, special_tokens=..., *, eos_token='<|im_end|>', bos_token=None)"
    ),
    "astuner.testing.workflow_task": "(query='What is 2 + 2?', *, split=..., **metadata)",
    "astuner.token_loss": "(name, loss, given)",
    "astuner.unfinished": "(turns, reason)",
    "astuner.upwards": "(leaf, spoken)",
    "astuner.write_jsonl": "(path, rows)",
}

ERRORS = {
    "AstunerError": "Exception",
    "ConfigError": "AstunerError",
    "DataError": "AstunerError",
    "PluginError": "AstunerError",
    "UnknownName": "PluginError",
    "AmbiguousName": "PluginError",
    "MissingDependency": "PluginError",
    "RunError": "AstunerError",
    "CheckpointError": "RunError",
    "Interrupted": "RunError",
    "EpisodeError": "AstunerError",
    "PromptTooLong": "EpisodeError",
    "ContextOverflow": "EpisodeError",
    "TurnLimitReached": "EpisodeError",
    "EpisodeAborted": "EpisodeError",
    "ModelFailed": "EpisodeError",
    "EnvironmentFailed": "EpisodeError",
    "JudgeFailed": "EpisodeError",
    "UnsupportedRequest": "EpisodeError",
}
"""Error -> what it is a kind of."""


def shape(function):
    """The parameters without annotations: names, kinds, and defaults that are plain data."""

    def plain(default):
        known = default in (None, inspect.Parameter.empty, ()) or type(default) in (str, int, float, bool)
        return default if known else ...

    parameters = inspect.signature(function).parameters.values()
    bare = [p.replace(annotation=p.empty, default=plain(p.default)) for p in parameters]
    return str(inspect.Signature(bare)).replace("Ellipsis", "...")


def fields(cls):
    missing = dataclasses.MISSING
    required = {f.name: f.default is missing and f.default_factory is missing for f in dataclasses.fields(cls)}
    return " ".join(name if needed else f"{name}=" for name, needed in required.items())


def methods(cls):
    public = {n: m for n, m in inspect.getmembers(cls, inspect.isroutine) if not n.startswith("_") or n == "__call__"}
    own = {
        n: m for n, m in public.items() if any(n in vars(base) for base in cls.__mro__ if "astuner" in base.__module__)
    }
    return {n: ("abstract " if n in getattr(cls, "__abstractmethods__", ()) else "") + shape(m) for n, m in own.items()}


def test_names():
    assert sorted(astuner.__all__) == NAMES.split()
    for name in NAMES.split():
        assert getattr(astuner, name) is not None


@table("name", FIELDS)
def test_fields(name):
    assert fields(getattr(astuner, name)) == FIELDS[name]


def test_what_surrounds_a_thing_that_is_made():
    own = {name for name, value in vars(astuner.BuildContext).items() if isinstance(value, property)}
    assert own == {"base_dir", "helper_models", "plugins", "run_dir", "seed"}


@table("name", METHODS)
def test_methods(name):
    assert methods(getattr(astuner, name)) == METHODS[name]


@table("name", FUNCTIONS)
def test_functions(name):
    module, _, function = name.rpartition(".")
    assert shape(getattr(__import__(module, fromlist=["x"]), function)) == FUNCTIONS[name]


def test_what_a_backbone_drives_is_at_most_20_things():
    run = astuner.Run
    attributes = "config interrupt resume_from run_dir runner total_steps validation_tasks"
    assert sorted(run.__annotations__) == attributes.split()
    assert len(METHODS["Run"]) + len(run.__annotations__) <= 20
    assert inspect.getdoc(run)


def test_errors():
    found = {
        name: cls.__bases__[0].__name__
        for name, cls in vars(errors).items()
        if inspect.isclass(cls) and issubclass(cls, Exception)
    }
    assert found == ERRORS


def test_how_an_episode_can_end():
    assert " ".join(reason.value for reason in astuner.StopReason) == (
        "completed truncated context_overflow prompt_too_long check_aborted workflow_failed timed_out "
        "environment_failed model_failed worker_lost judge_failed left_out cancelled"
    )


def test_every_public_thing_is_documented():
    for name in NAMES.split():
        if name not in ("API_VERSION", "__version__", "hookimpl"):
            assert inspect.getdoc(getattr(astuner, name)), f"astuner.{name} has no docstring"


def test_names_are_imported_when_touched():
    code = (
        "import sys, astuner\n"
        "assert not [m for m in sys.modules if m.startswith('astuner.')]\n"
        "from astuner import Task\n"
        "ours = sorted(m for m in sys.modules if m.startswith('astuner.'))\n"
        "names = ('display', 'errors', 'interrupt', 'scalars', 'secrets', 'types')\n"
        "assert ours == ['astuner.contracts', *(f'astuner.contracts.{n}' for n in names)]\n"
        "assert 'run' in dir(astuner)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_version_that_plugins_are_written_for():
    """`astuner new plugin` writes the bound, and a plugin that states another one is not imported (test_plugins.py)."""
    assert astuner.__version__.startswith(f"{astuner.API_VERSION}.")
    bound = f'"astuner-core>={astuner.API_VERSION},<'
    for file in sorted(ROOT.glob("plugins/*/pyproject.toml")):
        assert bound in file.read_text(), f"{file} does not state the version of the hooks"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Tasks'"):
        _ = astuner.Tasks


def test_a_name_whose_package_is_not_installed_says_how_to_have_it(tmp_path: Path) -> None:
    (tmp_path / "acme.pyi").write_text("from acme_models.serving import serve as serve\n")
    names, find = astuner.public_names("acme", str(tmp_path / "acme.py"))
    assert names == {"serve": "acme_models.serving"}
    with pytest.raises(ImportError, match=r"^acme\.serve needs a separate package: pip install acme-models$"):
        find("serve")
    with pytest.raises(AttributeError, match=r"^module 'acme' has no attribute 'other'$"):
        find("other")
