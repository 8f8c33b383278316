"""Check an experiment, by running its workflow with a scripted model, or check recorded conversations.

The check of an experiment loads no weights, calls no judge and no external model, and applies no length limit. The
agent's tools are the real ones, called with generated arguments. The check of a recording writes each reply as a model
of the family would write it, with the recorded spelling of arguments. Tool calls get new IDs from the codec, as in
training, and requests that refer to these calls are updated.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

from astuner import (
    AgentRegistry,
    ChatCodec,
    ChatTemplate,
    Config,
    EpisodeRunner,
    PluginManager,
    PolicyModel,
    load_plugins,
    read_tasks,
    sampling_for,
)
from astuner.contracts.errors import AstunerError, ConfigError, DataError, UnsupportedRequest
from astuner.contracts.judge import Judge
from astuner.contracts.messages import normalise
from astuner.contracts.types import (
    DEFAULT_AGENT,
    DEFAULT_POLICY,
    FinishReason,
    JudgeOutput,
    Split,
    Task,
    WorkflowOutput,
    WorkflowTask,
)
from astuner_models.serving import TEMPLATES, load_tokenizer, make_codec, read_template
from astuner_record.token_check.report import EpisodeFound, Report, VariantFound, facts_of, look_at
from astuner_record.token_check.scripted import (
    CONTEXT,
    SCENARIOS,
    Ear,
    ListeningCodec,
    Scenario,
    ScriptedEngine,
    write_message,
)


def read_tokenizer(path: str, revision: str | None = None, *, trust_remote_code: bool = False) -> Any:
    """Load the Hugging Face tokenizer of a folder or of a model name.

    :raises MissingDependency: transformers is not installed.
    :raises ConfigError: The tokenizer does not exist.
    :raises RunError: The tokenizer is not cached, and the Hugging Face Hub does not answer.
    """
    try:
        return load_tokenizer(path, revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as e:
        story = " ".join(str(e).split())
        raise ConfigError(
            f"Cannot load the tokenizer of {path}: {story[:300]}. Pass a folder with tokenizer.json or a model name on "
            "the Hugging Face Hub."
        ) from e


def _tokenizer_of(config: Config, policy: str = DEFAULT_POLICY) -> Any:
    model = config.model_of(policy)
    path = config.locate_model(policy=policy)
    return read_tokenizer(path, model.revision, trust_remote_code=model.trust_remote_code)


FRAMEWORKS = {
    "agentscope": "agentscope",
    "agents": "openai-agents",
    "langgraph": "langgraph",
    "langchain": "langchain",
    "pydantic_ai": "pydantic-ai-slim",
    "smolagents": "smolagents",
    "crewai": "crewai",
    "autogen_agentchat": "autogen-agentchat",
    "llama_index": "llama-index-core",
    "google.adk": "google-adk",
    "camel": "camel-ai",
    "litellm": "litellm",
    "openai": "openai",
    "anthropic": "anthropic",
}
"""Module -> distribution. Frameworks first, then their client libraries."""


def frameworks_in_use() -> list[str]:
    """Return ``name version`` of each known framework that is imported and installed."""
    found = []
    for module, distribution in FRAMEWORKS.items():
        if module in sys.modules:
            try:
                found.append(f"{distribution} {metadata.version(distribution)}")
            except metadata.PackageNotFoundError:  # another module of that name, such as the user's own `agents`
                continue
    return found


OWN = "the tokenizer's own"
_Prepared: TypeAlias = "tuple[ChatTemplate, Callable[[], Sequence[EpisodeFound]]]"
"""A chat template, and a function that checks the conversations with it."""
REPLIES = 64
"""Model calls of one episode after which the check ends it."""


class NoJudge(Judge):
    """Judge that returns reward 0."""

    def judge(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        return JudgeOutput(reward=0.0)


def check_config(
    config: Config,
    *,
    templates: Sequence[Path] = (),
    tools: Sequence[bool] = (),
    scenarios: Sequence[str] = (),
    tasks: int = 1,
) -> Report:
    """Run the experiment's workflow on its first tasks with the scripted model.

    :param templates: Jinja files to check in addition to the experiment's chat template.
    :param tools: Check with tools, without tools, or both. Default: as configured in the experiment.
    :param scenarios: Names in `SCENARIOS`. Default: all.
    :param tasks: Number of training tasks.
    :raises ConfigError: The experiment or the name of a scenario is invalid.
    """
    for name in scenarios:
        if name not in SCENARIOS:
            raise ConfigError(f"--scenario {name} is not a known scenario. Available: {', '.join(SCENARIOS)}")
    chosen = [SCENARIOS[name] for name in scenarios or SCENARIOS]
    first = read_tasks(config).train[:tasks]
    if not first:
        raise ConfigError(f"{config.path}: the task reader returns no training tasks, so there is nothing to check.")
    quiet = _quiet(config)

    def prepare(template: Path | None, with_tools: bool) -> _Prepared:
        variant = _with_template(quiet, template, with_tools)
        codecs = _codecs(variant)
        first_codec = next(iter(codecs.values()))
        return first_codec.template, lambda: asyncio.run(_run_all(variant, codecs, first, chosen))

    on_or_off = list(tools) or [not config.astuner.rollout.disable_tool_calls]
    own = config.astuner.model.chat_template or OWN
    variants = _variants(prepare, templates, on_or_off, own=own, everything="every scenario")
    return Report(
        target=str(config.path),
        model=config.astuner.model.path,
        frameworks=tuple(frameworks_in_use()),
        variants=variants,
    )


def _variants(
    prepare: Callable[[Path | None, bool], _Prepared],
    templates: Sequence[Path],
    tools: Sequence[bool],
    *,
    own: str,
    everything: str,
) -> tuple[VariantFound, ...]:
    """Return the results for each chat template, with tools and without.

    :param own: Name of the default template, which is not a file.
    :raises ConfigError: The default template is unusable. An unusable additional template is reported as a result.
    """
    variants = []
    for template, with_tools in product([None, *templates], tools):
        name = str(template) if template else own
        try:
            used, run = prepare(template, with_tools)
        except ConfigError as e:
            if template is None:
                raise
            unusable = EpisodeFound(name=everything, ended="unusable", error=str(e))
            variants.append(VariantFound(template=name, tools=with_tools, episodes=(unusable,)))
            continue
        variants.append(VariantFound(template=name, tools=with_tools, facts=facts_of(used), episodes=tuple(run())))
    return tuple(variants)


def _quiet(config: Config) -> Config:
    """Return the experiment without parts that cost time or money and do not affect tokens."""
    a = config.astuner
    agents = {
        role: agent if agent.model == "policy" else agent.model_copy(update={"model": "policy", "train": False})
        for role, agent in a.agents.items()
    }
    rollout = {"max_retries": 0, "compute_madness_checklist": [], "max_response_length_in_one_turn": CONTEXT}
    lengths = {"max_prompt_length": None, "max_response_length": None}
    quiet = a.model_copy(
        update={
            "agents": agents,
            "rollout": a.rollout.model_copy(update=rollout),
            "data": a.data.model_copy(update=lengths),
            "task_judge": a.task_judge.model_copy(update={"judge": f"{__name__}->{NoJudge.__name__}"}),
        }
    )
    return replace(config, astuner=quiet)


def _with_template(config: Config, template: Path | None, tools: bool) -> Config:
    a = config.astuner
    update: dict[str, Any] = {"rollout": a.rollout.model_copy(update={"disable_tool_calls": not tools})}
    if template is not None:
        named = str(template) if str(template) in TEMPLATES else str(template.resolve())
        update["model"] = a.model.model_copy(update={"chat_template": named})
    return replace(config, astuner=a.model_copy(update=update))


def _codecs(config: Config) -> dict[str, ChatCodec]:
    """Return policy -> codec. Policies with the same base model share a codec."""
    by_path: dict[str, ChatCodec] = {}
    found = {}
    for policy in AgentRegistry.of(config.astuner).policies:
        path = config.locate_model(policy=policy)
        if path not in by_path:
            by_path[path] = make_codec(config, _tokenizer_of(config, policy))
        found[policy] = by_path[path]
    return found


async def _run_all(
    config: Config,
    codecs: dict[str, ChatCodec],
    tasks: Sequence[Task],
    scenarios: Sequence[Scenario],
) -> list[EpisodeFound]:
    runner = EpisodeRunner(config)
    runner.prepare()
    try:
        return [
            await _run_one(runner, codecs, scenario, n, task, named=len(tasks) > 1)
            for scenario in scenarios
            for n, task in enumerate(tasks)
        ]
    finally:
        await runner.close()


async def _run_one(
    runner: EpisodeRunner, codecs: dict[str, ChatCodec], scenario: Scenario, number: int, task: Task, *, named: bool
) -> EpisodeFound:
    """Run one episode. A workflow that fails is a result."""
    ear = Ear()
    engines, models = {}, {}
    for policy, codec in codecs.items():
        listening = ListeningCodec(codec, ear)
        engines[policy] = ScriptedEngine(listening, ear, scenario, most=REPLIES)
        models[policy] = PolicyModel(engines[policy], listening)
    name = f"{scenario.name}-{number}"
    workflow_task = WorkflowTask(task=task, episode_id=name, group_id=name, split=Split.TRAIN)
    agents: dict[int, str] = {}
    try:
        episode = await runner.run(workflow_task, models, sampling_for(runner.config, Split.TRAIN))
        agents = {turn.index: turn.agent for turn in episode.turns}
        ended, error = episode.stop_reason.value, episode.error
    except AstunerError as e:  # the runner gives up on this episode; another scenario may still work
        ended, error = "unusable", str(e)
    return EpisodeFound(
        name=scenario.name,
        task=(task.task_id or str(number)) if named else "",
        turns=look_at(ear.asked, agents, next(iter(codecs.values())).template),
        ended=ended,
        error=error,
        notes=tuple(dict.fromkeys(note for engine in engines.values() for note in engine.notes)),
    )


SESSIONS = ("session", "session_id", "conversation_id", "episode_id", "key", "api_key")
"""Fields that identify a conversation. The values of `_SECRET` fields are secret and are never shown."""
_SECRET = ("key", "api_key")


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A recorded request and its reply."""

    place: str
    """``file:line``, with the turn if a line contains several."""
    messages: tuple[Mapping[str, Any], ...]
    """Normalized messages."""
    tools: tuple[Mapping[str, Any], ...]
    reply: Mapping[str, Any]
    """Normalized reply."""
    cut: bool
    """Whether a length limit truncated the reply."""


