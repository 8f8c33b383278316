"""One rank of verl's own actor: see `tests.fsdp.actor`.

Everything between a sample and an optimizer step is what a run uses: the composed configuration, `rows`, verl's padding
rows, its log-probabilities, its call of our estimator, its FSDP2 worker.  Left out are Ray and the TransferQueue
between them.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import actor
import numpy as np
import torch
from actor import PAD_TO, TEMPERATURE


class Actor(actor.Actor):
    native: Any
    """verl's configuration."""

    @classmethod
    def make(cls, experiment: Path, rank: int, world: int) -> Actor:
        from verl.workers.engine_workers import ActorRolloutRefWorker

        from astuner import load_config
        from astuner_verl.native import Facts, compose, platform_settings

        config = load_config(experiment)
        native = compose(Facts.of(config, total_steps=9), platform_settings()).config
        worker = ActorRolloutRefWorker(config=native.actor_rollout_ref, role="actor")
        worker.init_model()
        made = cls(worker, rank, world)
        made.native = native
        return made

    def rows(self, samples: list[Any]) -> Any:
        """This rank's part of the rows that the run would publish."""
        from verl.trainer.ppo.padding_utils import construct_minimal_padding_template
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        from astuner_verl import rows

        with mock.patch.object(rows.tq, "kv_batch_put") as put:
            meta = rows.publish(
                [rows.as_output(s) for s in samples],
                partition="train",
                step=1,
                token_weights=[s.token_weight for s in samples],
            )
        fields = put.call_args.kwargs["fields"]
        names = list(fields.keys())  # iterating over a TensorDict gives its rows
        all_rows = [{name: fields[name][i] for name in names} for i in range(len(samples))]
        empty, _ = construct_minimal_padding_template(all_rows[0], meta.tags[0], eos_token_id=2)
        del empty["attention_mask"]
        all_rows += [{**empty, "uid": f"pad{i}"} for i in range(-len(samples) % PAD_TO)]
        share = len(all_rows) // self.world
        return list_of_dict_to_tensordict(all_rows[self.rank * share : (self.rank + 1) * share])

    def of_reference(self, rows: Any, weights: Mapping[str, torch.Tensor] | None) -> torch.Tensor:
        """Log-probabilities under other weights; None: without the adapters, as verl's trainer asks its actor then."""
        self.load(weights or self.start)
        return self.logprobs(rows, **({} if weights else {"no_lora_adapter": True}))

    def logprobs(self, rows: Any, **more: Any) -> torch.Tensor:
        from verl.workers.utils.padding import response_from_nested

        told = self.told(rows, calculate_entropy=True, compute_loss=False, **more)
        return response_from_nested(self.worker.compute_log_prob(told)["log_probs"], rows["response_mask"])

    def told(self, rows: Any, **more: Any) -> Any:
        from verl.utils import tensordict_utils as tu

        data = rows.clone()
        numbers = [len(ids) for ids in rows["input_ids"].unbind()]
        for key, value in {"temperature": TEMPERATURE, "global_token_num": numbers, **more}.items():
            tu.assign_non_tensor_data(data, key, value)
        return data

    def credit(self, rows: Any, case: Mapping[str, Any]) -> dict[int, float]:
        """Advantages by way of verl's registry; what the rows' rewards are after verl took the KL off."""
        from verl.protocol import DataProto
        from verl.trainer.ppo.core_algos import FixedKLController
        from verl.trainer.ppo.ray_trainer import apply_kl_penalty
        from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
        from verl.workers.utils.padding import response_to_nested

        from astuner_verl import session
        from astuner_verl.handlers import ADVANTAGES

        seen: dict[int, float] = {}

        def credit(token_rewards: dict[int, float]) -> dict[int, float]:
            seen.update(token_rewards)
            return {row: case["samples"][row].advantage for row in token_rewards}

        names = ["response_mask", "rm_scores", "old_log_probs"] + ["ref_log_prob"] * ("ref_log_prob" in rows)
        data = DataProto(batch=rows.select(*names).to_padded_tensor())
        data.batch["token_level_scores"] = data.batch["token_level_rewards"] = data.batch["rm_scores"]
        data.non_tensor_batch["uid"] = np.array(list(rows["uid"]), dtype=object)
        settings = case["settings"]
        if settings.algorithm.use_kl_in_reward:
            data, _ = apply_kl_penalty(data, FixedKLController(settings.kl_loss_coef), settings.kl_loss_type)
        with mock.patch.object(session, "_current", SimpleNamespace(credit=credit)):
            data = compute_advantage_for_multi_trajectories(
                data, batch_keys=[], adv_estimator=ADVANTAGES, config=self.native.algorithm
            )
        rows["advantages"] = response_to_nested(data.batch["advantages"], rows["response_mask"])
        return seen

    def train(self, case: Mapping[str, Any]) -> dict[str, Any]:
        from verl.utils import tensordict_utils as tu
        from verl.utils.metric import reduce_metrics

        from astuner_ray.native.table import old_need_no_pass
        from astuner_verl.loss import make_loss

        settings, rows = case["settings"], self.rows(case["samples"])
        if settings.use_kl_loss or settings.algorithm.use_kl_in_reward:
            rows["ref_log_prob"] = self.of_reference(rows, case["reference"])
        self.reset(settings.optim.lr)
        mine = self.logprobs(rows)
        rows["old_log_probs"] = rows["rollout_log_probs"] if old_need_no_pass(settings) else mine
        rewards = self.credit(rows, case)
        self.worker.actor.set_loss_fn(pickle.loads(pickle.dumps(make_loss(settings))))
        count = len(rows) * self.world
        told = self.told(
            rows,
            calculate_entropy=True,
            global_batch_size=count,
            mini_batch_size=count,
            epochs=settings.ppo_epochs,
            seed=1,
            dataloader_kwargs={"shuffle": False},
            distillation_use_topk=False,
            distillation_only=False,
            **case["native"],
        )
        metrics = reduce_metrics(tu.get(self.worker.update_actor(told), "metrics"))
        masks = rows["response_mask"].unbind()
        trained = [values[mask.bool()].tolist() for values, mask in zip(mine.unbind(), masks, strict=True)]
        return {
            "logprobs": {uid: values for uid, values in zip(rows["uid"], trained, strict=True) if values},
            "rewards": rewards,
            "metrics": {name: float(value) for name, value in metrics.items()},
            "gradients": self.gradients,
        }


if __name__ == "__main__":
    actor.main(Actor, *sys.argv[1:])
