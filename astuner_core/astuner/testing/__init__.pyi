"""Public names of `astuner.testing` and the modules that define them, read like `astuner/__init__.pyi`."""

from astuner_testing.checks import check_advantages as check_advantages
from astuner_testing.checks import check_backbone as check_backbone
from astuner_testing.checks import check_environment as check_environment
from astuner_testing.checks import check_judge as check_judge
from astuner_testing.checks import check_loss as check_loss
from astuner_testing.checks import check_output_check as check_output_check
from astuner_testing.checks import check_task_reader as check_task_reader
from astuner_testing.checks import check_workflow as check_workflow
from astuner_testing.fakes import FakeBackbone as FakeBackbone
from astuner_testing.fakes import FakeEngine as FakeEngine
from astuner_testing.fakes import fake_config as fake_config
from astuner_testing.fakes import make_tokenizer as make_tokenizer
from astuner_testing.fakes import workflow_task as workflow_task
from astuner_testing.metrics import check_metrics as check_metrics
from astuner_testing.plugins import check_plugin as check_plugin
from astuner_testing.scripted import ScriptedModel as ScriptedModel
