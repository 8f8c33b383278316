"""Who honours which key of ``astuner.*`` on VERL: the table, this package, or nobody.

Every key of the schema is in one of these sets or among those that the core honours whatever the backbone
(`astuner.config.capabilities.CORE`); a test fails otherwise.
"""

from __future__ import annotations

from astuner.contracts.backbone import Capabilities
from astuner_verl.table import ROWS

CONVERTED = frozenset(key for row in ROWS for key in row.ours)
"""Keys that reach VERL's configuration."""

OWN = frozenset(
    {
        "trainer_common.algorithm.adv_estimator",  # the core's credit, which `advantage` gives to verl
        "trainer_common.algorithm.dynamic_sampling",  # `Run.rollout`, which `sampler` calls
        "trainer_common.algorithm.filter_zero_advantage",  # `session`
        "trainer_common.algorithm.loss",  # `loss`
        "trainer_common.algorithm.loss_agg_mode",  # the core's token weights, which `loss` uses
        "trainer_common.algorithm.max_draws",
        "trainer_common.algorithm.norm_adv_by_std",
        "trainer_common.algorithm.rollout_is_threshold",  # `loss`
        "trainer_common.max_checkpoints",  # `checkpoints`
        "trainer_common.mini_batch_num",  # `session`: the size of verl's mini-batches, when the rows are known
    }
)
"""Keys that this package honours itself."""

CAPABILITIES = Capabilities(
    in_process=False,
    honours=CONVERTED | OWN,
    only={
        "model.device": ("auto", "cuda"),
        "model.lora.dropout": (0,),
        "model.revision": (None,),
        "rollout.multi_turn.expected_steps": (1,),
        "rollout.name": (None, "vllm", "sglang"),
        "rollout.top_k": (-1,),
        "rollout.top_p": (1,),
    },
    instead={
        "model.device": "verl runs on GPUs; for its tests on a CPU: VERL_PLATFORM=cpu and the package astuner-verl-cpu",
        "model.lora.dropout": "rollout and trainer would disagree",
        "model.revision": "download that revision, and write its folder as astuner.model.path",
        "rollout.multi_turn.expected_steps": "verl takes any number of samples from an episode",
        "rollout.name": "another engine that verl knows: write verl.actor_rollout_ref.rollout.name",
        "rollout.top_k": "the trainer's log-probabilities are of the uncut distribution; lower rollout.temperature",
        "rollout.top_p": "the trainer's log-probabilities are of the uncut distribution; lower rollout.temperature",
        "trainer_common.resume_freq": "on verl a run continues from its checkpoints: write trainer_common.save_freq",
    },
)
