"""Run GRPO steps of TRL's `GRPOTrainer`, one at a time.

The trainer owns its loop, so it runs in a thread that pauses at the end of every step until it is released.
The work between two pauses is one complete step: data, generation, tools, rewards, forward, backward, optimizer.
Configured for speed: float32, no gradient checkpointing, no logging, no saving, no reference model.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.agents import digits, problems, reward, use_calculator
from benchmarks.local_side import LEARNING_RATE, StepCount
from benchmarks.models import load

SETTINGS = (
    "GRPOConfig(use_cpu=True, bf16=False, gradient_checkpointing=False, loss_type='dapo', epsilon=0.2, "
    "epsilon_high=0.28, beta=0, num_iterations=1, optim='adamw_torch_fused'), one batch per step, constant rate, "
    "logging and saving off, generation by transformers' generate with its dynamic cache"
)


class _Calculator:
    """TRL's environment; its public methods are the tools."""

    def reset(self, **row: Any) -> None:
        """Do nothing: the environment has no state."""

    def calculator(self, expression: str) -> str:
        """Evaluate an arithmetic expression.

        Args:
            expression: Numbers, + - * / and parentheses.

        Returns:
            The value.
        """
        return use_calculator(expression)


class TrlSteps:
    """Trainer of single steps; `counts` has their measurements.

    :param tools: Run the multi-turn calculator agent instead of single turns.
    :param forced: Generate exactly ``max_completion`` tokens for every answer.
    :param max_completion: Limit of tokens after the first prompt, including tool results.
    """

    def __init__(
        self,
        model_path: str,
        *,
        groups: int = 8,
        group_size: int = 8,
        max_completion: int,
        tools: bool,
        forced: bool,
        dtype: str = "float32",
    ) -> None:
        self.counts: list[StepCount] = []
        self._rollout: tuple[float, list[Any], list[Any], list[Any] | None] | None = None
        """Current step: CPU seconds of generation, prompts, tokens after them, and the mask of the model's tokens."""
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._stop = False
        self._failure: BaseException | None = None
        self._folder = tempfile.TemporaryDirectory()
        self._trainer = self._build(load(model_path, dtype), groups, group_size, max_completion, tools, forced)
        self._thread = threading.Thread(target=self._run, name="trl", daemon=True)
        self._thread.start()

    def __call__(self) -> None:
        started = time.process_time()
        self._go.release()
        self._done.acquire()
        if self._failure is not None:
            raise self._failure
        whole = time.process_time() - started
        assert self._rollout is not None  # every step generates
        seconds, prompts, added, masks = self._rollout
        self.counts.append(
            StepCount(
                episodes=len(prompts),
                prompt_tokens=sum(map(len, prompts)),
                added_tokens=sum(map(len, added)),
                model_tokens=sum(map(sum, masks)) if masks is not None else sum(map(len, added)),
                rollout_cpu=seconds,
                train_cpu=whole - seconds,
            )
        )

    def close(self) -> None:
        self._stop = True
        self._go.release()
        self._thread.join()
        self._folder.cleanup()

    def _run(self) -> None:
        import torch

        torch.set_num_threads(1)  # OpenMP keeps it per thread
        self._go.acquire()
        try:
            if not self._stop:
                self._trainer.train()
        except BaseException as failure:  # the caller that waits for the step raises it
            self._failure = failure
        self._done.release()

    def _end_of_step(self, control: Any) -> None:
        self._done.release()
        self._go.acquire()
        if self._stop:
            control.should_training_stop = True

    def _build(
        self, loaded: tuple[Any, Any], groups: int, group_size: int, max_completion: int, tools: bool, forced: bool
    ) -> Any:
        os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
        from datasets import Dataset, disable_progress_bars
        from transformers import PrinterCallback, TrainerCallback
        from trl import GRPOConfig, GRPOTrainer
        from trl.chat_template_utils import qwen3_template

        from astuner_local.tiny.transcripts import first_messages

        disable_progress_bars()
        steps = self

        class _Gate(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> Any:
                steps._end_of_step(control)
                return control

        def score(completions: Any, answer: Sequence[str], **rest: Any) -> list[float]:
            ends = [c[-1]["content"] or "" if c[-1]["role"] == "assistant" else "" for c in completions]
            return [reward(text, right) if tools else digits(text) for text, right in zip(ends, answer, strict=True)]

        model, tokenizer = loaded
        model.generation_config.eos_token_id = None if forced else tokenizer.eos_token_id
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        tokenizer.response_template = qwen3_template  # the template is our own, so TRL cannot know how to read replies
        rows = [{"prompt": first_messages(question), "answer": answer} for question, answer in problems()]
        config = GRPOConfig(
            output_dir=self._folder.name,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=groups * group_size,
            gradient_accumulation_steps=1,
            num_generations=group_size,
            max_completion_length=max_completion,
            max_tool_calling_iterations=1 if tools else None,
            generation_kwargs={"min_new_tokens": max_completion} if forced else None,
            temperature=1.0,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            adam_beta2=0.95,
            weight_decay=0.0,
            loss_type="dapo",
            epsilon=0.2,
            epsilon_high=0.28,
            beta=0.0,
            max_steps=10**6,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=score,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            environment_factory=_Calculator if tools else None,
            callbacks=[_Gate()],
        )
        trainer.remove_callback(PrinterCallback)
        # Private, but the only place where generation begins and ends, tools included.
        trainer._generate = self._watched(trainer._generate)
        return trainer

    def _watched(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        def watched(prompts: list[Any]) -> Any:
            started = time.process_time()
            found = generate(prompts)
            self._rollout = (time.process_time() - started, found[0], found[1], found[2])
            return found

        return watched


@contextlib.contextmanager
def quiet() -> Any:
    """Hide the notices that transformers and TRL print when a trainer is created and runs."""
    import transformers

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.enable_progress_bar()
        transformers.logging.set_verbosity(before)
