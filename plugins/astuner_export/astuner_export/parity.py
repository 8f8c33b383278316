"""Whether what was exported says what the trainer's own model says: logits of both on the same tokens.

Both are computed in float32 by transformers, from weights as they are stored, so a difference comes of the weights: of
rounding where they were converted or adapters were merged, and of a defect otherwise.  The trainer's model is the
checkpoint's; where it kept adapters beside their base, that base with the adapters on top of it, not merged.
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
from astuner_export.weights import stored_dtype
from astuner_models.pretrained import load_pretrained
from astuner_record.episode_log.reader import EpisodeLog

if TYPE_CHECKING:
    from torch import Tensor

SAME = 1e-4
"""The bound where no weight was rounded."""
BOUNDS = {"float32": SAME, "float16": 2**-7, "bfloat16": 2**-4}
"""By the dtype that weights were rounded to: the largest difference of a logit by the largest logit of that position,
16 times the dtype's precision (2^-11 and 2^-8)."""
MOST_KL = 0.01
"""Nats per token, on average, by which the two distributions may differ; 1e-4 where no weight was rounded."""
PROMPTS = 4
TOKENS = 128
"""Of each prompt, from its beginning."""
QUESTIONS = ("What is 12 + 30?", "Name three colours.", "Why is the sky blue? Answer in one sentence.", "Hello!")
"""What is asked where a run has no episodes."""
UNCHECKED = "or leave the check out: --no-check"


@dataclass(frozen=True, kw_only=True)
class Parity:
    """How far what was exported is from the trainer's model."""

    prompts: int
    tokens: int
    source: str
    """Where the prompts are from."""
    difference: float
    """The largest |difference of a logit| / largest |logit| of that position."""
    bound: float
    kl: float
    """KL(trainer || exported) in nats, averaged over tokens."""
    kl_bound: float
    agreement: float
    """Share of positions with the same most probable token."""

    @property
    def holds(self) -> bool:
        return self.difference <= self.bound and self.kl <= self.kl_bound  # not so for NaN

    def __str__(self) -> str:
        return (
            f"logits differ by {self.difference:.2g} of the largest (bound {self.bound:.2g}), KL {self.kl:.2g} "
            f"(bound {self.kl_bound:.2g}), the same most probable token at {self.agreement:.2%} of {self.tokens:,} "
            f"positions of {self.prompts} prompts ({self.source})"
        )


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Token ids to compare on."""

    ids: Sequence[Sequence[int]]
    source: str


class Reference:
    """The trainer's model, asked once."""

    def __init__(self, folder: Path, base: Callable[[], tuple[str, str | None]], prompts: Prompts) -> None:
        """
        :param folder: the policy's model in the checkpoint.
        :param base: the model before training, which adapters are for: a folder, or a name on the hub and its revision.
        :raises MissingDependency: torch, transformers or peft are not here.
        :raises CheckpointError: transformers does not load it.
        """
        self.prompts = prompts
        self.merged = (folder / "adapter" / "adapter_config.json").is_file()
        with _loading(folder):
            self._logits = logits(_with_adapters(folder, *base()) if self.merged else load(folder), prompts.ids)

    def compare(self, model: Callable[[], Any], what: Path, *, rounded: str) -> Parity:
        """What the exported model has of it.

        :param model: loads it, in float32.
        :param rounded: the dtype that weights were rounded to; empty where they were not.
        :raises CheckpointError: it cannot be loaded.
        """
        import torch

        with _loading(what):
            theirs = logits(model(), self.prompts.ids)
        difference, kl, same, tokens = 0.0, 0.0, 0, 0
        for mine, other in zip(self._logits, theirs, strict=True):
            scale = mine.abs().amax(-1).clamp_min(1e-12)
            worst = ((mine - other).abs().amax(-1) / scale).max()
            difference = float(torch.maximum(worst, torch.tensor(difference)))  # NaN stays
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
    """What the policy read and said in the run's newest episodes; without any, questions in its chat template.

    :raises CheckpointError: its tokenizer cannot be read.
    """
    try:
        with EpisodeLog(run_dir, check=False) as log:
            newest = log.list(order="time", descending=True, limit=8 * PROMPTS)
            found = [ids for one in newest if (ids := _longest(log.read(one).episode.turns, policy))]
    except DataError:
        found = []
    if found:
        return Prompts(ids=[ids[:TOKENS] for ids in found[:PROMPTS]], source="of the run's newest episodes")
    tokenizer = load_tokenizer(folder)
    if tokenizer.chat_template is None:
        asked = [tokenizer(text)["input_ids"] for text in QUESTIONS]
        return Prompts(ids=asked, source="questions of our own, as there are no episodes")
    messages = [[{"role": "user", "content": text}] for text in QUESTIONS]
    asked = [
        tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=True)["input_ids"]
        for one in messages
    ]
    return Prompts(ids=asked, source="questions of our own, as there are no episodes")


