"""The model's weights for the engine: q, k, v fused into one matrix, gate and up into another.

One large product is faster than three small ones.  If all weights are trained, the model's own parameters become views
of the fused matrices: an in-place optimizer step (or ``load_state_dict``) changes both, without copies.  If peft has
wrapped a linear, the fused matrix holds base + adapters and is recomputed at every update, because the base itself must
not change.  That is a second copy of the model; if several models share their base, the fused matrix is therefore the
base's (a view again), and the adapters stay separate as two thin matrices.

On a CPU, large models are multiplied through a copy in another layout, created at every update: this takes as long as a
few products and speeds up every decode step.

Invariant: after `refresh`, every fused matrix, plus its adapter if it has one, equals the model's current weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from astuner_local.modeling import Dimensions, causal_lm, check_supported

_ROWS = 32
"""Number of rows for which oneDNN selects its blocks; they work for any number."""
_WIDE = 4
"""Least ratio of outputs to inputs of a wide matrix."""


@dataclass(frozen=True)
class Adapter:
    """Low-rank addition to a matrix [out, in]: up @ down."""

    down: Tensor
    """[rank, in]; the ranks of fused linears are concatenated."""
    up: Tensor
    """[out, rank], scaled; block-diagonal for fused linears."""

    def add_to(self, y: Tensor, x: Tensor) -> Tensor:
        """Return y [T, out] plus the adapter's output for x [T, in]; computed in the adapter's dtype, rounded once."""
        low = F.linear(x.to(self.down.dtype), self.down)
        return torch.addmm(y.to(low.dtype), low, self.up.t()).to(y.dtype)


@dataclass(frozen=True)
class Matrix:
    """A linear layer, or several with the same input, as one product [out, in]."""

    weight: Tensor
    bias: Tensor | None
    adapter: Adapter | None

    def of(self, x: Tensor) -> Tensor:
        """Return [T, out] for x [T, in]."""
        y = F.linear(x, self.weight, self.bias)
        return y if self.adapter is None else self.adapter.add_to(y, x)

    def add_to(self, y: Tensor, x: Tensor) -> Tensor:
        """Return y [T, out] plus the product, in one operation."""
        y = torch.addmm(y, x, self.weight.t())
        if self.bias is not None:
            y = y + self.bias
        return y if self.adapter is None else self.adapter.add_to(y, x)


@dataclass(frozen=True)
class BlockedMatrix(Matrix):
    """Matrix with its weight in oneDNN's blocks, which only oneDNN reads."""

    def of(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y if self.adapter is None else self.adapter.add_to(y, x)

    def add_to(self, y: Tensor, x: Tensor) -> Tensor:
        y = torch.ops.mkldnn._linear_pointwise.binary(x, y, self.weight, self.bias, "add")
        return y if self.adapter is None else self.adapter.add_to(y, x)


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """Weights of one block."""

    input_norm: Tensor
    qkv: Matrix
    qk_norm: Tensor | None
    """[heads + kv_heads, head_dim]: head norms of q and k, repeated per head; None without head norms."""
    o: Matrix
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix


class FusedWeights:
    """Weights of a supported causal LM (wrapped by peft or not).

    :param merge_adapters: False keeps adapters separate from the base's matrices: less memory, slightly more work per
        token.
    :param packs: Multiply with a copy of the matrices in the layout that the CPU reads fastest (`_pack`); None: if the
        model is large and does not share its base.
    """

    def __init__(self, model: Any, *, merge_adapters: bool = True, packs: bool | None = None) -> None:
        base = causal_lm(model)
        check_supported(base.config)
        self.model = model
        self.merges = merge_adapters
        self.dimensions = Dimensions.of(base.config)
        self.packs = packs_weights(self.dimensions, self.device, merge_adapters) if packs is None else packs
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Follow the model: cheap if parameters are views, a merge with adapters, otherwise a new fusion."""
        base = causal_lm(self.model)
        decoder = base.model
        self.layers: list[LayerWeights] = []  # free old copies before creating new ones
        self.layers = [_read_layer(layer, self.dimensions, self.merges, self.packs) for layer in decoder.layers]
        self.embedding = merged_weight(decoder.embed_tokens)
        self.norm = decoder.norm.weight.detach()
        head = Matrix(merged_weight(base.lm_head), None, None)
        self.head = _pack(head) if self.packs else head

    @property
    def device(self) -> torch.device:
        device: torch.device = causal_lm(self.model).model.norm.weight.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype


def packs_weights(dimensions: Dimensions, device: torch.device, merges_adapters: bool) -> bool:
    """Return whether an engine uses its own copy: on a CPU, for large models that do not share their base."""
    return device.type == "cpu" and merges_adapters and not dimensions.is_small


def _read_layer(layer: Any, dimensions: Dimensions, merges: bool, packs: bool) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp

    def fuse(*linears: Any) -> Matrix:
        fused = _fuse(linears, merges)
        return _pack(fused) if packs else fused

    return LayerWeights(
        input_norm=layer.input_layernorm.weight.detach(),
        qkv=fuse(attention.q_proj, attention.k_proj, attention.v_proj),
        qk_norm=_head_norms(attention, dimensions) if hasattr(attention, "q_norm") else None,
        o=fuse(attention.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=fuse(mlp.gate_proj, mlp.up_proj),
        down=fuse(mlp.down_proj),
    )


def _pack(matrix: Matrix) -> Matrix:
    """Return a copy in another layout: in oneDNN's blocks, or transposed if that is faster in float32.

    Products of few rows with a matrix in torch's layout, [out, in], read it in an inefficient order.  On Sapphire
    Rapids, all products of SmolLM2-135M took 102 ms for 8 rows in float32, 115 for 32 and 161 for 64; transposed 73, 98
    and 123; in blocks 55, 97 and 149; with wide matrices in blocks and the others transposed 59, 90 and 129.
    """
    has_blocks: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    rows, columns = matrix.weight.shape
    if has_blocks and (matrix.weight.dtype is torch.bfloat16 or rows >= _WIDE * columns):
        blocks = torch.ops.mkldnn._reorder_linear_weight(matrix.weight.contiguous(), _ROWS)
        return BlockedMatrix(blocks, matrix.bias, matrix.adapter)
    return Matrix(matrix.weight.t().contiguous().t(), matrix.bias, matrix.adapter)


def _head_norms(attention: Any, dimensions: Dimensions) -> Tensor:
    q, k = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
    return torch.cat([q.expand(dimensions.heads, -1), k.expand(dimensions.kv_heads, -1)])


def _fuse(linears: Sequence[Any], merges: bool) -> Matrix:
    plain = [_plain(linear) for linear in linears]
    biases = [linear.bias for linear in plain if linear.bias is not None]  # all of them have one, or none
    if merges and any(_is_adapted(linear) for linear in linears):
        weight = torch.cat([merged_weight(linear) for linear in linears])
        return Matrix(weight, torch.cat([bias.detach() for bias in biases]) if biases else None, None)
    weight = _fuse_parameters([linear.weight for linear in plain])
    return Matrix(weight, _fuse_parameters(biases) if biases else None, None if merges else _adapter(linears))


def _adapter(linears: Sequence[Any]) -> Adapter | None:
    """Return the adapters of fused linears as one; None if there are none."""
    parts = [
        (row, linear.lora_A[name].weight.detach(), linear.lora_B[name].weight.detach() * linear.scaling[name])
        for row, linear in enumerate(linears)
        if _is_adapted(linear) and not linear.merged
        for name in linear.active_adapters
        if name in linear.lora_A
    ]
    if not parts:
        return None
    rows = [
        torch.cat(
            [up if row == i else up.new_zeros(_plain(linear).weight.shape[0], up.shape[1]) for i, _, up in parts], 1
        )
        for row, linear in enumerate(linears)
    ]
    return Adapter(torch.cat([down for _, down, _ in parts]), torch.cat(rows))


def _fuse_parameters(parameters: Sequence[Tensor]) -> Tensor:
    """Return one tensor whose rows are the parameters' rows; move them unless they are already adjacent.

    They lose adjacency if their storage is replaced: ``model.to(...)``, ``load_state_dict(assign=True)``.
    """
    first = parameters[0].detach()
    rows = sum(parameter.shape[0] for parameter in parameters)
    if _are_adjacent(parameters):
        return first.as_strided((rows, *first.shape[1:]), first.stride())
    fused = torch.cat([parameter.detach() for parameter in parameters])
    start = 0
    for parameter in parameters:
        end = start + parameter.shape[0]
        parameter.data = fused[start:end]
        start = end
    return fused


def _are_adjacent(parameters: Sequence[Tensor]) -> bool:
    first = parameters[0]
    storage, offset = first.untyped_storage().data_ptr(), first.storage_offset()
    for parameter in parameters:
        if parameter.untyped_storage().data_ptr() != storage or parameter.storage_offset() != offset:
            return False
        offset += parameter.numel()
    return all(parameter.is_contiguous() and parameter.dtype == first.dtype for parameter in parameters)


def _is_adapted(module: Any) -> bool:
    return hasattr(module, "base_layer")


def _plain(module: Any) -> Any:
    """Return the linear without adapters."""
    return module.base_layer if _is_adapted(module) else module


def merged_weight(module: Any) -> Tensor:
    """Return the effective weight: adapters (peft's LoRA layers) merged into a copy, anything else unchanged."""
    if not _is_adapted(module):
        plain: Tensor = module.weight.detach()
        return plain
    base: Tensor = module.base_layer.weight.detach()
    if module.merged:
        return base
    merged = base.float()  # rounded once, at the end
    for adapter in module.active_adapters:
        if adapter in module.lora_A or adapter in module.lora_embedding_A:
            merged = merged + module.get_delta_weight(adapter).float()
    return merged.to(base.dtype)
