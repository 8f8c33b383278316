"""``astuner chat FILE``: chat with the model of an experiment, directly or through its workflow."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from astuner import end_loop
from astuner.contracts.commands import (
    BackboneOption,
    CheckpointOption,
    FileArgument,
    JsonOption,
    OverridesArgument,
    RunDirOption,
    WithOption,
    asked,
    only_data_on_stdout,
    write_json,
)
from astuner.contracts.errors import ConfigError, ContextOverflow
from astuner.contracts.messages import text_of

if TYPE_CHECKING:
    from astuner import ChatCodec, Config
    from astuner.contracts.backbone import Served
    from astuner.contracts.types import Generation, SamplingParams, Turn
    from astuner_models.serving import Serving


HELP = "/exit quits, /reset clears the conversation, /tokens shows the last answer token by token"


def chat(
    ctx: typer.Context,
    file: FileArgument,
    overrides: OverridesArgument = None,
    backbone: BackboneOption = None,
    checkpoint: CheckpointOption = "best",
    run_dir: RunDirOption = None,
    message: Annotated[str | None, typer.Option(metavar="TEXT", help="Send TEXT, print the answer and exit.")] = None,
    workflow: Annotated[
        bool, typer.Option("--workflow", help="Answer with the experiment's agent and its tools.")
    ] = False,
    policy: Annotated[
        str | None, typer.Option(metavar="NAME", help="Select a policy, if the experiment has several.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="Set the sampling temperature. 0 is greedy.")] = 0.0,
    services: WithOption = None,
    as_json: JsonOption = False,
) -> None:
    """Chat with the model of an experiment."""
    from astuner_models.serving import serve

    # in a chat the user decides whether to try again
    given = [*(overrides or ()), *["astuner.rollout.max_retries=0"] * workflow]
    told = asked(ctx, file, given, run_dir, services, backbone=backbone, checkpoint=checkpoint)
    if as_json and message is None:
        raise ConfigError("--json prints a single answer; add --message TEXT")
    with only_data_on_stdout(as_json), serve(**told) as models, _own_loop() as loop:
        served, codec = models.policy(policy)
        if workflow:
            speaker: Model | Agent = Agent(models, temperature)
        else:
            speaker = Model(models.config, served, codec, temperature)
        if message is None:
            _converse(speaker, served.name, loop)
            return
        answer = loop.run_until_complete(speaker.answer(message))
    if as_json:
        write_json(answer)
    else:
        typer.echo(_shown(answer))
    if answer.get("failed"):
        raise typer.Exit(1)


def _converse(speaker: Model | Agent, name: str, loop: asyncio.AbstractEventLoop) -> None:
    typer.echo(f"{name}: {HELP}")
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return
        if text == "/exit":
            return
        if text == "/reset":
            speaker.reset()
        elif text == "/tokens":
            for line in speaker.tokens():
                typer.echo(line)
        elif text.startswith("/"):
            typer.echo(HELP)
        elif text:
            typer.echo(_shown(loop.run_until_complete(speaker.answer(text))))


class Model:
    """The model without a workflow; all messages belong to one conversation."""

    def __init__(self, config: Config, served: Served, codec: ChatCodec, temperature: float) -> None:
        self.served, self.codec = served, codec
        self.sampling = replace(_sampling(config, temperature), stop_token_ids=tuple(codec.stop_token_ids))
        self.last: Generation | None = None
        self.reset()

    def reset(self) -> None:
        self.conversation = self.codec.conversation()
        self.messages: list[Mapping[str, Any]] = []

    async def answer(self, text: str) -> dict[str, Any]:
        messages = [*self.messages, {"role": "user", "content": text}]
        encoded = self.conversation.encode(messages)
        try:
            self.last = await self.served.engine.generate(encoded.prompt_ids, self.sampling, session="chat")
        except ContextOverflow as e:
            raise ContextOverflow(f"{e}; clear the conversation with /reset") from None
        reply = self.conversation.accept(encoded, self.last, len(messages))
        self.messages = [*messages, reply]
        return {
            "message": reply,
            "prompt_tokens": len(encoded.prompt_ids),
            "response_tokens": len(self.last.response_ids),
        }

    def tokens(self) -> list[str]:
        """Return the tokens of the last answer with their probabilities, one per line."""
        return [] if self.last is None else _token_lines(self.served, self.last)


class Agent:
    """The experiment's workflow; each message is a separate task, run as in training but without retries."""

    def __init__(self, serving: Serving, temperature: float) -> None:
        from astuner import EpisodeRunner

        self.serving = serving
        self.sampling = _sampling(serving.config, temperature)
        self.runner = EpisodeRunner(serving.config)
        self.runner.prepare()
        self.asked = 0
        self.turns: Sequence[Turn] = ()

    def reset(self) -> None:
        self.turns = ()

    async def answer(self, text: str) -> dict[str, Any]:
        from astuner.contracts.types import Split, StopReason, Task, WorkflowTask

        self.asked += 1
        name = f"chat-{self.asked}"
        task = Task(task_id=name, main_query=text)
        attempt = WorkflowTask(task=task, episode_id=name, group_id=name, split=Split.VALIDATION)
        episode = await self.runner.run(attempt, self.serving.models, self.sampling)
        self.turns = episode.turns
        failed = not episode.stop_reason.is_scored and episode.stop_reason is not StopReason.JUDGE_FAILED
        return {
            "turns": [{"request": list(t.request), "message": dict(t.message)} for t in episode.turns],
            "stop_reason": episode.stop_reason.value,
            "error": episode.error + (self._no_environment() if failed else ""),
            "failed": failed,
            "reward": episode.reward,
        }

    def _no_environment(self) -> str:
        """Return a hint for a workflow that needs an environment, as the end of a sentence, or an empty string."""
        config = self.serving.config
        reader = config.astuner.task_reader.type
        if not reader or not config.resolve("task reader", reader).of_environments:
            return ""
        return (
            "; this experiment's tasks have an environment, but a typed message has none. To watch the workflow, run: "
            f"astuner run {config.path} --backbone debug --with NAME; to act yourself: astuner env try NAME"
        )

    def tokens(self) -> list[str]:
        """Return the tokens of the last answer, call by call."""
        lines = []
        for turn in self.turns:
            said = _token_lines(self.serving.served[turn.policy], turn.generation)
            lines += [f"turn {turn.index} of {turn.agent}", *said]
        return lines


