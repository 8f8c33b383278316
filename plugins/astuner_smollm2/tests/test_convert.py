"""The folder that is written computes what the GGUF's weights do."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from astuner.contracts.errors import RunError
from astuner_smollm2 import cache, convert


def converted(gguf, folder, dtype):
    folder.mkdir()
    shares = []
    convert.convert(gguf, folder, dtype, shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1
    return folder


def logits(model, ids):
    with torch.inference_mode():
        return model(ids).logits


def test_a_small_model_computes_what_it_did(small, tmp_path):
    ids = torch.tensor([[1, 3, 4, 5, 8, 2]])
    folder = converted(tmp_path / "small.gguf", tmp_path / "exact", "float32")
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(folder), ids), logits(small, ids))
    folder = converted(tmp_path / "small.gguf", tmp_path / "rounded", "bfloat16")
    rounded = AutoModelForCausalLM.from_pretrained(folder)
    assert rounded.dtype is torch.bfloat16
    torch.testing.assert_close(logits(rounded, ids), logits(small.to(torch.bfloat16), ids), rtol=0, atol=0)


def test_its_tokenizer_cuts_digits_one_by_one(small, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(converted(tmp_path / "small.gguf", tmp_path / "m", "float32"))
    assert tokenizer.tokenize("<|im_start|>ab12<|im_end|>") == ["<|im_start|>", "ab", "1", "2", "<|im_end|>"]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert tokenizer.chat_template == "{{ messages[0].content }}"


def test_another_model_is_refused_by_what_differs(small, tmp_path):
    described = convert.FILES / "config.json"
    described.write_text(described.read_text().replace('"hidden_size": 64', '"hidden_size": 128'))
    with pytest.raises(RunError, match=r"llama.embedding_length is 64, not 128"):
        convert.convert(tmp_path / "small.gguf", tmp_path, "float32", lambda share: None)


def test_a_file_that_was_cut_off_is_refused(small, tmp_path):
    content, cut = (tmp_path / "small.gguf").read_bytes(), tmp_path / "cut.gguf"
    for kept in (0, 3, 40, 400, len(content) // 2, -1000, -1):
        cut.write_bytes(content[:kept])
        with pytest.raises(RunError, match=r"cut\.gguf is damaged"):
            convert.convert(cut, tmp_path, "float32", lambda share: None)


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    """The real weights, from this machine's cache; fetched once."""
    folder = cache.model_folder("smollm2-135m-float32")
    return folder, cache.installed_weights() or cache.cache_root() / f"{cache.PACKAGE}-{cache.VERSION}" / cache.GGUF


@pytest.mark.slow
def test_the_real_model_computes_what_transformers_computes_from_the_gguf(real):
    folder, gguf = real
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    torch.testing.assert_close(logits(ours, ids), logits(theirs, ids), rtol=1e-5, atol=1e-4)
    said = ours.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(said) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.slow
def test_the_real_tokenizer_reads_and_writes_text(real):
    folder, gguf = real
    ours = AutoTokenizer.from_pretrained(folder)
    theirs = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    for text in ("Hello, world!", "Größe — ✓ 日本語\n\n\tx", "<|im_start|>user\nhi there's<|im_end|>\n"):
        assert ours(text).input_ids == theirs(text).input_ids
        assert ours.decode(ours(text).input_ids) == text
    assert ours.tokenize("1234 5") == ["1", "2", "3", "4", "Ġ", "5"]
