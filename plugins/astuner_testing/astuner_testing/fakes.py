"""Provide fake models, so that tests of workflows and backbones need no weights.

`FakeEngine` uses real token IDs of a real tokenizer; only its replies are scripted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astuner.contracts.backbone import Backbone, Capabilities, InferenceEngine, Served
from astuner.contracts.errors import ContextOverflow, ModelFailed, RunError
from astuner.contracts.types import FinishReason, Generation, SamplingParams, Split, Task, WorkflowTask

if TYPE_CHECKING:
    from astuner import Config
    from astuner.contracts.run import Run

Replies = Sequence[str] | Callable[[str], str]
"""Replies of a fake model: one text per call, or a function of the prompt's text."""

CHATML = Path(__file__).with_name("chatml.jinja").read_text(encoding="utf-8")
"""ChatML template with Hermes-style tool calls, written for ASTuner."""


def make_tokenizer(
    chat_template: str | None = None,
    special_tokens: Sequence[str] = ("<|im_start|>", "<|im_end|>"),
    *,
    eos_token: str = "<|im_end|>",
    bos_token: str | None = None,
) -> Any:
    """Return a Hugging Face tokenizer built in memory: one token for each of 256 bytes, and special tokens.

    Without arguments it is ChatML's, with a chat template that supports tools.

    :param chat_template: Jinja text of another family's template.
    :param special_tokens: Texts that are one token each, in addition to ``<|endoftext|>``, the end and begin token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    build: Any = PreTrainedTokenizerFast  # its constructor has no annotations

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", *special_tokens, eos_token, *([bos_token] if bos_token else [])]
    backend.add_special_tokens(list(dict.fromkeys(special)))
    return build(
        tokenizer_object=backend,
        eos_token=eos_token,
        **({"bos_token": bos_token} if bos_token else {}),
        pad_token="<|endoftext|>",
        chat_template=CHATML if chat_template is None else chat_template,
        clean_up_tokenization_spaces=False,
    )


def workflow_task(query: str = "What is 2 + 2?", *, split: Split = Split.TRAIN, **metadata: Any) -> WorkflowTask:
    """Return one attempt at a task with this query; keywords become the task's metadata, e.g. ``answer="4"``."""
    task = Task(task_id="task", main_query=query, metadata=metadata)
    return WorkflowTask(task=task, episode_id="episode", group_id="group", split=split)


class FakeEngine(InferenceEngine):
    """Return scripted replies as token IDs, each with log-probability -0.5.

    :param replies: One text per call (an additional call raises `ModelFailed`), or a function of the prompt's text.
    """

    LOGPROB = -0.5

    def __init__(self, replies: Replies, tokenizer: Any = None, *, max_model_len: int = 100_000) -> None:
        self.tokenizer = tokenizer or make_tokenizer()
        self.max_model_len = max_model_len
        self.calls: list[tuple[list[int], SamplingParams, str]] = []
        """(prompt_ids, sampling, session) of every call, in order."""
        self._replies = replies

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, session: str = "") -> Generation:
        room = self.max_model_len - len(prompt_ids)
        if room < 1:
            raise ContextOverflow(
                f"a prompt of {len(prompt_ids)} tokens leaves no space in a context of {self.max_model_len}"
            )
        self.calls.append((list(prompt_ids), sampling, session))
        text = self.tokenizer.encode(self._reply(prompt_ids), add_special_tokens=False)
        whole = [*text, self.tokenizer.eos_token_id]
        ends = {self.tokenizer.eos_token_id, *sampling.stop_token_ids}
        length = next(i for i, token in enumerate(whole, start=1) if token in ends)
        response = whole[: min(length, room, sampling.max_tokens)]
        return Generation(
            prompt_ids=tuple(prompt_ids),
            response_ids=tuple(response),
            logprobs=(self.LOGPROB,) * len(response),
            finish_reason=FinishReason.STOP if len(response) == length else FinishReason.LENGTH,
            policy_version=0,
        )

    def _reply(self, prompt_ids: Sequence[int]) -> str:
        if callable(self._replies):
            return self._replies(self.tokenizer.decode(prompt_ids, skip_special_tokens=False))
        if len(self.calls) > len(self._replies):
            raise ModelFailed(f"the fake engine has {len(self._replies)} replies but received another call")
        return self._replies[len(self.calls) - 1]


class FakeBackbone(Backbone):
    """Serve a `FakeEngine`; set ``replies`` on a subclass. It cannot train."""

    capabilities = Capabilities(trains=False)
    replies: Replies = staticmethod(lambda prompt: "The answer is 4.")

    @contextmanager
    def serve(self, model_path: str | None = None) -> Iterator[Served]:
        tokenizer = make_tokenizer()
        yield Served(engine=FakeEngine(self.replies, tokenizer), tokenizer=tokenizer, name=model_path or "fake")

    def train(self, run: Run) -> None:
        raise RunError("the fake backbone cannot train. Use --backbone local")


_numbers = itertools.count()


def fake_config(
    folder: Path, text: str = "", overrides: Sequence[str] = (), *, disabled_plugins: Sequence[str] = ()
) -> Config:
    """Return a checked config from lines of YAML below ``astuner:`` (a model path is always included).

    :param folder: Directory for the experiment file, e.g. pytest's ``tmp_path``.
    :param text: YAML of the ``astuner`` section, indented by two spaces.
    :param disabled_plugins: As for `astuner.load_config`.
    """
    from astuner import load_config

    path = folder / f"experiment{next(_numbers)}.yaml"
    path.write_text(f"astuner:\n  model:\n    path: fake\n{text}\n")
    return load_config(path, list(overrides), disabled_plugins=disabled_plugins)
