"""Compare the logits of an export with the trainer's logits on the same tokens.

transformers computes both in float32 from the stored weights. A difference therefore comes from the weights: rounding
in conversions and adapter merges, or a defect. The trainer's model is the checkpoint; if it stores adapters separately,
it is the base model with unmerged adapters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astuner.contracts.errors import CheckpointError, DataError, MissingDependency
from astuner.contracts.statistics import percent
from astuner_export.weights import stored_dtype
from astuner_models.pretrained import load_pretrained
from astuner_record.episode_log.reader import EpisodeLog

if TYPE_CHECKING:
    from torch import Tensor

SAME = 1e-4
"""Bound without rounded weights."""
BOUNDS = {"float32": SAME, "float16": 2**-7, "bfloat16": 2**-4}
"""Data type of rounded weights -> maximum difference of a logit relative to the largest logit of the position:
16 times the precision of the data type (2^-11 and 2^-8)."""
MOST_KL = 0.01
"""Mean KL divergence per token, in nats, allowed for rounded weights; 1e-4 without rounding."""
PROMPTS = 4
TOKENS = 128
"""Tokens of each prompt, from its beginning."""
QUESTIONS = ("What is 12 + 30?", "Name three colours.", "Why is the sky blue? Answer in one sentence.", "Hello!")
"""Prompts for runs without episodes."""
UNCHECKED = "or skip the check with --no-check"


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Difference between an export and the trainer's model."""

    prompts: int
    tokens: int
    source: str
    """Source of the prompts."""
    difference: float
    """Maximum of |difference of a logit| / largest |logit| of the position."""
    bound: float
    kl: float
    """KL(trainer || exported) in nats, mean over tokens."""
    kl_bound: float
    agreement: float
    """Share of positions with the same most likely token."""

    @property
    def holds(self) -> bool:
        return self.difference <= self.bound and self.kl <= self.kl_bound  # False for NaN

    def __str__(self) -> str:
        return (
            f"logits differ by {self.difference:.2g} of the largest (bound {self.bound:.2g}), KL {self.kl:.2g} "
            f"(bound {self.kl_bound:.2g}), same most likely token at {percent(self.agreement, 2)} of {self.tokens:,} "
            f"positions of {self.prompts} prompts ({self.source})"
        )


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Token IDs of the prompts for a comparison."""

    ids: Sequence[Sequence[int]]
    source: str


class Reference:
    """Logits of the trainer's model, computed once."""

    def __init__(self, folder: Path, base: Callable[[], tuple[str, str | None]], prompts: Prompts) -> None:
        """Load the model, and compute its logits.

        :param folder: Folder of the policy's model in the checkpoint.
        :param base: Returns the base model of adapters: a folder, or a model name and its revision.
        :raises MissingDependency: torch, transformers or peft is not installed.
        :raises CheckpointError: transformers cannot load the model.
        """
        self.prompts = prompts
        self.merged = (folder / "adapter" / "adapter_config.json").is_file()
        with _loading(folder):
            self._logits = logits(_with_adapters(folder, *base()) if self.merged else load(folder), prompts.ids)

    def compare(self, model: Callable[[], Any], what: Path, *, rounded: str) -> Parity:
        """Compare an exported model with the trainer's model.

        :param model: Loads the exported model in float32.
        :param rounded: Data type of rounded weights; empty without rounding.
        :raises CheckpointError: The exported model cannot be loaded.
        """
        import torch

        with _loading(what):
            theirs = logits(model(), self.prompts.ids)
        difference, kl, same, tokens = 0.0, 0.0, 0, 0
        for mine, other in zip(self._logits, theirs, strict=True):
            scale = mine.abs().amax(-1).clamp_min(1e-12)
            worst = ((mine - other).abs().amax(-1) / scale).max()
            difference = float(torch.maximum(worst, torch.tensor(difference)))  # propagates NaN
            p, q = mine.log_softmax(-1), other.log_softmax(-1)
            kl += float((p.exp() * (p - q)).sum())
            same += int((mine.argmax(-1) == other.argmax(-1)).sum())
            tokens += len(mine)
        return Parity(
            prompts=len(self._logits),
            tokens=tokens,
            source=self.prompts.source,
            difference=difference,
            bound=BOUNDS[rounded] if rounded else SAME,
            kl=max(kl / tokens, 0.0) if kl == kl else kl,
            kl_bound=MOST_KL if rounded not in ("", "float32") else SAME,
            agreement=same / tokens,
        )


