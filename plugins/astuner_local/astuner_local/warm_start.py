"""Warm start: the first steps of a run learn from conversations in a file instead of episodes.

A step minimizes the mean cross-entropy of the assistant's tokens in some conversations.  It is `PolicyTrainer`'s own
step: with advantage 1 and a weight of one over the number of trained tokens, REINFORCE's -A log π equals it.
Conversations are encoded turn by turn as an episode grows; exact tokens are used unchanged.

Invariant: the result is saved once, after the last warm-start step, with a fresh optimizer.  A run that is killed
earlier starts over; a later resume works as from any other step.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astuner import AgentRegistry, ChatCodec, Config, Generation, Sample
from astuner.contracts.errors import AstunerError, ConfigError, DataError
from astuner.contracts.events import StepEnded
from astuner.contracts.messages import normalise
from astuner.contracts.types import FinishReason
from astuner_local.loop import TrainingLoop, trainers
from astuner_local.policy import LocalPolicy, Weights, new_trainer, running
from astuner_local.settings import LocalSettings, WarmStart
from astuner_local.trainer.checkpoint import checkpoint_path

if TYPE_CHECKING:
    from astuner.contracts.run import Run


def warm_start_of(config: Config) -> WarmStart | None:
    """Return the experiment's warm start, if any, after checking it against other settings.

    :raises ConfigError: It conflicts with other settings.
    """
    warm = LocalSettings.of(config).warm_start
    if warm is None:
        return None
    common, trained = config.astuner.trainer_common, AgentRegistry.of(config.astuner).trained_policies
    if common.use_kl_loss or common.algorithm.use_kl_in_reward:
        raise ConfigError(
            "local.warm_start moves away from the reference model of use_kl_loss and use_kl_in_reward. Set both to "
            "false, or start a second run from the checkpoint of the warm start (astuner.model.path)"
        )
    if len(trained) != 1:
        raise ConfigError(f"local.warm_start supports one trained policy, but this run trains {', '.join(trained)}")
    if common.total_steps is not None and warm.steps >= common.total_steps:
        raise ConfigError(
            f"local.warm_start.steps is {warm.steps}, but trainer_common.total_steps is {common.total_steps}, which "
            "includes the warm-start steps; lower the former or raise the latter"
        )
    file = config.base_dir / Path(warm.file).expanduser()
    if not file.is_file():
        raise DataError(f"local.warm_start.file: {file} does not exist (relative paths start at the experiment file)")
    return warm


def warm_up(run: Run, warm: WarmStart) -> Path:
    """Train on the file, validate before and after, and return the folder of the saved state.

    :raises DataError: The file contains invalid conversations.
    """
    with running(_supervised(run.config, warm), done=0, total_steps=warm.steps) as policies:
        loop = _WarmStart(run, policies, warm)
        loop.run(0)
        return loop.finish()


def read_conversations(file: Path, codec: ChatCodec, *, longest: int, vocabulary: int) -> list[Sample]:
    """Return the conversations of a JSON Lines file as samples that train the assistant's tokens.

    A line has ``messages`` and optionally ``tools`` in OpenAI's format; or ``input_ids`` and ``loss_mask``, as written
    by ``astuner export RUN --to tokens``.

    :param longest: Most tokens of a conversation.
    :param vocabulary: Vocabulary size of the model.
    :raises DataError: A line is invalid, or cannot be encoded for the model.
    """
    samples = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            ids, mask = _exact(row) if "input_ids" in row else _encoded(codec, row["messages"], row.get("tools"))
            if not any(mask):
                raise ValueError("it has no assistant tokens to learn from")
            if len(ids) > longest or not 0 <= min(ids) <= max(ids) < vocabulary:
                raise ValueError(
                    f"it has {len(ids)} tokens up to {max(ids)}; allowed are {longest} tokens below {vocabulary}"
                )
            name = f"{file.name}:{number}"
            samples.append(
                Sample(
                    episode_id=name, group_id=name, agent="", input_ids=ids, loss_mask=mask, logprobs=[0.0] * len(ids),
                    policy_version=0, reward=1.0, advantage=1.0,
                )
            )  # fmt: skip
        except (ValueError, KeyError, TypeError, AttributeError, AstunerError) as e:
            raise DataError(
                f"{file}:{number}: {type(e).__name__}: {e}. A line must be a JSON object with `messages` (and `tools`) "
                "or with `input_ids` and `loss_mask`; fix or remove it"
            ) from e
    if not samples:
        raise DataError(f"{file} is empty")
    return samples


def _exact(row: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    ids, mask = list(map(int, row["input_ids"])), list(map(int, row["loss_mask"]))
    if len(ids) != len(mask) or not {*mask} <= {0, 1}:
        raise ValueError(f"{len(ids)} input_ids need a loss_mask of the same length with 0 or 1, got {len(mask)}")
    return ids, mask


def _encoded(
    codec: ChatCodec, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> tuple[list[int], list[int]]:
    """Return the token IDs of a conversation and a mask of the assistant's tokens.

    Every prompt must continue the reply before it.  Assistant messages with a ``weight`` of 0, as in OpenAI's
    fine-tuning format, are part of the prompt.
    """
    conversation, said = codec.conversation(), list[Mapping[str, Any]]()
    spoken: list[range] = []
    ids: list[int] = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant" or message.get("weight") == 0:
            said.append(_answering(said, normalise(message)))
            continue
        encoded = conversation.encode(said, tools)
        if spoken and encoded.continues is None:
            raise ValueError(f"message {turn + 1} does not continue the reply before it: {encoded.branch_reason}")
        reply = _reply(codec, said, normalise(message), tools or ())
        spoken.append(range(len(encoded.prompt_ids), len(encoded.prompt_ids) + len(reply)))
        ids = [*encoded.prompt_ids, *reply]
        generation = Generation(
            prompt_ids=encoded.prompt_ids, response_ids=reply, logprobs=[0.0] * len(reply),
            finish_reason=FinishReason.STOP, policy_version=0,
        )  # fmt: skip
        said.append(conversation.accept(encoded, generation, turn))
    mask = [0] * len(ids)
    for place in spoken:
        mask[place.start : place.stop] = [1] * len(place)
    return ids, mask


def _answering(said: Sequence[Mapping[str, Any]], message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool result with the ID of the first call that has no result yet."""
    if message["role"] != "tool":
        return message
    answered = {m.get("tool_call_id") for m in said if m["role"] == "tool"}
    calls = [c["id"] for m in said for c in m.get("tool_calls", ()) if c["id"] not in answered]
    if not calls:
        raise ValueError("a tool result has no preceding call in the chat template's format")
    return {**message, "tool_call_id": calls[0]}


