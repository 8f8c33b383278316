"""The public names of `astuner_sandbox`, and where each is."""

from astuner_sandbox.python import CodeResult as CodeResult
from astuner_sandbox.python import PythonSandbox as PythonSandbox
from astuner_sandbox.python import SandboxFailed as SandboxFailed
from astuner_sandbox.python import SandboxLimits as SandboxLimits
from astuner_sandbox.python import shared as shared
from astuner_sandbox.tool import python_tool as python_tool
