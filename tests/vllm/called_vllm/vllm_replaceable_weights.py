"""On a CPU vLLM turns a layer's weights into a form of its own and drops them; a trainer wants to replace them."""


def register() -> None:
    """vLLM calls it in each of its processes, unless VLLM_PLUGINS says otherwise."""
    import torch
    import vllm.model_executor.layers.utils as layers

    def as_they_are(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]

    layers.dispatch_cpu_unquantized_gemm = as_they_are