@contextmanager
def _own_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Yield one event loop for the complete conversation; an engine may live on it (3.10 has no `asyncio.Runner`)."""
    loop = asyncio.new_event_loop()
    try:
        yield loop
    finally:
        end_loop(loop, None)  # an answer may have been interrupted


def _sampling(config: Config, temperature: float) -> SamplingParams:
    from astuner.contracts.types import SamplingParams

    return SamplingParams(max_tokens=config.astuner.rollout.max_response_length_in_one_turn, temperature=temperature)


def _token_lines(served: Served, generation: Generation) -> list[str]:
    from math import exp

    pairs = zip(generation.response_ids, generation.logprobs, strict=True)
    lines = [f"{token:8}  {exp(logprob):6.3f}  {served.tokenizer.decode([token])!r}" for token, logprob in pairs]
    return [f"{len(generation.prompt_ids)} prompt tokens, {len(lines)} response tokens: id, probability, text", *lines]


def _shown(answer: Mapping[str, Any]) -> str:
    """Return an answer as text: messages, tool calls and tool results."""
    if "turns" not in answer:
        return _message(answer["message"])
    lines = []
    for index, turn in enumerate(answer["turns"]):
        # the first request is the prompt; later requests add the tool results
        lines += [
            f"  {m.get('role')}: {text_of(m.get('content'))}"
            for m in turn["request"]
            if index and m.get("role") != "assistant"
        ]
        lines.append(_message(turn["message"]))
    if answer["stop_reason"] == "judge_failed":
        lines.append("(not judged: a typed question has no reference answer)")
    elif answer["error"]:
        lines.append(f"({answer['stop_reason']}: {answer['error']})")
    return "\n".join(lines)


def _message(message: Mapping[str, Any]) -> str:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    lines = [text_of(message.get("content")), *(f"  calls {f['name']}({f['arguments']})" for f in calls)]
    return "\n".join(filter(None, lines))
