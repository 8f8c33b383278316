"""`astuner.model.chat_template` is a file beside the experiment, or a template that comes with the package."""

import pytest

from astuner import load_config
from astuner.contracts.errors import ConfigError
from astuner.testing import make_tokenizer
from astuner_models.serving import TEMPLATES, chat_template, make_codec

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def experiment(tmp_path):
    file = tmp_path / "e.yaml"
    file.write_text("astuner: {model: {path: m}}\n")

    def load(*written):
        return load_config(file, [f"astuner.model.chat_template={name}" for name in written])

    return load


def test_a_name_a_file_and_nothing(experiment, tmp_path):
    assert chat_template(experiment()) is None
    assert chat_template(experiment("hermes")) == TEMPLATES["hermes"].read_text()
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    assert chat_template(experiment("own.jinja")) == "{{ messages }}"
    with pytest.raises(ConfigError, match=r"cannot read .*/herms: .* one of hermes"):
        chat_template(experiment("herms"))


def test_a_model_without_tools_says_what_to_write_and_then_shows_them(experiment):
    ask = [{"role": "user", "content": "Where?"}]
    with pytest.raises(ConfigError, match=r"offers 1 tools.*astuner\.model\.chat_template to hermes"):
        make_codec(experiment(), make_tokenizer(PLAIN)).conversation().encode(ask, [TOOL])
    tokenizer = make_tokenizer(PLAIN)
    prompt = make_codec(experiment("hermes"), tokenizer).conversation().encode(ask, [TOOL]).prompt_ids
    assert '"name": "look"' in tokenizer.decode(prompt)
    assert tokenizer.chat_template == TEMPLATES["hermes"].read_text()  # and so a checkpoint is saved


def test_the_template_writes_what_it_says(experiment):
    tokenizer = make_tokenizer(PLAIN)
    make_codec(experiment("hermes"), tokenizer)
    call = {"type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "here"},
        {"role": "tool", "content": "there"},
        {"role": "assistant", "content": "Both."},
    ]
    said = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert said == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhere?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nhere\n</tool_response>\n<tool_response>\nthere\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nBoth.<|im_end|>\n<|im_start|>assistant\n"
    )
    with_tools = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False)
    assert with_tools.startswith("<|im_start|>system\nBe brief.\n\nYou can call these tools")
    alone = tokenizer.apply_chat_template(messages[1:2], tools=[TOOL], tokenize=False)
    assert alone.startswith("<|im_start|>system\nYou can call these tools")
    assert alone.count("<|im_start|>system") == 1
