"""Who honours which key of ``astuner.*`` on Trinity: the table, this package, or nobody.

Every key of the schema is in one of these sets or among those that the core honours whatever the backbone
(`astuner.config.capabilities.CORE`); a test fails otherwise.
"""

from __future__ import annotations

from astuner.contracts.backbone import Capabilities
from astuner_trinity.table import ROWS

CONVERTED = frozenset(key for row in ROWS for key in row.ours)
"""Keys that reach Trinity's configuration."""

OWN = frozenset(
    {
        "trainer_common.algorithm.adv_estimator",  # the core's credit, which `credit` asks the driver for
        "trainer_common.algorithm.dynamic_sampling",  # `workflow`: another draw in place of a useless group
        "trainer_common.algorithm.filter_zero_advantage",  # the core's credit as well
        "trainer_common.algorithm.max_draws",  # `workflow`
        "trainer_common.algorithm.norm_adv_by_std",  # the core's credit as well
        "trainer_common.max_checkpoints",  # `checkpoints`
        "trainer_common.mini_batch_num",  # `stages`: the size of VERL's mini-batches, when the samples are known
        "trainer_common.test_freq",  # `stages`, as the driver says
        "trainer_common.val_before_train",  # likewise
    }
)
"""Keys that this package honours itself."""

_UNCUT = "the trainer's log-probabilities are of the uncut distribution; lower rollout.temperature"

CAPABILITIES = Capabilities(
    in_process=False,
    honours=CONVERTED | OWN,
    only={
        "model.device": ("auto", "cuda"),
        "model.lora.rank": (0,),
        "model.revision": (None,),
        "rollout.multi_turn.expected_steps": (1,),
        "rollout.name": (None, "vllm"),
        "rollout.top_k": (-1,),
        "rollout.top_p": (1,),
        "trainer_common.algorithm.use_kl_in_reward": (False,),
    },
    instead={
        "model.device": "trinity runs on GPUs; for its tests on a CPU: TRINITY_PLATFORM=cpu and the package "
        "astuner-trinity-cpu",
        "model.lora": "without trained adapters they mean nothing",
        "model.lora.rank": "the engines' servers of Trinity 0.6.0 speak with the base model's weights whatever "
        "adapters are trained",
        "model.revision": "download that revision, and write its folder as astuner.model.path",
        "rollout.multi_turn.expected_steps": "training takes all samples of a step, however many they are",
        "rollout.name": "ASTuner speaks to vLLM's server in token ids, which Trinity's other engines do not serve",
        "rollout.top_k": _UNCUT,
        "rollout.top_p": _UNCUT,
        "trainer_common.algorithm.use_kl_in_reward": "Trinity computes the reference after the advantages; write "
        "trainer_common.use_kl_loss",
        "trainer_common.resume_freq": "on trinity a run continues from its checkpoints: write trainer_common.save_freq",
    },
)
