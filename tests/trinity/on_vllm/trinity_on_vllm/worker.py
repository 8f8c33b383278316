"""vLLM's worker on a CPU, with what Trinity's has beside vLLM's."""

from __future__ import annotations

from safetensors.torch import load_file
from vllm.v1.worker.cpu_worker import CPUWorker


class TrinityCpuWorker(CPUWorker):  # type: ignore[misc]
    """In a process of vLLM's own, which neither Ray nor ASTuner set up."""

    def apply_patches(self) -> None:
        """None: Trinity's are for prompts' log-probabilities and for mixtures of experts."""

    def load_from(self, file: str) -> None:
        """Replace the weights."""
        self.reload_weights(weights_iterator=iter(load_file(file).items()))