def read_trace(path: Path) -> dict[str, list[Recorded]]:
    """Return conversation name -> its requests in order, for all conversations in ``path``.

    :raises DataError: The file or a line is unreadable. The message includes file and line.
    """
    recordings: dict[str, list[Recorded]] = {}
    names: dict[tuple[str, str], str] = {}
    for place, line in _lines(path):
        try:
            if "turns" in line:
                for name, recorded in _turns(line, place):
                    recordings.setdefault(name, []).append(recorded)
            else:
                recordings.setdefault(_session(line, names), []).append(_request(line, place))
        except UnsupportedRequest as e:
            raise DataError(f"{place}: {e}") from e
        except (KeyError, IndexError, TypeError, AttributeError) as e:
            raise DataError(
                f"{place}: neither an episode of a run nor a recorded request ({type(e).__name__}: {e}). Write "
                '{"messages": […], "tools": […], "response": {"choices": […]}, "session": "…"}'
            ) from e
    if not recordings:
        raise DataError(f"{path} contains no conversation.")
    return recordings


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f"Cannot read {path}: {e}") from e
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise DataError(f"{place}: the line is not JSON: {e}") from e
        if not isinstance(value, dict):
            raise DataError(f"{place}: the line is a JSON {type(value).__name__}. Write a JSON object in each line.")
        yield place, value


