"""Everything that has to be other for Trinity 0.6.0 and verl 0.8.0 to run on a CPU, in every process of a run.

`setup` is Ray's ``worker_process_setup_hook``, and the driver calls it before it imports anything of Trinity's.  It
imports nothing heavy: each change is made right after the module that it concerns has been imported, by whoever imports
it.  Nothing is written to the disk.  The changes fit these two versions only, so others are refused.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from astuner_trinity_cpu import vllm_standin

VERSIONS = {"trinity-rft": "0.6.0", "verl": "0.8.0"}
"""What the changes were written for."""
Change = Callable[[Any], None]
_changes: dict[str, Change] = {}
"""Module -> what is done to it once it is imported."""
_ENGINE = "trinity.common.models.vllm_model"


def setup() -> None:
    """Make this process ready to run Trinity on a CPU; a second call does nothing.

    :raises RuntimeError: another version of Trinity or verl is installed.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    _check_versions()
    vllm_standin.install()
    sys.modules[_ENGINE] = _engine_module()
    sys.meta_path.insert(0, _Finder())
    for name in _changes.keys() & sys.modules.keys():
        _changes[name](sys.modules[name])


def _check_versions() -> None:
    for name, wanted in VERSIONS.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "not installed"
        if found != wanted:
            raise RuntimeError(
                f"TRINITY_PLATFORM=cpu needs {name} {wanted}, and it is {found} here: astuner-trinity-cpu changes "
                f"parts of it that differ between versions; type: pip install {name}=={wanted}"
            )


def _engine_module() -> types.ModuleType:
    """Trinity's allocator has no registry of engines: for the type "vllm" it takes a class from this module."""
    module = types.ModuleType(_ENGINE, "The CPU engine, where Trinity expects vLLM's.")

    def load(name: str) -> Any:
        if name != "vLLMRolloutModel":
            raise AttributeError(f"{_ENGINE} is the CPU engine's, which has no {name}")
        from astuner_trinity_cpu.rollout_model import CpuRolloutModel

        return CpuRolloutModel

    vars(module)["__getattr__"] = load
    return module


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that are changed, where Python would find them, and changes them when they are loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                _changes[fullname](module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this one loader
        return spec


def _once_imported(name: str) -> Callable[[Change], Change]:
    def register(change: Change) -> Change:
        _changes[name] = change
        return change

    return register


@_once_imported("verl.utils.device")
def _use_the_cpu_as_a_device(module: Any) -> None:
    """verl calls functions of torch.cuda that torch.cpu has not; and it takes an index of a device for a GPU's."""
    from astuner_cpu import device

    module.get_torch_device = lambda: device.module
    module.get_device_id = device.current_device


@_once_imported("verl.utils.distributed")
def _name_the_cpu_once(module: Any) -> None:
    """``cpu:gloo,cpu:nccl``, which verl would ask torch for, is an error there."""
    original = module.initialize_global_process_group_ray

    @functools.wraps(original)
    def initialize(timeout_second: float | None = None, backend: str | None = None) -> Any:
        return original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    module.initialize_global_process_group_ray = initialize


@_once_imported("verl.workers.engine.fsdp.transformer_impl")
def _register_the_fsdp_engine(_: Any) -> None:
    """verl registers its engine for GPUs only."""
    importlib.import_module("astuner_trinity_cpu.fsdp_engine")


@_once_imported("verl.utils.attention_utils")
def _pad_without_flash_attention(module: Any) -> None:
    """verl packs sequences with flash-attn's functions; it has its own for NPUs, which are plain torch."""

    def functions() -> tuple[Callable[..., Any], ...]:
        from einops import rearrange
        from verl.utils.npu_flash_attn_utils import index_first_axis, pad_input, unpad_input

        return index_first_axis, pad_input, rearrange, unpad_input

    module._get_attention_functions = functions


@_once_imported("trinity.trainer.verl.monkey_patch")
def _have_no_cuda_capability(module: Any) -> None:
    """Trinity asks GPU 0 for its capability while it builds the model; from 9 on it builds it elsewhere."""
    if not module.torch.cuda.is_available():
        module.torch.cuda.get_device_capability = lambda *_: (0, 0)
