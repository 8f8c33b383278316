"""What Trinity is told whatever the experiment says: the names of ASTuner's classes, and what never changes.

Trinity finds classes by dotted paths; those below are all that it runs of ASTuner's.
"""

from __future__ import annotations

from typing import Any

from astuner_ray.native.table import UNSET, Row, fixed
from astuner_trinity.facts import STALENESS, STYLES, Facts

TASKS = "buffer.explorer_input"
EXPERIENCES = "buffer.trainer_input.experience_buffer"
PIPELINE = "data_processor.experience_pipeline"
VERL = "trainer.trainer_config"
ACTOR = f"{VERL}.actor"

READER = "astuner_trinity.taskset.DrawReader"
WORKFLOW = "astuner_trinity.workflow.GroupWorkflow"
CREDIT = "astuner_trinity.credit.CreditOperator"
BATCHES = "astuner_trinity.batches.WholeBatches"
MONITOR = "astuner_trinity.monitor.NoMonitor"
ALGORITHM = "astuner_trinity.algorithm.EpisodeAlgorithm"
WITH_REFERENCE = "astuner_trinity.algorithm.EpisodeAlgorithmWithReference"
LOSS = "astuner_trinity.algorithm.TokenLoss"
ENTROPY = "astuner_trinity.algorithm.Entropy"

FOLDER = "resume"
"""Trinity's ``project``, and its ``name``: its files are in the run folder's ``resume/trinity/``."""
NAME = "trinity"
TASKSET = "train"
"""Name of the one task set."""
NO_FILE = "not-written"
"""A path that is no database and no JSON file: Trinity then keeps no second copy of what is in the queue."""
NEVER = 10**9

_DRAWS = "tasks are drawn by ASTuner"
_EPISODES = "episodes are ASTuner's"
_RETRIES = "ASTuner starts an episode over itself, and counts it"
_CREDIT = "advantages are over episodes, as on every backbone"
_VALIDATION = "ASTuner says when to validate"
_OLD = "ASTuner removes old ones; write astuner.trainer_common.max_checkpoints"
_SINKS = "ASTuner's log sinks write the trackers; write astuner.trainer_common.logger"
_VERL = "the loss, the optimizer and the checkpoints are for VERL's trainer with FSDP 2"


def _tasks(facts: Facts) -> Any:
    return [{"name": TASKSET, "storage_type": READER, "path": TASKSET, "default_workflow_type": WORKFLOW}]


ALWAYS: tuple[Row[Facts], ...] = (
    Row(native=f"{TASKS}.tasksets", value=_tasks, says=f"one, read by {READER}", why=_DRAWS, locked=True),
    fixed(f"{TASKS}.eval_tasksets", [], "ASTuner draws validation tasks, and says when"),
    fixed(f"{TASKS}.default_workflow_type", WORKFLOW, _EPISODES),
    fixed("explorer.max_retry_times", 0, _RETRIES),
    fixed("explorer.eval_interval", NEVER, _VALIDATION),
    fixed("explorer.eval_on_startup", False, _VALIDATION),
    fixed("explorer.listen_address", "127.0.0.1", "Trinity's own is every address of the machine", locked=False),
    fixed(f"{EXPERIENCES}.name", "experiences", "the queue between rollouts and training"),
    fixed(f"{EXPERIENCES}.storage_type", "queue", "one batch of rollouts is one step of training"),
    fixed(f"{EXPERIENCES}.path", NO_FILE, "no file: conversations are in the run folder's episodes/"),
    Row(
        native=f"{EXPERIENCES}.capacity",
        value=lambda f: f.sync_offset + f.sync_interval if f.max_staleness is None else f.max_staleness + 1,
        says="sync_offset + sync_interval; with fully_async: max_staleness + 1",
        why="batches that may wait for training; rollouts stand still when there are as many",
    ),
    fixed(f"{PIPELINE}.save_input", False, "conversations are in the run folder's episodes/", locked=False),
    fixed("algorithm.advantage_fn", CREDIT, _CREDIT),
    fixed("algorithm.sample_strategy", BATCHES, "one batch of rollouts is one step of training"),
    Row(
        native=STALENESS,
        value=lambda f: UNSET if f.max_staleness is None else f.max_staleness,
        says="with fully_async: explorer.max_inflight_batches",
        why="rollouts wait rather than be more versions behind what they train",
    ),
    fixed("algorithm.kl_loss_fn", "none", "KL to the reference is in the loss"),
    fixed("algorithm.kl_penalty_fn", "none", "KL to the reference is in the loss"),
    fixed("trainer.trainer_type", "verl", _VERL),
    fixed("trainer.trainer_strategy", "fsdp2", _VERL),
    fixed("trainer.save_hf_checkpoint", "always", "every checkpoint can be loaded by transformers"),
    fixed("trainer.max_checkpoints_to_keep", 0, _OLD),
    fixed("trainer.use_dynamic_bsz", True, "the number of samples differs from step to step"),
    fixed("monitor.monitor_type", MONITOR, _SINKS),
    Row(
        native="synchronizer.sync_method",
        value=lambda f: "memory" if f.mode == "colocate" else "nccl",
        says="nccl; memory with mode colocate",
        why="as Trinity has it",
    ),
    Row(
        native="synchronizer.sync_style",
        value=lambda f: STYLES[0],
        says=STYLES[0],
        why="rollouts and training take turns; with sync_offset: 1 rollouts are one step ahead; or fully_async",
    ),
)
"""The rows that no key of ``astuner.*`` decides."""