def _turns(line: Mapping[str, Any], place: str) -> Iterator[tuple[str, Recorded]]:
    """Yield the turns of a transcript (`astuner_record.conversations`) with complete requests."""
    known: dict[int, Recorded] = {}
    offered = line.get("tools", [])
    for number, turn in enumerate(line["turns"]):
        if "model" in turn and "messages" in turn:  # turn of an external model
            continue
        index, before = turn.get("turn", number), known.get(turn["continues"])
        if turn["continues"] is not None and before is None:
            raise DataError(f"{place}: turn {index} continues turn {turn['continues']}, which does not exist.")
        earlier = (*before.messages, before.reply) if before else ()
        tools = offered[turn["tools"]] if "tools" in turn else before.tools if before else ()
        known[index] = Recorded(
            place=f"{place}, turn {index}",
            messages=(*earlier, *(normalise(m) for m in turn["new_messages"])),
            tools=tuple(tools),
            reply=normalise(turn["reply"]),
            cut=turn["finish_reason"] == FinishReason.LENGTH.value,
        )
        yield f"{line['episode_id']}/{turn['agent']}", known[index]


def _request(line: Mapping[str, Any], place: str) -> Recorded:
    request = next((line[name] for name in ("request", "body") if isinstance(line.get(name), Mapping)), line)
    response = line.get("response", line)
    finish = None
    if isinstance(response, Mapping) and response.get("choices"):
        choice = response["choices"][0]
        message, finish = choice["message"], choice.get("finish_reason")
    elif isinstance(response, Mapping) and isinstance(response.get("message"), Mapping):
        message, finish = response["message"], response.get("finish_reason")
    elif response is not line and isinstance(response, Mapping) and {"content", "tool_calls"} & response.keys():
        message, finish = response, response.get("finish_reason")
    else:
        raise DataError(
            f'{place}: response is missing. Record it as "response": an OpenAI chat completion (with streamed chunks '
            "merged) or its message."
        )
    return Recorded(
        place=place,
        messages=tuple(normalise(m) for m in request["messages"]),
        tools=tuple(request.get("tools") or ()),
        reply=normalise({**message, "role": "assistant"}),
        cut=finish == "length",
    )


