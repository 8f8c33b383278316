"""Store the tokenizers of a run next to its log, so that readers can decode token IDs without the model.

``tokenizer/tokenizer.json`` is in the format of the `tokenizers` library. If policies have different tokenizers, each
has a subfolder with its name. They are written once, when the models are loaded; the folder is complete or absent.
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
    """Write the tokenizers of all policies, unless they exist.

    Slow tokenizers, which have no ``tokenizer.json``, are skipped.

    :param folder: ``episodes/`` of the run folder. No other process may write to it.
    :param load: Policy -> function that returns its Hugging Face tokenizer, called only if needed.
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
    """Return the tokenizer file of a policy, or None if `keep_tokenizers` wrote none.

    The policy name is matched against existing folders and is never used as a path.
    """
    of_policies = {file.parent.name: file for file in (folder / _FOLDER).glob(f"*/{_FILE}")}
    file = of_policies.get(policy, folder / _FOLDER / _FILE)
    return file if file.is_file() else None