def _reply(
    codec: ChatCodec, said: Sequence[Mapping[str, Any]], message: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
) -> list[int]:
    """Return the tokens that the model would have generated for ``message``, including the end token."""
    before = codec.template.render(said, tools)
    whole = codec.template.render([*said, message], tools, generation_prompt=False)
    if not whole.startswith(before):
        raise ValueError("the chat template does not render this reply after its own generation prompt")
    ids = codec.template.encode(whole[len(before) :])
    end = next((place for place, token in enumerate(ids) if token in codec.stop_token_ids), None)
    if end is None:
        raise ValueError("the chat template does not end this reply with one of the model's stop tokens")
    return ids[: end + 1]


class _WarmStart(TrainingLoop):
    """Training loop of the warm-start steps."""

    def __init__(self, run: Run, policies: Mapping[str, LocalPolicy], warm: WarmStart) -> None:
        super().__init__(run, policies)
        self._warm = warm
        self._name, self._trainer = next(iter(trainers(policies).items()))
        policy = policies[self._name]
        file = run.config.base_dir / Path(warm.file).expanduser()
        size = policy.loaded.model.get_input_embeddings().num_embeddings
        self._samples = read_conversations(
            file, self.models[self._name].codec, longest=policy.engine.max_model_len, vocabulary=size
        )
        self._drawn = _draws(len(self._samples), warm.conversations, run.config.astuner.seed)

    def run(self, done: int) -> None:
        if self.common.val_before_train:
            self.training.validate(self.models, done)
        for step in range(done + 1, self._warm.steps + 1):
            self.training.check_stop()
            self._progress(step, "warm start", step - 1, self._warm.steps)
            self._step(step)
        if not self.training.is_due("test", self._warm.steps):  # otherwise the main loop validates
            self.training.validate(self.models, self._warm.steps)

    def _step(self, step: int) -> None:
        started, engine = time.perf_counter(), self.policies[self._name].engine
        batch = [self._samples[i] for i in next(self._drawn)]
        tokens = sum(s.trained_tokens for s in batch)
        with engine.paused():
            update = self._trainer.update([replace(s, token_weight=1 / tokens) for s in batch])
            engine.weights_updated(step)
        numbers = {f"warm_start/{name}": update[name] for name in ("loss", "grad_norm", "lr") if name in update}
        seconds = {"time/step": time.perf_counter() - started}
        self.training.publish(StepEnded(step=step, metrics={**numbers, "warm_start/tokens": float(tokens), **seconds}))

    def finish(self) -> Path:
        """Save the result as a step of the run, with a fresh optimizer."""
        config, policy = self.training.config, self.policies[self._name]
        rest = self.training.total_steps - self._warm.steps
        fresh = new_trainer(config, Weights(config), self._name, policy.loaded, rest)
        self.policies = {**self.policies, self._name: replace(policy, trainer=fresh)}
        self.state = self.training.state()
        self._save(self.training.run_dir.resume, self._warm.steps, keep=1)
        return checkpoint_path(self.training.run_dir.resume, self._warm.steps)


def _draws(count: int, batch: int, seed: int) -> Iterator[list[int]]:
    """Yield the conversations of each step: all of them in turn, in a new order in every pass."""
    rng, waiting = random.Random(f"{seed}/warm start"), list[int]()
    while True:
        while len(waiting) < batch:
            waiting += rng.sample(range(count), count)
        yield waiting[:batch]
        del waiting[:batch]


def _supervised(config: Config, warm: WarmStart) -> Config:
    """Return the experiment with a trainer that minimizes cross-entropy at the warm start's learning rate."""
    common = config.astuner.trainer_common
    optim = common.optim.model_copy(update={"lr": warm.lr, "lr_warmup_steps": 0, "lr_scheduler": "constant"})
    algorithm = common.algorithm.model_copy(update={"loss": "rloo", "rollout_is": "none"})
    plain = {"optim": optim, "algorithm": algorithm, "entropy_coeff": 0.0, "mini_batch_num": 1, "ppo_epochs": 1}
    supervised = common.model_copy(update=plain)
    return replace(config, astuner=config.astuner.model_copy(update={"trainer_common": supervised}))
