"""A ``vllm`` that can be imported where vLLM is not installed: Trinity 0.6.0 imports it whatever its engine is.

`trinity.common.models.mm_utils` needs five names of three modules when it is imported, for pictures and sounds in
messages.  They are modules made here, in this process; nothing named ``vllm`` is on the disk for others to find.  Where
vLLM is installed nothing is put in its place.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

_NAMES = {
    "vllm": (),
    "vllm.config": ("ModelConfig",),
    "vllm.entrypoints": (),
    "vllm.entrypoints.chat_utils": (
        "ChatTemplateContentFormat",
        "ConversationMessage",
        "parse_chat_messages",
        "parse_chat_messages_async",
    ),
    "vllm.inputs": ("MultiModalDataDict",),
}


def install() -> None:
    """Make ``import vllm`` work in this process, if it does not yet."""
    if "vllm" in sys.modules or importlib.util.find_spec("vllm") is not None:
        return
    for name, members in _NAMES.items():
        module = types.ModuleType(name, __doc__)
        module.__spec__ = ModuleSpec(name, loader=None, is_package=True)  # find_spec("vllm") raises without one
        module.__path__ = []  # a package, so that what is missing below it is said to be missing
        for member in members:
            setattr(module, member, _absent(f"{name}.{member}"))
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def _absent(name: str) -> type:
    """A class, since some of the names are used as types, that refuses to be made."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError(
            f"{name} was called, and vLLM is not installed: Trinity runs on a CPU here, for text only; "
            "install vLLM where there are GPUs and pictures"
        )

    return type(name.rpartition(".")[2], (), {"__new__": refuse})
