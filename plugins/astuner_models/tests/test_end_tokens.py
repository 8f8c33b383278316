"""End tokens that model, tokenizer and generation config list differently."""

import json

import pytest

from astuner import load_config
from astuner.contracts.errors import ConfigError
from astuner.contracts.types import FinishReason, Generation
from astuner.testing import make_tokenizer
from astuner_models.serving import end_token_ids, make_codec
from tests.table import table

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|eot|>"]


@pytest.fixture
def folder(tmp_path):
    """A model folder with a tokenizer, whose ids 0 to 3 are `SPECIAL`."""
    tokenizer = make_tokenizer(CHATML, SPECIAL)
    ids = [tokenizer.convert_tokens_to_ids(token) for token in SPECIAL]
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "e.yaml").write_text("astuner: {model: {path: model}}\n")

    def write(config, generation):
        from transformers import AutoTokenizer

        def numbered(value):
            if isinstance(value, list):
                return [numbered(one) for one in value]
            return ids[SPECIAL.index(value)] if value in SPECIAL else value

        described = {"model_type": "qwen2", **{key: numbered(value) for key, value in config.items()}}
        (tmp_path / "model" / "config.json").write_text(json.dumps(described))
        if generation is not None:
            listed = {key: numbered(value) for key, value in generation.items()}
            (tmp_path / "model" / "generation_config.json").write_text(json.dumps(listed))
        return AutoTokenizer.from_pretrained(tmp_path / "model"), load_config(tmp_path / "e.yaml")

    return write


END, TEXT, EOT = "<|im_end|>", "<|endoftext|>", "<|eot|>"


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({}, {"eos_token_id": [END, TEXT]}, [END, TEXT]),  # Qwen's
        ({}, {"eos_token_id": [TEXT, END, EOT]}, [TEXT, END, EOT]),  # Llama's
        ({}, {"eos_token_id": TEXT}, [TEXT]),
        ({"eos_token_id": EOT}, {"eos_token_id": TEXT}, [TEXT]),  # as in transformers, config.json does not count
        ({"eos_token_id": EOT}, None, [EOT]),
        ({"eos_token_id": [EOT, TEXT]}, None, [EOT, TEXT]),
        ({"eos_token_id": EOT}, {"temperature": 0.7}, []),
        ({}, {"eos_token_id": None}, []),
        ({}, None, []),
        ({}, {"eos_token_id": []}, []),
        ({}, {"eos_token_id": [END, 10_000_000]}, [END]),  # an id that the tokenizer has not
        ({}, {"eos_token_id": [END, -1]}, [END]),
        ({}, {"eos_token_id": TEXT, "pad_token_id": TEXT, "bos_token_id": EOT}, [TEXT]),
    ],
)
def test_every_end_token_ends_a_reply_and_is_not_part_of_it(folder, config, generation, ends):
    tokenizer, experiment = folder(config, generation)
    ids = [tokenizer.convert_tokens_to_ids(token) for token in ends]
    assert list(end_token_ids(tokenizer)) == ids
    codec = make_codec(experiment, tokenizer)
    assert set(ids) <= set(codec.stop_token_ids)
    for end in ids:
        conversation = codec.conversation()
        prompt = conversation.encode([{"role": "user", "content": "Hello"}])
        spoken = [*tokenizer.encode("Hi there"), end]
        generation_made = Generation(
            prompt_ids=prompt.prompt_ids,
            response_ids=spoken,
            logprobs=[-0.5] * len(spoken),
            finish_reason=FinishReason.STOP,
            policy_version=0,
        )
        assert conversation.accept(prompt, generation_made, 0)["content"] == "Hi there"


@table("text", ["{", "[1]", '"x"', "not json", ""])
def test_a_generation_config_that_cannot_be_read_is_named(text, tmp_path):
    tokenizer = make_tokenizer(CHATML, SPECIAL)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "generation_config.json").write_text(text)
    tokenizer.name_or_path = str(tmp_path)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        end_token_ids(tokenizer)


def test_a_tokenizer_of_no_folder_has_none():
    assert end_token_ids(make_tokenizer(CHATML, SPECIAL)) == ()