def find_prompts(run_dir: Path, policy: str, folder: Path) -> Prompts:
    """Return prompts and replies of the policy in the run's latest episodes, or questions without episodes.

    :raises CheckpointError: The tokenizer cannot be loaded.
    """
    try:
        with EpisodeLog(run_dir, check=False) as log:
            newest = log.list(order="time", descending=True, limit=8 * PROMPTS)
            found = [ids for one in newest if (ids := _longest(log.read(one).episode.turns, policy))]
    except DataError:
        found = []
    if found:
        return Prompts(ids=[ids[:TOKENS] for ids in found[:PROMPTS]], source="from the run's latest episodes")
    tokenizer = load_tokenizer(folder)
    if tokenizer.chat_template is None:
        asked = [tokenizer(text)["input_ids"] for text in QUESTIONS]
        return Prompts(ids=asked, source="built-in questions, because the run has no episodes")
    messages = [[{"role": "user", "content": text}] for text in QUESTIONS]
    asked = [
        tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=True)["input_ids"]
        for one in messages
    ]
    return Prompts(ids=asked, source="built-in questions, because the run has no episodes")


def _longest(turns: Sequence[Any], policy: str) -> list[int]:
    said = [[*t.generation.prompt_ids, *t.generation.response_ids] for t in turns if t.policy == policy]
    return max(said, key=len, default=[])


def load(folder: str | Path, *, dtype: str = "float32", **options: Any) -> Any:
    """Load a model on the CPU without ASTuner code.

    :param options: Options of transformers' ``from_pretrained``, such as a file in the folder or a revision.
    :raises ValueError: Weights are missing.
    """
    import torch
    from transformers import AutoModelForCausalLM

    draws = "gguf_file" in options  # shows a progress bar regardless of the setting
    with redirect_stderr(StringIO()) if draws else nullcontext():
        loaded: Any = load_pretrained(
            AutoModelForCausalLM,
            folder,
            dtype=getattr(torch, dtype),
            attn_implementation="eager",  # a config may name a kernel on the Hub, which would run remote code
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{len(missing)} weights are missing (first: {missing[0]})")
    return model.eval()


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a model folder.

    :raises CheckpointError: The tokenizer is unreadable, or its files are missing.
    """
    with _loading(folder):
        from transformers import AutoTokenizer

        tokenizer = load_pretrained(AutoTokenizer, folder, local_files_only=True)
        if len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers created an empty one
            raise ValueError("tokenizer.json is missing; copy it and tokenizer_config.json from the original model")
    return tokenizer


def logits(model: Any, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the logits of each prompt, float32 [tokens, vocabulary]."""
    import torch

    with torch.inference_mode():
        return [model(torch.tensor([list(ids)]), use_cache=False).logits[0].float() for ids in prompts]


def _with_adapters(folder: Path, base: str, revision: str | None) -> Any:
    """Load the base model in the checkpoint's data type, convert it to float32, and add unmerged adapters."""
    from peft import PeftModel

    stored = stored_dtype(folder)
    model = load(base, dtype=stored, **({} if revision is None else {"revision": revision})).float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft 0.21 uses a name that transformers 5 renamed
        return PeftModel.from_pretrained(model, str(folder / "adapter")).float().eval()


@contextmanager
def _loading(what: Path) -> Iterator[None]:
    """Convert errors while loading a model to ASTuner errors."""
    try:
        from transformers.utils import logging as transformers_logging

        logging: Any = transformers_logging
        shown, before = logging.is_progress_bar_enabled(), logging.get_verbosity()
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        try:
            yield
        finally:
            logging.set_verbosity(before)
            if shown:
                logging.enable_progress_bar()
    except ImportError as e:
        raise MissingDependency(
            f"The check of an export requires transformers, and {e.name or e} is not installed. Run: pip install "
            f"'astuner-export[check]', {UNCHECKED}"
        ) from e
    except MemoryError as e:
        raise CheckpointError(f"{what} does not fit in memory in float32. Use a larger machine, {UNCHECKED}.") from e
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError) as e:
        reason = " ".join(str(e).split())
        raise CheckpointError(
            f"Cannot check {what}, because transformers cannot load it: {reason}. Fix it, choose another "
            f"--checkpoint, {UNCHECKED}."
        ) from e
