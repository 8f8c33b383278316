"""A model's tokenizer, without its weights."""

from __future__ import annotations

from typing import Any

from astuner import require_model
from astuner.contracts.errors import ConfigError, MissingDependency


def read_tokenizer(path: str, revision: str | None = None) -> Any:
    """The Hugging Face tokenizer in a folder, or of a name on the hub.

    :raises MissingDependency: transformers is not installed.
    :raises ConfigError: there is no such tokenizer.
    :raises RunError: it is not on this machine, and the hub does not answer.
    """
    require_model(path)
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise MissingDependency(
            "the check reads the model's tokenizer and chat template with transformers: pip install transformers jinja2"
        ) from None
    options = {} if revision is None else {"revision": revision}
    try:
        return AutoTokenizer.from_pretrained(path, **options)
    except (OSError, ValueError) as e:
        story = " ".join(str(e).split())
        raise ConfigError(
            f"the tokenizer of {path} cannot be read: {story[:300]}; name a folder with tokenizer.json, or a name on "
            "the Hugging Face hub"
        ) from e
