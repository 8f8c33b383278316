"""Python files, pickles and templates in a model folder never run, whatever is answered on stdin."""

from __future__ import annotations

import ast
import io
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from astuner import ModelSection, load_plugins, load_tokenizer
from astuner.contracts.errors import AstunerError, ConfigError
from astuner_local.modeling import load_model
from astuner_models.pretrained import TRUST_KEY, load_pretrained
from tests.table import table

ROOT = Path(__file__).parents[3]
MARK = "code_ran"
"""File that the code of a hostile folder writes."""


class _Pickled:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.mark),))


def _edit(folder: Path, name: str, **changes: Any) -> None:
    file = folder / name
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | changes))


def _auto_config(folder: Path) -> None:
    _edit(folder, "config.json", model_type="evil", auto_map={"AutoConfig": "evil.Evil"})


def _auto_model_of_known_type(folder: Path) -> None:
    _edit(folder, "config.json", auto_map={"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.Evil"})


def _auto_map_of_another_folder(folder: Path) -> None:
    other = folder.with_name("other")
    shutil.copytree(folder, other)
    _edit(folder, "config.json", model_type="evil", auto_map={"AutoConfig": f"{other}--evil.Evil"})


def _auto_tokenizer(folder: Path) -> None:
    _edit(folder, "tokenizer_config.json", tokenizer_class="Evil", auto_map={"AutoTokenizer": ["evil.Evil", None]})


def _auto_tokenizer_list(folder: Path) -> None:
    _edit(folder, "tokenizer_config.json", tokenizer_class="Evil", auto_map=["evil.Evil", "evil.Evil"])


def _auto_tokenizer_in_config(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    _edit(folder, "config.json", model_type="evil", auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]})


def _auto_processor(folder: Path) -> None:
    for name in ("processor_config.json", "preprocessor_config.json"):
        _edit(folder, name, processor_class="Evil", auto_map={"AutoProcessor": "evil.Evil"})


def _custom_generate(folder: Path) -> None:
    (folder / "custom_generate").mkdir()
    shutil.copy(folder / "evil.py", folder / "custom_generate" / "generate.py")
    _edit(folder, "generation_config.json", custom_generate=str(folder), auto_map={"GenerationConfig": "evil.Evil"})


def _pickled_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Pickled(folder.parent / MARK)))


def _pickled_adapter(folder: Path) -> None:
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(folder), "r": 1, "target_modules": ["q_proj"]}
    adapter["auto_mapping"] = {"base_model_class": "Evil", "parent_library": "evil"}  # type: ignore[assignment]
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(_Pickled(folder.parent / MARK)))


def _kernel_of_the_hub(folder: Path) -> None:
    _edit(folder, "config.json", attn_implementation="evil/kernel", _attn_implementation="evil/kernel")


def _quantizer(folder: Path) -> None:
    _edit(folder, "config.json", quantization_config={"quant_method": "evil", "modules_to_not_convert": ["evil"]})


def _class_by_path(folder: Path) -> None:
    _edit(folder, "tokenizer_config.json", tokenizer_class="evil.Evil")
    _edit(folder, "config.json", architectures=["evil.Evil"])


def _modules_of_the_same_name(folder: Path) -> None:
    for name in ("json", "torch", "safetensors", "tokenizers", "sitecustomize", "conftest", "__init__"):
        shutil.copy(folder / "evil.py", folder / f"{name}.py")


def _template(text: str) -> Callable[[Path], None]:
    def hostile(folder: Path) -> None:
        (folder / "chat_template.jinja").write_text(text.replace("MARK", str(folder.parent / MARK)))

    return hostile


