"""The tokenizers of a run, beside its tokens: whoever looks at the log turns ids into text, and needs no model for it.

``tokenizer/tokenizer.json`` is what the `tokenizers` library reads; where policies have different ones, each has a
folder of its name there.  They are written once, when the models are at hand: the folder is whole, or not there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_FOLDER = "tokenizer"
_FILE = "tokenizer.json"


def keep_tokenizers(folder: Path, load: Mapping[str, Callable[[], Any]]) -> None:
    """Write the tokenizers of every policy, unless that was done before.

    One without a fast version, which alone can be a ``tokenizer.json``, is left out.

    :param folder: ``episodes/`` of the run folder; nobody else may be writing it.
    :param load: policy -> its Hugging Face tokenizer; asked for only where it is needed.
    """
    if (folder / _FOLDER).exists():
        return
    fast = {policy: getattr(make(), "backend_tokenizer", None) for policy, make in load.items()}
    texts = {policy: str(tokenizer.to_str()) for policy, tokenizer in fast.items() if tokenizer is not None}
    if not texts:
        return
    for left_behind in folder.glob(f".{_FOLDER}.*.tmp"):
        shutil.rmtree(left_behind)
    temporary = folder / f".{_FOLDER}.{os.getpid()}.tmp"
    one_for_all = len(texts) == len(load) and len(set(texts.values())) == 1
    for policy, text in texts.items():
        home = temporary if one_for_all else temporary / policy
        home.mkdir(parents=True, exist_ok=True)
        (home / _FILE).write_text(text, encoding="utf-8")
    temporary.rename(folder / _FOLDER)


def tokenizer_file(folder: Path, policy: str) -> Path | None:
    """What `keep_tokenizers` wrote of a policy; None where it has nothing, or the run is an older ASTuner's.

    A policy's name is looked up, and never made part of a path.
    """
    of_policies = {file.parent.name: file for file in (folder / _FOLDER).glob(f"*/{_FILE}")}
    file = of_policies.get(policy, folder / _FOLDER / _FILE)
    return file if file.is_file() else None
