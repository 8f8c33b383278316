"""Load configs, tokenizers and weights with transformers without running Python files of the model.

Without ``trust_remote_code``, transformers asks on stdin whether to run such files, so a "y" on a pipe would be enough.
All loading in ASTuner therefore uses `load_pretrained`, which always passes the argument.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from astuner.contracts.errors import ConfigError

TRUST_KEY = "astuner.model.trust_remote_code"
_CONFIG_FILES = (
    "config.json",
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "generation_config.json",
)
"""Files of a model that can name Python files to run."""


def load_pretrained(kind: Any, source: str | Path, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """Return ``kind.from_pretrained(source, **options)``; code of the model runs only with ``trust_remote_code``.

    :param kind: Class of transformers, for example ``AutoTokenizer``.
    :param source: Folder, or name on the hub.
    :raises ConfigError: The model can be loaded only by running its own code.
    """
    try:
        return kind.from_pretrained(str(source), trust_remote_code=trust_remote_code, **options)
    except ValueError as e:
        if trust_remote_code or "trust_remote_code" not in str(e):
            raise
        raise ConfigError(_refusal(str(source), options.get("revision"))) from e


def _refusal(source: str, revision: str | None) -> str:
    file, entry = _custom_code(source, revision)
    return (
        f"{file}: loading this model would run its own Python code ({entry}), which ASTuner does not do by default. "
        f"Use a model that transformers supports without such code, or read the code and set {TRUST_KEY}: true in "
        "the experiment file"
    )


def _custom_code(source: str, revision: str | None) -> tuple[str, str]:
    """Return the file of a model that refers to custom code, and the entry in it."""
    for name in _CONFIG_FILES:
        file = _local_file(source, name, revision)
        try:
            content = json.loads(file.read_text(encoding="utf-8")) if file else {}
        except (OSError, ValueError):
            continue
        if auto_map := content.get("auto_map"):
            entries = auto_map.items() if isinstance(auto_map, dict) else [("AutoTokenizer", auto_map)]
            return f"{source}/{name}", ", ".join(f"auto_map.{key}: {value}" for key, value in entries)
    return source, "trust_remote_code"


def _local_file(source: str, name: str, revision: str | None) -> Path | None:
    if Path(source).is_dir():
        return Path(source) / name
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(source, name, revision=revision)
    return Path(cached) if isinstance(cached, str) else None
