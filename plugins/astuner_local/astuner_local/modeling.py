"""One model for engine and trainer: a transformers causal LM, read as plain tensors.

The families below share one block (RMSNorm, rotary attention with grouped keys, SwiGLU), so one functional forward
serves all of them.  Invariant: `hidden_states` and the engine compute the same function as the model's own ``forward``;
`check_supported` refuses configs for which this is not the case.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from astuner import ModelSection
from astuner.contracts.errors import ConfigError, RunError
from astuner_local.plugin import SHIPPED
from astuner_local.speed import fastest_dtype
from astuner_models.hub import is_folder_name, require_model
from astuner_models.pretrained import load_pretrained
from astuner_models.serving import end_token_ids
from astuner_objectives.manifest import require_whole

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type` of the supported architectures."""

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles depend only on the position. `dynamic` and `longrope` depend on the length of the
sequence, so a cached key would be wrong after the sequence has grown."""

SMALL_MODEL = 20_000_000
"""Number of weights below which a second CPU thread, another weight layout, or a narrower type costs more than it
saves."""

AttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [T, H, D], k [T, KV, D], v [T, KV, D] of flat, rotated tokens -> [T, H * D]. Scales by 1 / sqrt(D)."""


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """Sizes of a supported architecture."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    eps: float
    """RMSNorm's epsilon."""
    context: int
    """Length of the model's context."""

    @classmethod
    def of(cls, config: Any) -> Dimensions:
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            mlp=config.intermediate_size,
            vocab=config.vocab_size,
            eps=config.rms_norm_eps,
            context=config.max_position_embeddings,
        )

    @property
    def linear(self) -> int:
        """Weights in the linear layers, by which every token is multiplied."""
        attention = 2 * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * self.hidden * (attention + 3 * self.mlp)

    @property
    def is_small(self) -> bool:
        """Whether its passes are bound by overhead instead of arithmetic."""
        return self.linear + self.vocab * self.hidden < SMALL_MODEL


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """Result of `load_model`."""

    model: Any
    """Transformers causal LM, in eval mode, on `device`."""
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    """End tokens of the tokenizer and of the generation config, which may differ (`<|im_end|>`, `<|endoftext|>`)."""


# --- supported architectures ------------------------------------------------------------------------------------


def check_supported(config: Any) -> None:
    """Raise `ConfigError` unless the functional forward is exact for this transformers config."""
    name = getattr(config, "_name_or_path", "") or "this model"
    if problems := [f"{name}: {problem}" for problem in _unsupported(config)]:
        raise ConfigError(problems)


