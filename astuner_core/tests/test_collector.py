"""What is loaded is out of the collector's sight, and what is made later is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import gc, weakref
from astuner.support.collector import collect_rarely, leave_out_what_is_loaded

class Thing: pass

def circle():
    one, other = Thing(), Thing()
    one.other, other.one = other, one
    return weakref.ref(one)

usual = gc.get_threshold()
collect_rarely()
rarely = gc.get_threshold()
assert rarely > usual
loaded = [Thing() for _ in range(1000)]
leave_out_what_is_loaded()
assert gc.get_threshold() == rarely
assert gc.get_freeze_count() > 1000
assert not any(isinstance(o, Thing) for o in gc.get_objects())
later = circle()
leave_out_what_is_loaded()  # an episode's start, as the first one's was
assert later() is not None
gc.collect()
assert later() is None
freed = weakref.ref(loaded[0])
loaded.clear()
assert freed() is None

gc.set_threshold(1234, 5, 6)  # by whoever wrote the agent
leave_out_what_is_loaded()
collect_rarely()
assert gc.get_threshold() == (1234, 5, 6)
"""


def test_what_is_loaded_is_left_out_and_what_is_made_later_is_not() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


AGENT = """
import gc
from astuner.contracts.types import WorkflowOutput

class Agent:
    async def execute(self, workflow_task, tuner):
        assert gc.get_freeze_count() > 10_000
        assert gc.get_threshold()[0] > 10_000
        return WorkflowOutput(reward=1.0)
"""
RUN = """
import gc
from contextlib import contextmanager
from astuner.runs import preflight
from astuner.contracts.backbone import Served
from astuner_debug.backbone import DebugBackbone
from astuner.cli import main
from astuner.testing import FakeEngine, make_tokenizer

class Backbone(DebugBackbone):
    def check(self):
        pass

    @contextmanager
    def serve(self, model_path=None):
        assert gc.get_threshold()[0] > 10_000, "loading is what it is for"
        tokenizer = make_tokenizer()
        yield Served(engine=FakeEngine(lambda prompt: "4", tokenizer), tokenizer=tokenizer, name="fake")

preflight.make_backbone = lambda config: Backbone(config)
main(["run", "exp.yaml", "--run-dir", "run"])
"""
EXPERIMENT = """
astuner:
  backbone: debug
  model: {path: .}
  rollout: {workflow: "agent.py->Agent"}
  task_reader: {type: jsonl, jsonl: {training: {file_path: tasks.jsonl}}}
"""


def test_a_run_leaves_out_what_it_has_loaded(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "run.py").write_text(RUN)
    (tmp_path / "exp.yaml").write_text(EXPERIMENT)
    (tmp_path / "tasks.jsonl").write_text('{"main_query": "2 + 2?"}\n')
    run = subprocess.run([sys.executable, "run.py"], cwd=tmp_path, capture_output=True, text=True)
    assert "rewards [1.0" in run.stdout + run.stderr