def _session(line: Mapping[str, Any], names: dict[tuple[str, str], str]) -> str:
    """Return the conversation that a line belongs to, by a name without secrets."""
    for label in SESSIONS:
        value = line.get(label)
        if isinstance(value, (str, int)):
            known = (label, str(value))
            if known not in names:
                names[known] = f"{label} no. {len(names) + 1}" if label in _SECRET else str(value)
            return names[known]
    return "trace"


def check_trace(
    path: Path,
    *,
    model: str | None = None,
    config: Config | None = None,
    templates: Sequence[Path] = (),
    tools: Sequence[bool] = (),
    plugins: PluginManager | None = None,
) -> Report:
    """Check every conversation in ``path``.

    :param model: Tokenizer to use: a folder, a model name on the Hub, or a name that a plugin locates.
    :param config: Experiment whose model and chat template are used if ``model`` is not given.
    :param templates: Jinja files to check in addition to the model's chat template.
    :param plugins: Plugins that locate ``model``. Default: the installed plugins.
    :param tools: Check with recorded tools, without tools, or both. Default: as in ``config``, otherwise with tools.
    :raises DataError: A line is unreadable.
    :raises ConfigError: The tokenizer does not exist, or its template belongs to no supported family.
    """
    recordings = read_trace(path)

    def prepare(template: Path | None, with_tools: bool) -> _Prepared:
        codec = _codec(model, config, template, with_tools, plugins)
        return codec.template, lambda: [say_again(codec, *recording) for recording in recordings.items()]

    on_or_off = list(tools) or [config is None or not config.astuner.rollout.disable_tool_calls]
    variants = _variants(prepare, templates, on_or_off, own=OWN, everything="every conversation")
    return Report(
        target=str(path),
        model=model or (config.astuner.model.path if config else ""),
        frameworks=("recorded",),
        variants=variants,
    )


def say_again(codec: ChatCodec, name: str, turns: Sequence[Recorded]) -> EpisodeFound:
    """Check one recorded conversation."""
    ear = Ear()
    conversation = ListeningCodec(codec, ear).conversation()
    ids: dict[str, list[str]] = {}
    notes: dict[str, None] = {}
    error = ""
    for number, recorded in enumerate(turns):
        try:
            encoded = conversation.encode(_with_own_ids(recorded.messages, ids), recorded.tools)
            tools = () if codec.disable_tool_calls else recorded.tools
            said, note = write_message(codec.template, recorded.reply, tools, encoded.prompt_ids, cut=recorded.cut)
        except (UnsupportedRequest, ConfigError) as e:
            error = f"{recorded.place}: {e}"
            break
        if note:
            notes[f"{recorded.place}: {note}"] = None
        message = conversation.accept(encoded, said, number)
        for theirs, ours in zip(recorded.reply.get("tool_calls", ()), message.get("tool_calls", ()), strict=False):
            if theirs["id"] is not None:
                ids.setdefault(theirs["id"], []).append(ours["id"])
    return EpisodeFound(
        name=name,
        turns=look_at(ear.asked, dict.fromkeys(range(len(turns)), DEFAULT_AGENT), codec.template),
        ended="unusable" if error else "",
        error=error,
        notes=tuple(notes),
    )


def _with_own_ids(messages: Sequence[Mapping[str, Any]], ids: Mapping[str, Sequence[str]]) -> list[Mapping[str, Any]]:
    """Replace recorded tool call IDs in ``messages`` by the codec's. A repeated ID refers to the next reply with it."""
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
    if model is None and config is None:
        raise ConfigError(
            "Recorded conversations need a tokenizer. Pass --model with a folder or a model name, e.g. "
            "--model Qwen/Qwen2.5-0.5B-Instruct"
        )
    if config is not None:
        return make_codec(
            _with_template(config, template, tools),
            _tokenizer_of(config),
        )
    text = None if template is None else read_template(str(template), Path())
    located: str | None = (plugins or load_plugins()).hook.locate_model(path=model)
    return ChatCodec(read_tokenizer(located or str(model)), chat_template=text, disable_tool_calls=not tools)