HOSTILE: dict[str, Callable[[Path], None]] = {
    "auto_map of a config": _auto_config,
    "auto_map of a known architecture": _auto_model_of_known_type,
    "auto_map of another folder": _auto_map_of_another_folder,
    "auto_map of a tokenizer": _auto_tokenizer,
    "auto_map of a tokenizer, a list": _auto_tokenizer_list,
    "auto_map of a tokenizer, in config.json": _auto_tokenizer_in_config,
    "auto_map of a processor": _auto_processor,
    "custom_generate": _custom_generate,
    "pickled weights": _pickled_weights,
    "pickled adapter": _pickled_adapter,
    "kernel of the hub": _kernel_of_the_hub,
    "unknown quantizer": _quantizer,
    "class by its path": _class_by_path,
    "modules named as packages": _modules_of_the_same_name,
    "template: globals": _template("{{ cycler.__init__.__globals__.os.system('touch MARK') }}"),
    "template: subclasses": _template(
        "{% for c in ().__class__.__base__.__subclasses__() %}{% if c.__name__ == 'Popen' %}"
        "{{ c(['touch', 'MARK']) }}{% endif %}{% endfor %}"
    ),
    "template: format": _template("{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}{{ 1/0 }}"),
    "template: filter": _template("{{ messages|attr('__class__')|attr('mro')() }}{% include 'MARK' %}"),
}
REFUSED = ("auto_map of a config", "auto_map of another folder")
"""Those that cannot be loaded without their code; for the others transformers has a class of its own."""


@pytest.fixture
def tiny_model() -> Path:
    return Path(load_plugins().hook.locate_model(path="tiny-calculator"))


def _hostile_folder(model: Path, tmp_path: Path, kind: str) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(tmp_path / MARK)!r})\nclass Evil:\n    pass\n")
    HOSTILE[kind](folder)
    return folder


def _loads(folder: Path) -> Iterator[Callable[[], Any]]:
    from transformers import AutoConfig

    yield lambda: load_pretrained(AutoConfig, folder)
    yield lambda: load_tokenizer(str(folder)).apply_chat_template([{"role": "user", "content": "a"}])
    yield lambda: load_model(ModelSection(path=str(folder), dtype="float32", device="cpu"))


@table("kind", HOSTILE)
def test_no_code_of_a_model_runs(kind: str, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _hostile_folder(tiny_model, tmp_path, kind)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refusals = []
    for load in _loads(folder):
        monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 20))
        try:
            load()
        except AstunerError as e:
            refusals.append(str(e))
        except Exception:  # transformers, Jinja and json each have their own
            pass
        assert not (tmp_path / MARK).exists()
        assert sys.stdin.tell() == 0  # nobody asked
    named = [text for text in refusals if TRUST_KEY in text]
    assert bool(named) == (kind in REFUSED)
    assert all("auto_map" in text and str(folder) in text for text in named)


def test_the_key_lets_the_code_run(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig

    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = _hostile_folder(tiny_model, tmp_path, "auto_map of a config")
    with pytest.raises(ConfigError, match=r"config.json: .*auto_map.AutoConfig: evil.Evil"):
        load_pretrained(AutoConfig, folder)
    with suppress(Exception):  # the class is no config
        load_pretrained(AutoConfig, folder, trust_remote_code=True)
    assert (tmp_path / MARK).exists()


LOADERS = ("from_pretrained", "load_dataset", "pipeline")
PICKLES = ("pickle.load", "pickle.loads", "torch.load", "joblib.load", "dill.load")


def _packages() -> Iterator[Path]:
    for folder in (ROOT / "astuner_core" / "astuner", *(ROOT / "plugins").glob("*/*")):
        if folder.name.startswith("astuner") and folder.is_dir():
            yield from folder.rglob("*.py")


def test_every_load_says_whether_code_may_run() -> None:
    """A call of a loader outside of `load_pretrained` passes ``trust_remote_code``; none unpickles."""
    wrong = []
    for file in _packages():
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            owner = ast.unparse(call.func.value)
            given = {keyword.arg or ast.unparse(keyword.value) for keyword in call.keywords}
            unsafe = call.func.attr in LOADERS or owner.startswith("AutoModel")
            allowed = given & {"trust_remote_code"} or owner == "PeftModel"  # peft runs none
            pickled = ast.unparse(call.func) in PICKLES and "weights_only" not in given
            if (unsafe and not allowed) or pickled:
                wrong.append(f"{file.relative_to(ROOT)}:{call.lineno}")
    assert wrong == []