def _longest(turns: Sequence[Any], policy: str) -> list[int]:
    said = [[*t.generation.prompt_ids, *t.generation.response_ids] for t in turns if t.policy == policy]
    return max(said, key=len, default=[])


def load(folder: str | Path, *, dtype: str = "float32", **options: Any) -> Any:
    """A model as anybody loads it, on the CPU.

    :param options: more for transformers' ``from_pretrained``: a file in the folder, a revision.
    :raises ValueError: weights are missing.
    """
    import torch
    from transformers import AutoModelForCausalLM

    draws = "gguf_file" in options  # a bar, whatever it was told
    with redirect_stderr(StringIO()) if draws else nullcontext():
        loaded: Any = load_pretrained(
            AutoModelForCausalLM,
            folder,
            dtype=getattr(torch, dtype),
            attn_implementation="eager",  # a config may name a kernel of the hub, which is code
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{len(missing)} weights are missing (first: {missing[0]})")
    return model.eval()


def load_tokenizer(folder: Path) -> Any:
    """:raises CheckpointError: it cannot be read, or its files are missing."""
    with _loading(folder):
        from transformers import AutoTokenizer

        tokenizer = load_pretrained(AutoTokenizer, folder, local_files_only=True)
        if len(tokenizer) <= len(tokenizer.all_special_tokens):  # made up by transformers, of none of its files
            raise ValueError("its tokenizer.json is missing; copy it and tokenizer_config.json from the original model")
    return tokenizer


def logits(model: Any, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Of each prompt, float32 [tokens, vocabulary]."""
    import torch

    with torch.inference_mode():
        return [model(torch.tensor([list(ids)]), use_cache=False).logits[0].float() for ids in prompts]


def _with_adapters(folder: Path, base: str, revision: str | None) -> Any:
    """The base in the checkpoint's dtype, as it was trained, then in float32, with adapters that are not merged."""
    from peft import PeftModel

    stored = stored_dtype(folder)
    model = load(base, dtype=stored, **({} if revision is None else {"revision": revision})).float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft 0.21 reads a name that transformers 5 renamed
        return PeftModel.from_pretrained(model, str(folder / "adapter")).float().eval()


@contextmanager
def _loading(what: Path) -> Iterator[None]:
    """Say in our own words why a model cannot be asked."""
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
            f"an export is checked by transformers, and {e.name or e} is not installed: pip install "
            f"'astuner-export[check]', {UNCHECKED}"
        ) from e
    except MemoryError as e:
        raise CheckpointError(f"{what} does not fit in memory in float32: take a larger machine, {UNCHECKED}") from e
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError) as e:
        reason = " ".join(str(e).split())
        raise CheckpointError(
            f"{what} cannot be checked, for transformers does not load it: {reason}; mend it, choose another "
            f"--checkpoint, {UNCHECKED}"
        ) from e
