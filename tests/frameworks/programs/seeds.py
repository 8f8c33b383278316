"""The first documents' own code, as it is spelled there, on AgentScope 1.x: the Quick Start's agent, AppWorld's loop.

Only the comma that the Quick Start forgot is put in; what AppWorld's snippet takes for granted is written around it.
"""

from __future__ import annotations

import logging
import textwrap
from importlib import metadata
from pathlib import Path

from harness import call, play, story, tell, thinking_template

logging.getLogger("as").setLevel(logging.CRITICAL)

SEEDS = Path(__file__).parents[1] / "seeds"
QUICK_START = (SEEDS / "quick_start.py.txt").read_text(encoding="utf-8")
APPWORLD = """\
from astuner import Environment, Workflow, WorkflowOutput
from astuner.contracts.environment import StepResult

class AppWorld(Workflow):
    async def execute(self, workflow_task, model_tuner):
        from agentscope.agent import ReActAgent
        from agentscope.formatter import DashScopeChatFormatter
        from agentscope.memory import InMemoryMemory
        from agentscope.message import Msg

        astune_proxy = model_tuner
        config = model_tuner.config
        first_msg = {"role": "system", "content": "You use apps."}
        interaction_message = Msg(name="env", content=workflow_task.task.main_query, role="user")
"""
APPWORLD += textwrap.indent((SEEDS / "appworld_loop.py.txt").read_text(encoding="utf-8"), " " * 8)
APPWORLD += """
        return WorkflowOutput(reward=1.0, metadata={"seen": World.seen})

class World(Environment):
    seen = []

    @classmethod
    def tasks(cls, split, params):
        yield from ()

    def reset(self, task):
        World.seen.clear()
        return StepResult(observation="ready")

    def step(self, action):
        World.seen.append(action)
        return StepResult(observation=f"observation {len(World.seen)}", terminated=len(World.seen) == 3)

    def evaluate(self):
        return 1.0
"""


def python(code: str) -> str:
    return call(f'{{"code":"{code}"}}', "execute_python_code")


def quick_start(*replies: str, rounds: int = 2):
    code = QUICK_START.replace("max_iters=2", f"max_iters={rounds}")
    files = {f"workflow{rounds}.py": code}
    return story(play(f"workflow{rounds}.py->MathAgentWorkflow", replies, files=files, main_query="48 / 2 + 48?"))


def appworld(*replies: str, **options):
    settings = "  rollout:\n    multi_turn:\n      max_steps: 5"
    files = {"appworld.py": APPWORLD}
    return story(
        play("appworld.py->AppWorld", replies, files=files, settings=settings, env_type="appworld.py->World", **options)
    )


tell(
    {
        "version": metadata.version("agentscope"),
        "quick_start": quick_start("Let me compute.\n" + python("print(48//2+48)"), "It is \\boxed{72}."),
        "quick_start_long": quick_start(
            *(python(f"print({i} * 2) # \\u4f60 你") for i in range(5)), "It is \\boxed{72}.", rounds=10
        ),
        "quick_start_out_of_rounds": quick_start(python("print(1)"), python("print(2)"), "It is \\boxed{72}."),
        "appworld": appworld("  open mail \n", "read it", "done"),
        "appworld_thinking": appworld(
            *(f"<think>\nhm\n</think>\n\n{said}" for said in ("open mail", "read it", "done")),
            chat_template=thinking_template(),
        ),
    }
)