def _unsupported(config: Any) -> Iterator[str]:
    remedy = f"set astuner.model.path to a model of one of {', '.join(FAMILIES)}, or use the trinity or verl backbone"
    if config.model_type not in FAMILIES:
        yield f"the local backbone cannot run the architecture '{config.model_type}'; {remedy}"
        return
    rope = config.rope_parameters or {}
    rope_type = rope.get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        yield (
            f"its rope type '{rope_type}' depends on the length of the sequence, which cached keys do not support "
            f"(supported: {', '.join(ROPE_TYPES)}); {remedy}"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield f"it rotates only part of each head (partial_rotary_factor); {remedy}"
    layer_types = getattr(config, "layer_types", None) or ()
    if "sliding_attention" in layer_types or (not layer_types and getattr(config, "sliding_window", None)):
        yield (
            f"it uses sliding-window attention (sliding_window: {config.sliding_window}); use a version without it, "
            f"or {remedy}"
        )
    if config.hidden_act != "silu":
        yield f"its activation is '{config.hidden_act}' instead of silu; {remedy}"
    if getattr(config, "quantization_config", None) is not None:
        yield "its weights are quantised and cannot be trained; use the original model"


# --- loading ----------------------------------------------------------------------------------------------------


def resolve_device(device: str) -> torch.device:
    """Return the device; ``auto`` selects a GPU if there is one. Raises `ConfigError` for a missing GPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    resolved = torch.device(device)
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"astuner.model.device is {device}, but torch {torch.__version__} finds {torch.cuda.device_count()} GPUs; "
            "set device: cpu, or install a torch build for your GPU"
        )
    return resolved


def resolve_dtype(dtype: str, device: torch.device, dims: Dimensions) -> torch.dtype:
    """Return the type; ``auto`` is bfloat16 on a GPU, and on a CPU for large models if measured to be faster."""
    if dtype == "auto":
        if device.type == "cuda":
            return torch.bfloat16
        return torch.float32 if dims.is_small else fastest_dtype()
    resolved: torch.dtype = getattr(torch, dtype)
    return resolved


def read_all_but_weights(model_config: ModelSection, *, path: str | None = None) -> tuple[Any, Any]:
    """Return the transformers config and the tokenizer of ``astuner.model``, checked for consistency.

    :raises ConfigError, RunError: See `load_model`.
    """
    from transformers import AutoConfig, AutoTokenizer

    source, options = _source(model_config, path)
    config = _read("config", source, lambda: load_pretrained(AutoConfig, source, **options))
    check_supported(config)
    tokenizer = _read("tokenizer", source, lambda: load_pretrained(AutoTokenizer, source, **options))
    _check_tokenizer(tokenizer, config, source)
    return config, tokenizer


def load_model(model_config: ModelSection, *, path: str | None = None) -> LoadedModel:
    """Load weights and tokenizer of ``astuner.model``, or of `path` if given.

    The tokenizer keeps its own chat template; the codec applies ``chat_template`` (`astuner_models.serving`).

    :raises ConfigError: The folder or name does not exist, lacks weights, or has an unsupported architecture.
    :raises RunError: The Hugging Face Hub does not answer.
    """
    from transformers import AutoModelForCausalLM

    source, options = _source(model_config, path)
    device = resolve_device(model_config.device)
    config, tokenizer = read_all_but_weights(model_config, path=path)
    dtype = resolve_dtype(model_config.dtype, device, Dimensions.of(config))
    model, info = _read(
        "weights",
        source,
        lambda: load_pretrained(
            AutoModelForCausalLM,
            source,
            config=config,
            dtype=dtype,
            attn_implementation="sdpa",
            output_loading_info=True,
            **options,
        ),
    )
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ConfigError(
            f"{source}: {len(missing)} weights are missing (first: {missing[0]}) and would be random. "
            "Download the model again, or set astuner.model.path to a complete model"
        )
    if broken := next((name for name, weight in model.named_parameters() if not _is_finite(weight)), None):
        raise ConfigError(
            f"{source}: the weight {broken} is not finite (NaN or infinite). Download the model again, or use an "
            "earlier checkpoint"
        )
    if not _is_tied_as_configured(model):
        raise ConfigError(
            f"{source}: config.json sets tie_word_embeddings, but the weights have a vocabulary head that differs from "
            "the embedding. Set it to false there, because other programs would load a different model"
        )
    model.to(device).eval()
    ends = {tokenizer.eos_token_id, *end_token_ids(tokenizer, model_config.revision)} - {None}
    return LoadedModel(model=model, tokenizer=tokenizer, device=device, dtype=dtype, eos_token_ids=tuple(sorted(ends)))


def _is_finite(weight: Tensor) -> bool:
    """Return whether all elements are finite; sums of finite weights do not overflow in float32."""
    return bool(weight.sum(dtype=torch.float32).isfinite())


def _is_tied_as_configured(model: Any) -> bool:
    if not model.config.tie_word_embeddings:
        return True
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    return head is embedding or torch.equal(head, embedding)


def _source(model_config: ModelSection, path: str | None) -> tuple[str, dict[str, Any]]:
    """Return the location of a model and the options for loading it.

    :raises ConfigError: The folder does not exist, or the name resembles a shipped model.
    :raises CheckpointError: It is a damaged checkpoint.
    """
    source = path or model_config.path
    if is_folder_name(source):
        folder = Path(source).expanduser()
        if not folder.is_dir():
            raise ConfigError(
                f"astuner.model.path is {source}, but there is no such folder ({folder.resolve()}); "
                "correct it, or use a Hugging Face name such as Qwen/Qwen2.5-0.5B-Instruct"
            )
        require_whole(folder.resolve())
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"astuner.model.path is {source}, but that folder has no config.json; use the folder with "
                "config.json, the *.safetensors files and the tokenizer"
            )
        source = str(folder)
    elif close := difflib.get_close_matches(source, SHIPPED, n=1, cutoff=0.8):
        raise ConfigError(
            f"astuner.model.path: no model is named {source}; did you mean {close[0]}? Models shipped with "
            f"astuner-local: {', '.join(SHIPPED)}"
        )
    else:
        require_model(source)
    options: dict[str, Any] = {"trust_remote_code": model_config.trust_remote_code}
    return source, options if model_config.revision is None else {**options, "revision": model_config.revision}


def _check_tokenizer(tokenizer: Any, config: Any, source: str) -> None:
    # If tokenizer files are missing, transformers creates a tokenizer with special tokens only.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ConfigError(
            f"cannot read the tokenizer of astuner.model.path {source}: its files are missing; copy tokenizer.json "
            "and tokenizer_config.json of the original model next to the weights"
        )
    if len(tokenizer) > config.vocab_size:
        raise ConfigError(
            f"astuner.model.path {source}: its tokenizer has {len(tokenizer)} tokens, but the model only "
            f"{config.vocab_size}; tokenizer and model do not match"
        )


def _read(what: str, source: str, read: Callable[[], Any]) -> Any:
    """Run ``from_pretrained`` and translate its errors; third-party files may contain anything.

    :raises RunError: The hub does not answer, or memory runs out.
    :raises ConfigError: The files cannot be read.
    """
    try:
        with no_progress_bar():
            return read()
    except ConfigError:
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise RunError(
            f"not enough memory to read the {what} of {source}; use a smaller model, or set astuner.model.dtype: "
            "bfloat16"
        ) from error
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        offline = any(word in reason for word in ("connect", "timed out", "offline", "Max retries"))
        if offline and not Path(source).is_dir():
            raise RunError(
                f"cannot download the {what} of {source} from the Hugging Face Hub: {reason}. Check the network (or "
                "set HF_ENDPOINT to a mirror), or set astuner.model.path to a local folder"
            ) from error
        if isinstance(error, UnpicklingError):
            raise ConfigError(
                f"cannot read the {what} of astuner.model.path {source}: its pickle file is damaged or contains more "
                "than weights, and pickles can run code. Use a version with *.safetensors files"
            ) from error
        raise ConfigError(
            f"cannot read the {what} of astuner.model.path {source}: {reason[:500]}. Use a folder created by "
            "save_pretrained (model and tokenizer), or a Hugging Face name such as Qwen/Qwen2.5-0.5B-Instruct "
            "(a private one needs HF_TOKEN)"
        ) from error


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Disable transformers' progress bars, which would disturb the run's own output."""
    from transformers.utils import logging

    bars: Any = logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


# --- reading a model --------------------------------------------------------------------------------------------


def causal_lm(model: Any) -> Any:
    """Return the transformers causal LM, unwrapped from peft (its linears then carry the adapters)."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def rope(model: Any, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sign-folded sin, each [T, D], for positions [T], from the model's own rotary module.

    "Sign-folded" means that the first half of sin is negated, so that `rotate` needs a roll instead of a split, a
    negation and a concatenation.
    """
    decoder = causal_lm(model).model
    like = decoder.embed_tokens.weight
    cos, sin = decoder.rotary_emb(like, position_ids[None])
    sin = sin[0].clone()
    sin[:, : sin.shape[-1] // 2].neg_()
    return cos[0], sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding (Su et al. 2021) to x [T, heads, D] with cos, sin [T, 1, D] from `rope`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def hidden_states(
    model: Any,
    input_ids: Tensor,
    position_ids: Tensor,
    attention_fn: AttentionFn,
    *,
    rows: Tensor | None = None,
    activation_checkpointing: bool = False,
) -> Tensor:
    """Return the final, normed hidden states [T, hidden] of flat tokens; logits are ``lm_head(model)(hidden)``.

    Tokens of all sequences are in one row without padding; only `attention_fn` knows the sequences.  Linears are called
    as modules, so adapters apply and gradients flow.  Attention dropout is never applied, because it would make trainer
    and engine differ.

    :param input_ids: [T] token IDs.
    :param position_ids: [T] position of each token in its own sequence.
    :param rows: Tokens whose states are returned, int64 [M], as [M, hidden]; None: all.
    :param activation_checkpointing: Keep one activation per layer and recompute the rest in the backward pass.
    """
    decoder = causal_lm(model).model
    dims = Dimensions.of(decoder.config)
    cos, sin = (table[:, None] for table in rope(model, position_ids))
    x: Tensor = decoder.embed_tokens(input_ids)
    for layer in decoder.layers:
        wanted = rows if layer is decoder.layers[-1] else None
        if activation_checkpointing and torch.is_grad_enabled():
            x = checkpoint(_block, layer, x, cos, sin, attention_fn, dims, wanted, use_reentrant=False)
        else:
            x = _block(layer, x, cos, sin, attention_fn, dims, wanted)
    return _rms_norm(decoder.norm, x, dims.eps)


def lm_head(model: Any) -> nn.Module:
    """Return the linear from hidden states to logits; its weight may be the embedding's (tied)."""
    head: nn.Module = causal_lm(model).lm_head
    return head


def _block(
    layer: Any, x: Tensor, cos: Tensor, sin: Tensor, attention_fn: AttentionFn, dims: Dimensions, wanted: Tensor | None
) -> Tensor:
    attention, mlp, tokens = layer.self_attn, layer.mlp, x.shape[0]
    h = _rms_norm(layer.input_layernorm, x, dims.eps)
    q = attention.q_proj(h).view(tokens, dims.heads, dims.head_dim)
    k = attention.k_proj(h).view(tokens, dims.kv_heads, dims.head_dim)
    v = attention.v_proj(h).view(tokens, dims.kv_heads, dims.head_dim)
    if hasattr(attention, "q_norm"):  # qwen3
        q = _rms_norm(attention.q_norm, q, dims.eps)
        k = _rms_norm(attention.k_norm, k, dims.eps)
    attended = attention_fn(rotate(q, cos, sin), rotate(k, cos, sin), v)
    if wanted is not None:
        x, attended = x.index_select(0, wanted), attended.index_select(0, wanted)
    x = x + attention.o_proj(attended)
    h = _rms_norm(layer.post_attention_layernorm, x, dims.eps)
    out: Tensor = x + mlp.down_proj(F.silu(mlp.gate_proj(h)) * mlp.up_proj(h))
    return out


def _rms_norm(norm: nn.Module, x: Tensor, eps: float) -> Tensor:
    # One fused operation instead of six in the module's forward, which would dominate a tiny model's step.
    return F.rms_norm(x, (x.shape[-1],), norm.weight, eps)  # type: ignore[arg-type]
