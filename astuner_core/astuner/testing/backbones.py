"""`check_backbone`: does a backbone keep to the contract of `astuner.Backbone`, training aside?

Training is checked end to end by the backbone's own tests; what every backbone must get right is here: the
capability contract, the plan, and an engine that returns exactly the tokens it produced.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

from astuner.contracts.backbone import Capabilities, InferenceEngine, Served
from astuner.contracts.errors import ContextOverflow
from astuner.contracts.types import FinishReason, Generation, SamplingParams

AT_ONCE = 6


def check_backbone(backbone_cls: Any, config: Any, *, max_tokens: int = 8) -> None:
    """Check one backbone with a config whose model it can load.

    - ``capabilities`` names keys that exist, and refuses none that it honours;
    - ``plan`` gives lines of text without loading weights;
    - ``serve`` yields an engine and a tokenizer with a chat template, twice in a row;
    - a generation holds the prompt as given, one finite log-probability per token, at most ``max_tokens`` tokens, and
      a finish reason that agrees with them; greedy decoding repeats, alone and beside other calls;
    - a prompt without room raises `ContextOverflow`; a cancelled call leaves the engine usable.
    """
    name = backbone_cls.__name__
    check_capabilities(name, backbone_cls.capabilities)
    backbone = backbone_cls(config)
    plan = backbone.plan()
    assert isinstance(plan, Mapping), f"{name}.plan returned {plan!r}; return a mapping of label -> text"
    assert all(isinstance(k, str) and isinstance(v, str) for k, v in plan.items()), f"{name}.plan must map text to text"
    for _ in range(2):
        with backbone.serve() as served:
            assert isinstance(served, Served), (
                f"{name}.serve yielded {served!r}; yield Served(engine=…, tokenizer=…, name=…)"
            )
            assert isinstance(served.engine, InferenceEngine), f"{name}: the engine must be an InferenceEngine"
            assert served.tokenizer.chat_template, f"{name}: the tokenizer has no chat template"
            asyncio.run(_check_engine(name, served, max_tokens))


def check_capabilities(name: str, capabilities: Any) -> None:
    """The capability contract alone: it can be asked without a model."""
    from astuner.config.schema import Astuner

    assert isinstance(capabilities, Capabilities), f"{name}.capabilities must be a Capabilities"
    keys = {*capabilities.honours, *capabilities.only, *capabilities.instead}
    unknown = sorted(k for k in keys if not _is_key(Astuner, k.split(".")))
    assert not unknown, (
        f"{name}.capabilities names astuner.{unknown[0]}, which is not a key; leave out the leading 'astuner.'"
    )
    both = sorted(set(capabilities.honours) & set(capabilities.instead))
    assert not both, f"{name}.capabilities both honours and refuses {', '.join(both)}"


def _is_key(section: Any, path: Sequence[str]) -> bool:
    for key in path:
        fields = getattr(section, "model_fields", {})
        if key not in fields:
            return False
        section = fields[key].annotation
    return True


async def _check_engine(name: str, served: Served, max_tokens: int) -> None:
    engine, tokenizer = served.engine, served.tokenizer
    ids = tokenizer.encode("What is 2 + 2?", add_special_tokens=False)
    greedy = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    first = await engine.generate(ids, greedy, session="check/0")
    _check_generation(name, first, ids, max_tokens)
    again = await engine.generate(ids, greedy, session="check/1")
    assert list(again.response_ids) == list(first.response_ids), f"{name}: greedy decoding gave two different answers"
    prompts = [ids[: 1 + i % len(ids)] for i in range(AT_ONCE)]
    together = await asyncio.gather(*(engine.generate(p, greedy, session=f"check/b{i}") for i, p in enumerate(prompts)))
    for prompt, generation in zip(prompts, together, strict=True):
        _check_generation(name, generation, prompt, max_tokens)
    end = first.response_ids[0]
    stopped = await engine.generate(
        ids, SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=(end,)), session="check/s"
    )
    got = (list(stopped.response_ids), stopped.finish_reason)
    assert got == ([end], FinishReason.STOP), (
        f"{name}: with the stop token {end} the answer is {got[0]} ({stopped.finish_reason.value}); "
        "stop at it and keep it"
    )
    await _check_overflow(name, engine, ids)
    call = asyncio.ensure_future(engine.generate(ids, SamplingParams(max_tokens=max_tokens), session="check/c"))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait({call})
    after = await engine.generate(ids, greedy, session="check/d")
    assert list(after.response_ids) == list(first.response_ids), f"{name}: answers differ after a cancelled call"


async def _check_overflow(name: str, engine: InferenceEngine, ids: Sequence[int]) -> None:
    try:
        await engine.generate(list(ids[:1]) * engine.max_model_len, SamplingParams(max_tokens=1), session="check/o")
    except ContextOverflow:
        return
    raise AssertionError(f"{name}: a prompt as long as max_model_len leaves no room; raise ContextOverflow")


def _check_generation(name: str, generation: Any, prompt: Sequence[int], max_tokens: int) -> None:
    assert isinstance(generation, Generation), f"{name}: generate returned {generation!r}"
    assert list(generation.prompt_ids) == list(prompt), f"{name}: prompt_ids are not the ones that were asked for"
    n = len(generation.response_ids)
    assert 1 <= n <= max_tokens, f"{name}: {n} response tokens, but max_tokens is {max_tokens}"
    for value in generation.logprobs:
        assert -math.inf < value <= 1e-6, f"{name}: {value} is not a log-probability"
    if generation.finish_reason is FinishReason.LENGTH:
        assert n == max_tokens, f"{name}: says it was cut off by length after {n} of {max_tokens} tokens"
