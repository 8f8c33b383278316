"""A recorded conversation, said again through the codec: would it have continued exactly?

The recorded replies are written as a model of the family would write them, their arguments spelled as recorded.  Their
tool calls get the codec's own ids, as in training, and the requests that mention them are told so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from astuner import make_codec
from astuner.chat.codec import ChatCodec
from astuner.config import Config
from astuner.contracts.errors import ConfigError, UnsupportedRequest
from astuner.contracts.types import DEFAULT_AGENT, Generation
from astuner.plugins.loader import PluginManager, load_plugins
from astuner_record.token_check.report import EpisodeFound, Report, VariantFound, facts_of, look_at
from astuner_record.token_check.scripted import LOGPROB, Ear, ListeningCodec
from astuner_record.token_check.tokenizers import read_tokenizer
from astuner_record.token_check.traces import Recorded, Recording, read_trace
from astuner_record.token_check.writing import write_message

OWN = "the tokenizer's own"


def check_trace(
    path: Path,
    *,
    model: str | None = None,
    config: Config | None = None,
    templates: Sequence[Path] = (),
    tools: Sequence[bool] = (),
    plugins: PluginManager | None = None,
) -> Report:
    """Replay every conversation in ``path``.

    :param model: whose tokenizer; a folder, a name on the hub, or one that a plugin locates.
    :param config: the experiment whose model and template it is, where ``model`` is not given.
    :param templates: Jinja files to try beside the model's own chat template.
    :param plugins: to locate ``model`` with; the installed ones by default.
    :param tools: with the recorded tools, without, or both; with by default.
    :raises DataError: a line cannot be read.
    :raises ConfigError: there is no such tokenizer, or its template is of no family that ASTuner reads.
    """
    recordings = read_trace(path)
    variants = []
    for template, with_tools in product([None, *templates], list(tools) or [True]):
        name = str(template) if template else OWN
        try:
            codec = _codec(model, config, template, with_tools, plugins)
        except ConfigError as e:
            if template is None:
                raise
            unusable = EpisodeFound(name="every conversation", ended="unusable", error=str(e))
            variants.append(VariantFound(template=name, tools=with_tools, episodes=(unusable,)))
            continue
        episodes = tuple(replay(codec, recording) for recording in recordings)
        variants.append(
            VariantFound(template=name, tools=with_tools, facts=facts_of(codec.template), episodes=episodes)
        )
    return Report(
        target=str(path),
        model=model or (config.astuner.model.path if config else ""),
        frameworks=("recorded",),
        variants=tuple(variants),
    )


def replay(codec: ChatCodec, recording: Recording) -> EpisodeFound:
    """One conversation."""
    ear = Ear()
    conversation = ListeningCodec(codec, ear).conversation()
    ids: dict[str, list[str]] = {}
    notes: dict[str, None] = {}
    error = ""
    for number, recorded in enumerate(recording.turns):
        try:
            encoded = conversation.encode(_with_own_ids(recorded.messages, ids), recorded.tools)
            tools = () if codec.disable_tool_calls else recorded.tools
            written = write_message(codec.template, recorded.reply, tools, encoded.prompt_ids, cut=recorded.cut)
        except (UnsupportedRequest, ConfigError) as e:
            error = f"{recorded.place}: {e}"
            break
        if written.note:
            notes[f"{recorded.place}: {written.note}"] = None
        generation = Generation(
            prompt_ids=tuple(encoded.prompt_ids),
            response_ids=written.ids,
            logprobs=(LOGPROB,) * len(written.ids),
            finish_reason=written.finish_reason,
            policy_version=0,
        )
        _learn_ids(recorded, conversation.accept(encoded, generation, number), ids)
    return EpisodeFound(
        name=recording.name,
        turns=look_at(ear.asked, dict.fromkeys(range(len(recording.turns)), DEFAULT_AGENT), codec.template),
        ended="unusable" if error else "",
        error=error,
        notes=tuple(notes),
    )


def _learn_ids(recorded: Recorded, message: Mapping[str, Any], ids: dict[str, list[str]]) -> None:
    for theirs, ours in zip(recorded.reply.get("tool_calls", ()), message.get("tool_calls", ()), strict=False):
        if theirs["id"] is not None:
            ids.setdefault(theirs["id"], []).append(ours["id"])


def _with_own_ids(messages: Sequence[Mapping[str, Any]], ids: Mapping[str, Sequence[str]]) -> list[Mapping[str, Any]]:
    """``messages`` with the codec's ids for calls of replies; an id that was used again means the next such reply."""
    met: dict[str, int] = {}
    renamed: list[Mapping[str, Any]] = []
    for message in messages:
        if calls := message.get("tool_calls"):
            for call in calls:
                met[call["id"]] = met.get(call["id"], -1) + 1
            message = {**message, "tool_calls": [{**call, "id": _own(call["id"], met, ids)} for call in calls]}
        elif message["role"] == "tool":
            message = {**message, "tool_call_id": _own(message["tool_call_id"], met, ids)}
        renamed.append(message)
    return renamed


def _own(label: str | None, met: Mapping[str, int], ids: Mapping[str, Sequence[str]]) -> str | None:
    if label is None or label not in ids or label not in met:
        return label
    ours = ids[label]
    return ours[min(met[label], len(ours) - 1)]


def _codec(
    model: str | None, config: Config | None, template: Path | None, tools: bool, plugins: PluginManager | None
) -> ChatCodec:
    text = None
    if template is not None:
        try:
            text = template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"--template {template} cannot be read: {e}") from e
    if model is not None:
        located: str | None = (plugins or load_plugins()).hook.locate_model(path=model)
        return ChatCodec(read_tokenizer(located or model), chat_template=text, disable_tool_calls=not tools)
    if config is None:
        raise ConfigError(
            "a trace needs a tokenizer: add --model with a folder or a name on the Hugging Face hub, e.g. "
            "--model Qwen/Qwen2.5-0.5B-Instruct"
        )
    tokenizer = read_tokenizer(config.locate_model(), config.astuner.model.revision)
    codec = make_codec(config, tokenizer)
    if text is None and tools:
        return codec
    return ChatCodec(
        tokenizer,
        chat_template=text,
        disable_tool_calls=not tools,
        chat_template_kwargs=config.astuner.model.chat_template_kwargs,
        merge_level=config.astuner.rollout.merge_level,
    )
