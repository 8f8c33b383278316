"""What `astuner export --to gguf` writes, read by llama.cpp: the same tokens, logits and greedy answers.

``make test-llama-cpp`` compiles llama-cpp-python and runs this.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import astuner_local
from astuner_export.gguf_file import PRE_TOKENIZERS, write_gguf
from tests.table import table

TINY = Path(astuner_local.__file__).parent / "tiny" / "model"
OTHER = os.environ.get("ASTUNER_TEST_MODEL", "")
"""A folder with another model to try, e.g. SmolLM2."""
TEXTS = (
    "What is 12 + 30? It's 42, isn't it?",
    "def f(x):\n    return x ** 2\n\n\n# 1234567 and 3.14159\t\tend  ",
    "Äpfel, naïve café, 東京は日本の首都です。 Привет! 👩‍🚀🎉",
    "   three spaces, trailing   \n \n\r\nCRLF",
    "I'LL SAY: we've 1,000,000 of them; they'd 2nd 3RD x2y3",
    "<|im_start|>user\nHello <|im_end|>\n<|im_start|>assistant\n",
)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "pre": "smollm"},
    "llama, attention biases": {"model_type": "llama", "pre": "gpt-2", "attention_bias": True},
    "llama 3's rope, untied, bos": {
        "model_type": "llama",
        "pre": "llama-bpe",
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "linear rope": {
        "model_type": "llama",
        "pre": "smollm",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    },
    "yarn": {
        "model_type": "qwen2",
        "pre": "qwen2",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    "mistral": {"model_type": "mistral", "pre": "gpt-2", "sliding_window": None, "head_dim": 32},
    "qwen2": {"model_type": "qwen2", "pre": "qwen2"},
    "qwen3": {"model_type": "qwen3", "pre": "qwen2", "head_dim": 32},
}


def make_tokenizer(pre: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE that splits text as ``pre`` does, trained on this very repository's texts."""
    steps, ignore_merges = PRE_TOKENIZERS[pre]
    kinds = {
        "Split": lambda argument: pre_tokenizers.Split(Regex(argument), behavior="isolated"),
        "Digits": lambda argument: pre_tokenizers.Digits(individual_digits=argument),
        "ByteLevel": lambda argument: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=argument),
    }
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    made = [kinds[kind](argument) for kind, argument in steps]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(made) if len(made) > 1 else made[0]
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    root = Path(__file__).parents[2]
    texts = [file.read_text(encoding="utf-8") for file in sorted((root / "docs").glob("*.md"))[:8]]
    tokenizer.train_from_iterator([*texts, *(TEXTS * 20)], trainer)
    if pre == "llama-bpe":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>" if pre == "llama-bpe" else None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=(TINY / "chat_template.jinja").read_text(encoding="utf-8"),
    )


def make_model(folder: Path, pre: str, model_type: str, **settings: Any) -> Path:
    """A model of two layers with random weights, large enough to tell positions and heads apart."""
    tokenizer = make_tokenizer(pre)
    sizes = {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 6}
    others = {"num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.15}
    rows = {"vocab_size": len(tokenizer) + 5, "tie_word_embeddings": True}  # more rows than tokens, as Qwen has
    config = AutoConfig.for_model(model_type, **{**sizes, **others, **rows, **settings})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):  # which start at 0 and 1, and would hide what is mixed up
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class LlamaCpp:
    """llama.cpp with keys and values in float32, so that what differs is the file."""

    def __init__(self, file: Path) -> None:
        self.model = llama_cpp.Llama(
            str(file), n_ctx=512, n_threads=1, logits_all=True, type_k=0, type_v=0, flash_attn=False, verbose=False
        )

    def tokens(self, text: str) -> list[int]:
        """As it begins a prompt by itself: with the token that the file says begins one."""
        begins = llama_cpp.llama_vocab_get_add_bos(llama_cpp.llama_model_get_vocab(self.model.model))
        return list(self.model.tokenize(text.encode(), add_bos=begins, special=True))

    def logits(self, ids: list[int]) -> np.ndarray:
        """float32 [tokens, vocabulary]."""
        self.model.reset()
        self.model.eval(ids)
        return np.array(self.model.scores[: len(ids)])


def check(folder: Path, file: Path, dtype: str, bound: float) -> tuple[float, float]:
    """The largest difference of a logit by the largest of its position, and how often the first choice is the same."""
    write_gguf(folder, file, dtype=dtype, name="test")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    llama = LlamaCpp(file)
    assert llama.model.metadata["tokenizer.chat_template"] == tokenizer.chat_template
    assert llama.model.token_eos() == tokenizer.eos_token_id
    worst, same, tokens = 0.0, 0, 0
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert llama.tokens(text) == ids, text
        assert llama.model.detokenize(ids, special=True).decode() == tokenizer.decode(ids)
        with torch.inference_mode():
            ours = model(torch.tensor([ids])).logits[0].numpy()
        theirs = llama.logits(ids)
        worst = max(worst, float((np.abs(ours - theirs).max(-1) / np.abs(ours).max(-1)).max()))
        same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        tokens += len(ids)
    assert worst <= bound
    if dtype == "float32":
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": "What is 2 + 3?"}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        answer = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :].tolist()
        llama.model.reset()
        said = [next(stream) for stream in [llama.model.generate(prompt, temp=0.0, repeat_penalty=1.0)] for _ in answer]
        assert said == answer
    print(f"{folder.parent.name} {dtype}: {worst:.2g} of the largest, first choice {same / tokens:.2%} of {tokens}")
    return worst, same / tokens


@table("family", list(FAMILIES))
def test_llama_cpp_reads_every_family(tmp_path: Path, family: str) -> None:
    check(make_model(tmp_path / "model", **FAMILIES[family]), tmp_path / "model.gguf", "float32", 1e-4)


@table(("dtype", "bound"), [("float32", 1e-4), ("float16", 2**-7), ("bfloat16", 2**-4)])
def test_the_shipped_model(tmp_path: Path, dtype: str, bound: float) -> None:
    check(TINY, tmp_path / "tiny.gguf", dtype, bound)


@pytest.mark.skipif(not OTHER, reason="ASTUNER_TEST_MODEL names no folder")
@table(("dtype", "bound"), [("float32", 1e-3), ("float16", 2**-7), ("bfloat16", 2**-4)])
def test_another_model(tmp_path: Path, dtype: str, bound: float) -> None:
    check(Path(OTHER), tmp_path / "other.gguf", dtype, bound)
