"""Changes that let Trinity 0.6.0 and verl 0.8.0 run on a CPU, applied in every process of a run.

`setup` is Ray's ``worker_process_setup_hook``, and the driver calls it before it imports Trinity.  It imports nothing
heavy: each change is applied right after its module is imported.  No file is written.  The changes match only these two
versions, so others are refused.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

import wrapt

VERSIONS = {"trinity-rft": "0.6.0", "verl": "0.8.0"}
"""Versions that the changes were written for."""
Change = Callable[[Any], None]
_changes: dict[str, Change] = {}
"""Module -> change to apply after its import."""
_ENGINE = "trinity.common.models.vllm_model"
_VLLM = {
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


@functools.cache
def setup() -> None:
    """Prepare this process to run Trinity on a CPU; further calls do nothing.

    :raises RuntimeError: Another version of Trinity or verl is installed.
    """
    _check_versions()
    _stand_in_for_vllm()
    sys.modules[_ENGINE] = _engine_module()
    for name, change in _changes.items():
        wrapt.register_post_import_hook(change, name)


def _check_versions() -> None:
    for name, wanted in VERSIONS.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "not installed"
        if found != wanted:
            raise RuntimeError(
                f"TRINITY_PLATFORM=cpu needs {name} {wanted}, but found {found}: astuner-trinity-cpu changes "
                f"version-specific code. Run: pip install {name}=={wanted}"
            )


def _engine_module() -> types.ModuleType:
    """Return a module for Trinity's allocator, which takes the engine class for "vllm" from this module name."""
    module = types.ModuleType(_ENGINE, "The CPU engine, where Trinity expects vLLM's.")

    def load(name: str) -> Any:
        if name != "vLLMRolloutModel":
            raise AttributeError(f"{_ENGINE} is the CPU engine's module, without {name}")
        from astuner_trinity_cpu.rollout_model import CpuRolloutModel

        return CpuRolloutModel

    vars(module)["__getattr__"] = load
    return module


def _stand_in_for_vllm() -> None:
    """Make ``import vllm`` work in this process, because Trinity imports it regardless of its engine.

    `trinity.common.models.mm_utils` imports five names from three modules for images and audio in messages.  The
    modules exist only in memory; no file named ``vllm`` is created for other programs to find.
    """
    if "vllm" in sys.modules or importlib.util.find_spec("vllm") is not None:
        return
    for name, members in _VLLM.items():
        module = types.ModuleType(name, _stand_in_for_vllm.__doc__)
        module.__spec__ = ModuleSpec(name, loader=None, is_package=True)  # find_spec("vllm") raises without one
        module.__path__ = []  # a package, so that missing submodules raise the usual error
        for member in members:
            setattr(module, member, _absent(f"{name}.{member}"))
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def _absent(name: str) -> type:
    """Return a class that cannot be instantiated, because some of the names are used as types."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError(
            f"{name} was called, but vLLM is not installed: on a CPU, Trinity supports text only; "
            "for images, install vLLM on a machine with GPUs"
        )

    return type(name.rpartition(".")[2], (), {"__new__": refuse})


def _once_imported(name: str) -> Callable[[Change], Change]:
    def register(change: Change) -> Change:
        _changes[name] = change
        return change

    return register


@_once_imported("verl.utils.device")
def _use_the_cpu_as_a_device(module: Any) -> None:
    """Provide functions of torch.cuda that torch.cpu lacks, and a device where verl treats an index as a GPU."""
    from astuner_cpu import device

    module.get_torch_device = lambda: device.module
    module.get_device_id = device.current_device


@_once_imported("verl.utils.distributed")
def _name_the_cpu_once(module: Any) -> None:
    from astuner_cpu import device

    device.name_once(module)


@_once_imported("verl.workers.engine.fsdp.transformer_impl")
def _register_the_fsdp_engine(_: Any) -> None:
    """Register an engine for the CPU; verl registers its engine for GPUs only."""
    importlib.import_module("astuner_trinity_cpu.fsdp_engine")


@_once_imported("verl.utils.attention_utils")
def _pad_without_flash_attention(module: Any) -> None:
    """Pad with verl's plain torch functions for NPUs instead of flash-attn's."""

    def functions() -> tuple[Callable[..., Any], ...]:
        from einops import rearrange
        from verl.utils.npu_flash_attn_utils import index_first_axis, pad_input, unpad_input

        return index_first_axis, pad_input, rearrange, unpad_input

    module._get_attention_functions = functions


@_once_imported("trinity.trainer.verl.monkey_patch")
def _have_no_cuda_capability(module: Any) -> None:
    """Report capability 0: Trinity queries GPU 0 while building a model, and builds it elsewhere from 9 on."""
    if not module.torch.cuda.is_available():
        module.torch.cuda.get_device_capability = lambda *_: (0, 0)
