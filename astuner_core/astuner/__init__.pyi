"""The public names of `astuner`, and where each is.

Type checkers read this file, and so does `astuner` itself, which imports a name when it is first touched.
"""

from collections.abc import Callable, Iterator
from typing import Any

from astuner.chat.codec import ChatCodec as ChatCodec
from astuner.chat.codec import Conversation as Conversation
from astuner.chat.codec import EncodedPrompt as EncodedPrompt
from astuner.chat.history import Said as Said
from astuner.chat.reply import STRUCTURED_TOOL as STRUCTURED_TOOL
from astuner.chat.reply import comes_to_stop as comes_to_stop
from astuner.chat.template import ChatTemplate as ChatTemplate
from astuner.config import Config as Config
from astuner.config import load_config as load_config
from astuner.config.capabilities import honoured_by as honoured_by
from astuner.config.checking import check_section as check_section
from astuner.config.checking import describe_field as describe_field
from astuner.config.checking import field_at as field_at
from astuner.config.checking import key_spellings as key_spellings
from astuner.config.checking import section_of as section_of
from astuner.config.checking import walk_fields as walk_fields
from astuner.config.loading import read_config as read_config
from astuner.config.schema import TOKEN_VARIABLE as TOKEN_VARIABLE
from astuner.config.schema import AgentSection as AgentSection
from astuner.config.schema import AlgorithmSection as AlgorithmSection
from astuner.config.schema import AstunerSection as AstunerSection
from astuner.config.schema import DebugSection as DebugSection
from astuner.config.schema import EndpointSection as EndpointSection
from astuner.config.schema import LoraSection as LoraSection
from astuner.config.schema import ModelSection as ModelSection
from astuner.config.schema import Optim as Optim
from astuner.config.schema import TrainerCommon as TrainerCommon
from astuner.config.sections import key_models as key_models
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
from astuner.plugins.loader import DISABLE_PLUGINS as DISABLE_PLUGINS
from astuner.plugins.loader import Plugin as Plugin
from astuner.plugins.loader import PluginManager as PluginManager
from astuner.plugins.loader import PluginStatus as PluginStatus
from astuner.plugins.loader import load_plugins as load_plugins
from astuner.plugins.registry import CONTRACTS as CONTRACTS
from astuner.plugins.registry import Offer as Offer
from astuner.plugins.registry import find_offer as find_offer
from astuner.plugins.registry import find_optional_part as find_optional_part
from astuner.plugins.registry import find_part as find_part
from astuner.plugins.registry import find_provider as find_provider
from astuner.plugins.registry import import_target as import_target
from astuner.plugins.registry import is_code as is_code
from astuner.plugins.registry import missing_modules as missing_modules
from astuner.plugins.user_code import find_user_file as find_user_file
from astuner.plugins.user_code import import_user_code as import_user_code
from astuner.plugins.user_code import raised_at as raised_at
from astuner.rollout.credit import estimate_advantages as estimate_advantages
from astuner.rollout.credit import find_loss as find_loss
from astuner.rollout.credit import token_loss as token_loss
from astuner.rollout.endings import unfinished as unfinished
from astuner.rollout.judging import Judging as Judging
from astuner.rollout.judging import NoVerdict as NoVerdict
from astuner.rollout.judging import ask_group_judge as ask_group_judge
from astuner.rollout.judging import ask_judge as ask_judge
from astuner.rollout.metrics import describe_failure as describe_failure
from astuner.rollout.metrics import evaluate_groups as evaluate_groups
from astuner.rollout.model_tuner import ModelTuner as ModelTuner
from astuner.rollout.models import AgentRegistry as AgentRegistry
from astuner.rollout.models import EpisodesHere as EpisodesHere
from astuner.rollout.models import Models as Models
from astuner.rollout.models import PolicyModel as PolicyModel
from astuner.rollout.models import one_model as one_model
from astuner.rollout.models import sampling_for as sampling_for
from astuner.rollout.parts import build_judge as build_judge
from astuner.rollout.parts import make_judge as make_judge
from astuner.rollout.pool import Draw as Draw
from astuner.rollout.pool import Ending as Ending
from astuner.rollout.pool import Group as Group
from astuner.rollout.pool import RolloutPool as RolloutPool
from astuner.rollout.pool import StepRollout as StepRollout
from astuner.rollout.runner import EpisodeRunner as EpisodeRunner
from astuner.rollout.speaker import ChatRequest as ChatRequest
from astuner.rollout.speaker import EpisodeState as EpisodeState
from astuner.rollout.speaker import ExternalSpeaker as ExternalSpeaker
from astuner.rollout.speaker import PolicySpeaker as PolicySpeaker
from astuner.rollout.threads import Clock as Clock
from astuner.rollout.threads import OutOfTime as OutOfTime
from astuner.rollout.threads import TimeLimits as TimeLimits
from astuner.rollout.threads import end_loop as end_loop
from astuner.rollout.turns import EpisodeRecorder as EpisodeRecorder
from astuner.rollout.turns import build_samples as build_samples
from astuner.rollout.turns import upwards as upwards
from astuner.runs.breakpoints import bp as bp
from astuner.runs.launch import run as run
from astuner.runs.preflight import Preflight as Preflight
from astuner.runs.preflight import find_backbone as find_backbone
from astuner.runs.run_dir import RunDir as RunDir
from astuner.runs.run_dir import debug_folder as debug_folder
from astuner.runs.services import log_file as log_file
from astuner.runs.services import run_service as run_service
from astuner.runs.services import run_services as run_services
from astuner.runs.tasks import planned_steps as planned_steps
from astuner.runs.tasks import read_tasks as read_tasks
from astuner.support.json_lines import append_jsonl as append_jsonl
from astuner.support.json_lines import read_jsonl as read_jsonl
from astuner.support.json_lines import write_jsonl as write_jsonl
from astuner.support.locks import LockTaken as LockTaken
from astuner.support.locks import check_unlocked as check_unlocked
from astuner.support.locks import lock_file as lock_file
from astuner.support.processes import RecordedProcess as RecordedProcess
from astuner.support.processes import astuner_home as astuner_home
from astuner.support.processes import forget_process as forget_process
from astuner.support.processes import is_same_process as is_same_process
from astuner.support.processes import process_start_time as process_start_time
from astuner.support.processes import record_process as record_process
from astuner.support.processes import recorded_process as recorded_process
from astuner.support.processes import recorded_processes as recorded_processes
from astuner.support.threads import in_daemon_thread as in_daemon_thread
from astuner_models.hub import hub_downloads as hub_downloads
from astuner_models.hub import hub_problem as hub_problem
from astuner_models.hub import is_folder_name as is_folder_name
from astuner_models.hub import require_model as require_model
from astuner_models.serving import Serving as Serving
from astuner_models.serving import evaluate as evaluate
from astuner_models.serving import find_checkpoint as find_checkpoint
from astuner_models.serving import load_tokenizer as load_tokenizer
from astuner_models.serving import make_codec as make_codec
from astuner_models.serving import policy_folder as policy_folder
from astuner_models.serving import serve as serve
from astuner_models.serving import serve_policies as serve_policies

__version__: str
API_VERSION: str

def from_its_home(whose: str, name: str, module: str) -> object: ...
def names_of(file: str) -> dict[str, str]: ...
def older_modules() -> Iterator[Any]: ...
def older_names(module: str) -> Callable[[str], object]: ...
