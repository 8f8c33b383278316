"""Check that a custom part implements its contract (`astuner.contracts`).

Each check is a function to call in a test. A failed check raises an AssertionError that describes the fix. Training is
tested end to end by the tests of each backbone; this module checks what all backbones need: the capability contract,
the plan, and an engine that returns exactly the tokens it generated.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import math
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, overload

from astuner import estimate_advantages, find_part, load_plugins, raised_at, token_loss
from astuner.contracts.backbone import Capabilities, InferenceEngine, Served
from astuner.contracts.environment import Environment, Evaluation, StepResult
from astuner.contracts.errors import ContextOverflow, JudgeFailed
from astuner.contracts.judge import Attempt, GroupJudge
from astuner.contracts.objective import AdvantageEstimator, Compared, Loss, LossInput, is_step_wide
from astuner.contracts.output_check import OutputView
from astuner.contracts.scalars import as_float
from astuner.contracts.types import (
    FinishReason,
    Generation,
    JudgeOutput,
    SamplingParams,
    Split,
    Task,
    WorkflowOutput,
    WorkflowTask,
)
from astuner_testing.fakes import FakeEngine, Replies, fake_config, make_tokenizer

T = TypeVar("T")

AT_ONCE, JUDGED_AT_ONCE, CALLED_AT_ONCE = 4, 20, 6
"""Concurrent episodes of a workflow, attempts of a judge, and calls of an engine."""
LONGEST_BLOCK = 2.0
"""Seconds; far more than a busy machine adds, far less than users accept."""


async def ask(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a plain or async function; plain ones run in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    answer = await asyncio.to_thread(function, *arguments)
    return await answer if inspect.isawaitable(answer) else answer


def run(work: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """Return the result of ``work`` and the longest time in seconds for which it blocked the event loop."""
    return asyncio.run(_watched(work))


async def _watched(work: Coroutine[Any, Any, T]) -> tuple[T, float]:
    longest = 0.0

    async def heartbeat() -> None:
        nonlocal longest
        while True:
            before = time.monotonic()
            try:
                await asyncio.sleep(0.02)
            finally:
                longest = max(longest, time.monotonic() - before - 0.02)

    watcher = asyncio.create_task(heartbeat())
    await asyncio.sleep(0)  # the first beat starts before the work does
    try:
        result = await work
    finally:
        watcher.cancel()
        await asyncio.wait({watcher})  # its last beat includes blocking at the very end
    return result, longest


async def _several(once: Callable[[], Coroutine[Any, Any, T]], at_once: int) -> list[T]:
    return await asyncio.gather(*(once() for _ in range(at_once)))


def is_finite_number(value: object) -> bool:
    """Return whether a value is a finite number."""
    return as_float(value) is not None


def _check_json(where: str, data: Any, hint: str = "", *, allow_nan: bool = False) -> None:
    try:
        json.dumps(data, allow_nan=allow_nan)
    except (TypeError, ValueError) as e:
        raise AssertionError(f"{where} cannot be written as JSON: {e}{hint}") from e


# ---- task readers ----------------------------------------------------------------------------------------------------


def check_task_reader(
    reader: Any, *, splits: Sequence[Split] = (Split.TRAIN, Split.VALIDATION), first: int = 200
) -> list[Task]:
    """Check the first tasks of every split, and return the tasks of the first split.

    - ``read`` is lazy: it returns an iterator, not a list;
    - every item is a `Task` with a label, a question, and data that can be written as JSON;
    - reading again returns the same tasks in the same order, which resumed runs depend on;
    - two concurrent readings do not affect each other.
    """
    name = type(reader).__name__
    found: dict[Split, list[Task]] = {}
    for split in splits:
        reading = reader.read(split)
        assert isinstance(reading, Iterator), (
            f"{name}.read({split}) returned a {type(reading).__name__}. Yield the tasks instead"
        )
        tasks = found[split] = list(islice(reading, first))
        assert tasks, f"{name}.read({split}) yielded no tasks. Raise DataError if there should be some"
        for i, task in enumerate(tasks):
            _check_task(f"task {i} of {name}.read({split})", task)
        other = reader.read(split)
        again = []
        for task in islice(reader.read(split), first):
            next(other, None)  # interleaved with a second reading
            again.append(task)
        different = [i for i, (a, b) in enumerate(zip(tasks, again, strict=False)) if a != b]
        assert again == tasks, (
            f"{name}.read({split}) yielded different tasks the second time (first difference: number "
            f"{different[0] if different else min(len(tasks), len(again))}). Read in a stable order, without shuffling"
        )
    return found[splits[0]]


def _check_task(where: str, task: Any) -> None:
    assert isinstance(task, Task), f"{where} is {task!r}. Yield astuner.Task(task_id=…, main_query=…)"
    assert isinstance(task.task_id, str), f"{where} has the task_id {task.task_id!r}. Use a string"
    assert task.task_id, f"{where} has an empty task_id. Set a label for logs"
    assert task.main_query or task.init_messages, (
        f"{where} ({task.task_id}) contains no question. Set main_query or init_messages"
    )
    _check_json(f"{where} ({task.task_id})", asdict(task), ". Use plain data in metadata", allow_nan=True)


# ---- workflows -------------------------------------------------------------------------------------------------------


def check_workflow(
    workflow_cls: Any, workflow_task: WorkflowTask, *, replies: Replies = ("The answer is 4.",), config: Any = None
) -> WorkflowOutput:
    r"""Run one workflow with a scripted model, and return its output.

    - it can be created without arguments, once per episode;
    - it calls ``model_tuner`` at least once, otherwise there is nothing to train;
    - it returns a `WorkflowOutput`; its reward is None or a finite number;
    - the same replies lead to the same prompts, and 4 concurrent episodes do not mix;
    - as ``async def``, it does not block the event loop.

    :param replies: Replies of the model, one text per call, or a function of the prompt's text. A tool call is
        ``<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>``.
    """
    name = getattr(workflow_cls, "__name__", str(workflow_cls))
    tokenizer = make_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        settings = config if config is not None else fake_config(Path(folder))

        async def once() -> tuple[Any, list[list[int]]]:
            engine = FakeEngine(replies, tokenizer)
            return await _episode(workflow_cls, workflow_task, engine, settings), [call[0] for call in engine.calls]

        (output, prompts), _ = run(once())
        # Measured in the second run, because the first call imports the agent's framework once per process.
        (_, prompts_again), blocked = run(once())
        together, _ = run(_several(once, AT_ONCE))
    assert prompts, f"{name} never called the model. Pass model_tuner to the agent as its model"
    assert isinstance(output, WorkflowOutput), (
        f"{name}.execute returned {output!r}. Return WorkflowOutput(reward=None, …)"
    )
    reward = output.reward
    rewards = list(reward.values()) if isinstance(reward, Mapping) else [reward]
    assert reward is None or (rewards and all(is_finite_number(r) for r in rewards)), (
        f"{name} returned the reward {reward!r}. Return a finite number, a mapping of agents or roles to finite "
        "numbers, or None to use the judge"
    )
    assert prompts_again == prompts, (
        f"{name} sent different prompts the second time, with the same task and replies: "
        f"{_difference(tokenizer, prompts, prompts_again)}. Remove clocks and random IDs"
    )
    for _, others in together:
        assert others == prompts, (
            f"{AT_ONCE} concurrent episodes sent different prompts than a single one: "
            f"{_difference(tokenizer, prompts, others)}. Keep an episode's state on self, not on class or module"
        )
    assert blocked < LONGEST_BLOCK, (
        f"{name}.execute blocked the event loop, and thus all other episodes, for {blocked:.1f} s. "
        "Await what blocks, or write a plain `def execute`, which runs in a separate thread"
    )
    return output


async def _episode(workflow_cls: Any, workflow_task: WorkflowTask, engine: FakeEngine, config: Any) -> Any:
    from astuner import AgentRegistry, ChatCodec, EpisodeRecorder, ModelTuner, PolicyModel

    codec = ChatCodec(engine.tokenizer)
    tuner = ModelTuner(
        models=dict.fromkeys(AgentRegistry.of(config.astuner).policies, PolicyModel(engine, codec)),
        recorder=EpisodeRecorder(),
        sampling=SamplingParams(max_tokens=4096, stop_token_ids=tuple(codec.stop_token_ids)),
        config=config,
        workflow_task=workflow_task,
    )
    return await ask(workflow_cls().execute, workflow_task, tuner)


def _difference(tokenizer: Any, one: list[list[int]], other: list[list[int]]) -> str:
    if len(one) != len(other):
        return f"{len(one)} calls and {len(other)} calls"
    call = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    a, b = tokenizer.decode(one[call]), tokenizer.decode(other[call])
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"call {call}: …{a[max(0, at - 20) : at + 40]!r} and …{b[max(0, at - 20) : at + 40]!r}"


# ---- environments ----------------------------------------------------------------------------------------------------


Action = Mapping[str, Any]

_NOWHERE = "no-such-name-anywhere"
_CALL = {"id": "call_1", "type": "function", "function": {"name": _NOWHERE, "arguments": "{"}}
NONSENSE: tuple[Action, ...] = (
    {"role": "assistant", "content": ""},
    {"role": "assistant", "content": "\x00\ufffd" * 50},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
)
"""Actions that are invalid in every environment."""


def check_environment(
    env_cls: Any,
    *,
    params: Mapping[str, Any] | None = None,
    act: Callable[[str], Action] | None = None,
    steps: int = 3,
    split: str = "train",
) -> None:
    """Check one environment on its first task.

    - ``tasks`` yields tasks with unique IDs, the same ones every time, and rejects an unknown split with `ValueError`;
    - ``reset`` accepts a task by its ID alone, and rejects an unknown one with `ValueError`;
    - ``reset`` and ``step`` return a `StepResult` with text and JSON data, also for invalid actions;
    - ``evaluate`` returns a finite number or an `Evaluation`, and changes nothing;
    - two instances do not affect each other; ``close`` may be called after a failure and twice.

    :param params: Value of ``astuner.env_service.params`` in an experiment.
    :param act: Function that returns an action (an OpenAI-style assistant message) for an observation; None always says
        hello.
    :param split: One of its splits.
    """
    act, params = act or (lambda observation: _reply("hello")), dict(params or {})
    name = env_cls.__name__
    env_cls = _of_today(env_cls)
    task, last = _check_tasks(name, env_cls, params, split)
    alone = []
    for other in (None, _call(name, env_cls, params)):  # the second time interleaved with another instance
        env = _call(name, env_cls, params)
        try:
            if other is not None:
                _call(f"{name}.reset", other.reset, last)
            seen = [_check_result(f"{name}.reset", _call(f"{name}.reset", env.reset, task))]
            for _ in range(steps):
                if seen[-1].is_over:
                    break
                if other is not None:
                    _call(f"{name}.step", other.step, act(""))
                action = act(seen[-1].observation)
                seen.append(_check_result(f"{name}.step", _call(f"{name}.step", env.step, action)))
                _check_evaluate(name, env)
            _check_json(f"{name}.describe", dict(_call(f"{name}.describe", env.describe)))
        finally:
            for each in (env, env, *([] if other is None else [other])):
                _call(f"{name}.close", each.close)
        alone.append([s.observation for s in seen])
    assert alone[0] == alone[1], (
        f"{name} returned {alone[1]} next to another instance, but {alone[0]} alone. Keep the state on self"
    )
    _check_start_by_id(name, env_cls, params, task, alone[0][0])
    for action in NONSENSE:
        _check_nonsense(name, env_cls(params), task, action)
    env_cls(params).close()  # never reset: close is also called after a failed start


def _of_today(env_cls: type) -> type[Environment]:
    """Return the class itself, or a wrapper for a class that was written for an older service."""
    if issubclass(env_cls, Environment):
        return env_cls
    wanted_by = f"{env_cls.__name__}, which is not a subclass of astuner.Environment,"
    environments = find_part(load_plugins(), "environments", wanted_by=wanted_by)()
    adapted: type[Environment] | None = environments.adapt(env_cls)
    assert adapted is not None, (
        f"{env_cls.__name__} is neither a subclass of astuner.Environment nor written for an older environment service"
    )
    return adapted


def _call(what: str, function: Callable[..., T], *arguments: Any) -> T:
    """Return the result of ``function``, which must not raise."""
    try:
        return function(*arguments)
    except Exception as e:
        raise AssertionError(f"{what} raised {type(e).__name__}: {e}{raised_at(e, caller=__file__)}") from e


def _check_tasks(name: str, env_cls: type[Environment], params: Mapping[str, Any], split: str) -> tuple[Task, Task]:
    """Return the first task, and a second one if there is any."""
    tasks = _call(f"{name}.tasks", lambda: list(islice(env_cls.tasks(split, params), 5)))
    assert tasks, f"{name}.tasks yields no tasks for the split {split!r}"
    assert all(isinstance(t, Task) for t in tasks), f"{name}.tasks must yield astuner.Task, not {tasks!r}"
    assert len({t.task_id for t in tasks}) == len(tasks), f"{name}.tasks yields a task_id twice. IDs must be unique"
    again = _call(f"{name}.tasks", lambda: list(islice(env_cls.tasks(split, params), 5)))
    assert tasks == again, f"{name}.tasks yielded different tasks the second time. Use a stable order"
    _check_refuses(
        lambda: list(islice(env_cls.tasks(_NOWHERE, params), 1)),
        f"{name}.tasks accepted a split that does not exist. Raise ValueError that lists the existing splits",
    )
    return tasks[0], tasks[-1]


def _check_refuses(asked: Callable[[], object], otherwise: str) -> None:
    try:
        asked()
    except ValueError:
        return
    raise AssertionError(otherwise)


def _check_start_by_id(
    name: str, env_cls: type[Environment], params: Mapping[str, Any], task: Task, observation: str
) -> None:
    with closing(env_cls(params)) as env:
        try:
            first = env.reset(Task(task_id=task.task_id)).observation
        except Exception as e:
            raise AssertionError(
                f"{name}.reset needs more than the task_id ({type(e).__name__}: {e}). The service may receive only the "
                "ID, so derive everything else from it"
            ) from e
    assert first == observation, (
        f"{name}.reset returned {first!r} for the task_id alone, but {observation!r} for the task"
    )
    with closing(env_cls(params)) as env:
        otherwise = f"{name}.reset accepted a task that does not exist. Raise ValueError"
        _check_refuses(lambda: env.reset(Task(task_id=_NOWHERE)), otherwise)


def _check_nonsense(name: str, made: Environment, task: Task, action: Action) -> None:
    with closing(made) as env:
        try:
            env.reset(task)
            result = env.step(action)
        except Exception as e:
            raise AssertionError(
                f"{name}.step raised {type(e).__name__}: {e} for {action}. A model may send anything, so return an "
                "observation instead"
            ) from e
    _check_result(f"{name}.step with an invalid action", result)


def _check_result(where: str, result: Any) -> StepResult:
    assert isinstance(result, StepResult), f"{where} returned {result!r}. Return StepResult(observation=…)"
    assert isinstance(result.observation, str), f"{where}: the observation is {result.observation!r}, but must be text"
    assert is_finite_number(result.reward), f"{where}: the reward {result.reward} is not a finite number"
    for flag in (result.terminated, result.truncated):
        assert isinstance(flag, bool), f"{where}: terminated and truncated must be True or False, not {flag!r}"
    for message in result.messages:
        assert isinstance(message.get("role"), str), f"{where}: the message {message!r} has no role"
        assert "content" in message, f"{where}: the message {message!r} has no content"
    _check_json(f"{where}: info", dict(result.info))
    _check_json(f"{where}: messages", [dict(message) for message in result.messages])
    return result


def _check_evaluate(name: str, env: Any) -> None:
    found = [_call(f"{name}.evaluate", env.evaluate) for _ in range(2)]
    for each in found:
        score = each.score if isinstance(each, Evaluation) else each
        assert is_finite_number(score), f"{name}.evaluate returned {each!r}, not a finite number or an Evaluation"
    first, second = map(Evaluation.of, found)
    assert first.success in (None, True, False), f"{name}.evaluate: success is {first.success!r}"
    _check_json(f"{name}.evaluate: details", dict(first.details))
    assert first == second, f"{name}.evaluate returned {first} and then {second}. It must not change the state"


# ---- judges ----------------------------------------------------------------------------------------------------------


@overload
def check_judge(judge: Any, workflow_task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput: ...


@overload
def check_judge(
    judge: Any, workflow_task: WorkflowTask, output: Sequence[WorkflowOutput | Attempt]
) -> list[JudgeOutput | JudgeFailed]: ...


def check_judge(
    judge: Any, workflow_task: WorkflowTask, output: WorkflowOutput | Sequence[WorkflowOutput | Attempt]
) -> JudgeOutput | list[JudgeOutput | JudgeFailed]:
    """Check one judge on one attempt, or a group judge on all attempts of a group, and return its verdicts.

    - it returns a `JudgeOutput` (whose reward is finite by construction), for each attempt of a group, in their order;
    - the same attempt gets the same verdict twice, and in 20 concurrent calls;
    - in a group, the verdict does not depend on the position of the attempt;
    - it changes neither task nor output;
    - as ``async def``, it does not block the event loop.

    :param output: Output of the attempt; for a group judge, the outputs of all attempts, or the attempts themselves if
        it reads their turns.
    """
    assert not isinstance(judge, type), f"pass a judge instead of its class: check_judge({judge.__name__}(), …)"
    name = type(judge).__name__
    if isinstance(output, WorkflowOutput):
        return _check_judged(f"{name}.judge", judge.judge, (workflow_task, output), _one)
    assert isinstance(judge, GroupJudge), f"{name} judges a single attempt. Pass one output instead of {len(output)}"
    attempts = [o if isinstance(o, Attempt) else Attempt(workflow_task=workflow_task, output=o) for o in output]

    def each(called: str, said: Any) -> list[JudgeOutput | JudgeFailed]:
        return _each(called, said, len(attempts))

    called = f"{name}.judge_group"
    found = _check_judged(called, judge.judge_group, (attempts,), each)
    turned_round, _ = run(ask(judge.judge_group, attempts[::-1]))
    assert _verdicts(each(called, turned_round)[::-1]) == _verdicts(found), (
        f"{called} returned {found}, but {turned_round} for the same attempts in reverse order. An attempt's verdict "
        "must not depend on its position"
    )
    return found


def _one(called: str, said: Any) -> JudgeOutput:
    assert isinstance(said, JudgeOutput), f"{called} returned {said!r}. Return JudgeOutput(reward=…)"
    return said


def _each(called: str, said: Any, wanted: int) -> list[JudgeOutput | JudgeFailed]:
    assert isinstance(said, (list, tuple)), f"{called} returned {said!r}. Return a list with a JudgeOutput for each"
    assert len(said) == wanted, f"{called} returned {len(said)} verdicts for {wanted} attempts. Return one for each"
    return [one if isinstance(one, JudgeFailed) else _one(called, one) for one in said]


def _check_judged(
    called: str, function: Callable[..., Any], given: tuple[Any, ...], read: Callable[[str, Any], T]
) -> T:
    before = copy.deepcopy(given)

    async def once() -> T:
        return read(called, await ask(function, *given))

    first, blocked = run(once())
    again, _ = run(once())
    assert _verdicts(again) == _verdicts(first), (
        f"{called} returned {first} and then {again} for the same attempt. Do not keep state about an attempt"
    )
    together, blocked_together = run(_several(once, JUDGED_AT_ONCE))
    wrong = [v for v in together if _verdicts(v) != _verdicts(first)]
    assert not wrong, (
        f"in {JUDGED_AT_ONCE} concurrent calls, {called} returned {wrong[0]} instead of {first}. "
        "The calls share state: do not keep state on self while judging"
    )
    if given != before:
        what = "workflow task" if _tasks(given[0]) != _tasks(before[0]) else "output"
        raise AssertionError(f"{called} changed the {what} that it received. Copy what you want to change")
    blocked = max(blocked, blocked_together)
    assert blocked < LONGEST_BLOCK, (
        f"{called} blocked the event loop, and thus all other episodes, for {blocked:.1f} s. "
        f"Await what blocks, or write a plain `def {called.partition('.')[2]}`, which runs in a separate thread"
    )
    return first


def _tasks(given: WorkflowTask | Sequence[Attempt]) -> list[WorkflowTask]:
    return [given] if isinstance(given, WorkflowTask) else [attempt.workflow_task for attempt in given]


def _verdicts(said: Any) -> Any:
    """Return verdicts in a form that can be compared; a failure is compared by its message."""
    if isinstance(said, list):
        return [_verdicts(one) for one in said]
    return str(said) if isinstance(said, JudgeFailed) else said


# ---- checks on the model's output ------------------------------------------------------------------------------------


ORDINARY = (
    "",
    "The answer is 7, since 2x = 14.",
    "café, für, ¿cómo?, naïve, €5, π ≈ 3.14, x ≤ 3, a → b",
    "Привет, как дела? 你好，世界。こんにちは 안녕하세요 مرحبا שלום नमस्ते สวัสดีชาวโลก",
    "😀" * 20 + " ha ha ha ha ha!",
    "| a | b |\n|---|---|\n" + "| 0 | 1 |\n" * 20 + "-" * 80,
    '```python\ndef f(x):\n    return {"a": [0, 0, 0, 0], "b": None}\n```',
    "\\[ \\frac{n(n+1)}{2} \\] and 0x" + "00" * 32,
)
"""Texts that no check may reject, unless it requires a form that they do not have."""

ODD: tuple[Mapping[str, Any], ...] = (
    {},
    {"role": "assistant", "content": None},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}]},
    {"role": "assistant", "content": "", "unparsed_tool_calls": ["<tool_call>{"]},
)
"""Messages that a model may generate and that a check must accept as input, whatever it returns."""


def check_output_check(
    check: Callable[[OutputView], str | None],
    wrong: Sequence[str | Mapping[str, Any]],
    *,
    ordinary: Sequence[str | Mapping[str, Any]] = ORDINARY,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[str]:
    """Check one output check, and return its message about each of ``wrong``.

    - it is a plain function of one `OutputView`, and returns a text or None;
    - it rejects each of ``wrong`` and none of ``ordinary``, and returns the same result twice;
    - it changes no message, and raises no exception, also for messages without text.

    :param wrong: Texts, or complete assistant messages, that it must reject; at least one.
    :param ordinary: Texts that it must accept; by default texts in many languages, code and tables.
    :param tools: OpenAI-style descriptions of the available tools.
    """
    assert callable(check), f"pass the check itself, not {check!r}"
    name = getattr(check, "__name__", type(check).__name__)
    assert not isinstance(check, type), f"{name} is a class, but a check is a plain function"
    assert not inspect.iscoroutinefunction(check), f"{name} is async, but a check is a plain function"
    assert wrong, f"pass at least one text that {name} must reject"
    said: list[str] = []
    for message in map(_reply, wrong):
        complaint = _complaint(check, name, message, tools)
        assert complaint, f"{name} accepted {_shown(message)}, which it must reject"
        assert "\n" not in complaint, f"{name} returned {complaint!r}. Return a single line"
        said.append(complaint)
    for message in map(_reply, ordinary):
        complaint = _complaint(check, name, message, tools)
        assert complaint is None, (
            f"{name} returned {complaint!r} for {_shown(message)}. A check that rejects ordinary text punishes good "
            "behavior. If it requires a specific form, pass ordinary=[…]"
        )
    for message in ODD:
        _complaint(check, name, message, tools)
        _complaint(check, name, message, None)
    return said


def _complaint(
    check: Any, name: str, message: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None
) -> str | None:
    before = copy.deepcopy((message, tools))
    try:
        first, again = check(OutputView(message, tools)), check(OutputView(message, tools))
    except Exception as e:
        raise AssertionError(f"{name} raised {type(e).__name__}: {e} for {_shown(message)}") from e
    assert first is None or isinstance(first, str), f"{name} returned {first!r}. Return a text or None"
    assert first == again, f"{name} returned {first!r} and then {again!r} for the same reply. Do not keep state"
    assert (message, tools) == before, f"{name} changed its input. Copy what you want to change"
    return first


def _reply(given: str | Mapping[str, Any]) -> Mapping[str, Any]:
    return {"role": "assistant", "content": given} if isinstance(given, str) else given


def _shown(message: Mapping[str, Any]) -> str:
    text = repr(dict(message))
    return text if len(text) <= 200 else f"{text[:200]}…"


# ---- losses and advantages -------------------------------------------------------------------------------------------


REWARDS = ((1.0, 0.0, 0.5, 0.0), (1.0, 1.0, 1.0), (0.3,), (-1e3, 1e3))
"""Groups with different rewards, with equal rewards, with a single attempt, and with distant rewards."""


def check_loss(loss: Loss, *, clip_low: float = 0.2, clip_high: float = 0.28) -> None:
    """Check one loss on samples of several lengths; needs torch.

    - it returns a finite number for each token, with a finite gradient, also for very large ratios;
    - for the weights that generated the tokens, a good token becomes more probable and a bad one less;
    - the loss of a token depends on its own sample only, so micro-batches do not change it;
    - it changes none of its input tensors.

    :param clip_low: `algorithm.clip_ratio_low`; likewise ``clip_high``.
    """
    import torch

    name = getattr(loss, "__name__", type(loss).__name__)
    owner = torch.tensor([0, 0, 0, 1, 2, 2])
    old = torch.tensor([-0.5, -1.0, -2.0, -0.1, -3.0, -0.7])
    good = torch.tensor([1.0, 1.0, 1.0, -1.0, 0.5, 0.5])

    def of(places: Sequence[int], moved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.tensor(places)
        logprobs = (old + moved)[at].clone().requires_grad_()
        given = LossInput(
            logprobs=logprobs,
            old_logprobs=old[at],
            rollout_logprobs=old[at],
            advantages=good[at],
            owner=owner[at] - owner[at].min(),
            clip_low=clip_low,
            clip_high=clip_high,
        )
        before = [t.detach().clone() for t in (logprobs, given.old_logprobs, given.advantages, given.owner)]
        found = token_loss(name, loss, given).loss
        after = (logprobs.detach(), given.old_logprobs, given.advantages, given.owner)
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert same, f"{name} changed an input tensor. Copy tensors before changing them in place"
        assert found.requires_grad, f"the loss of {name} has no gradient. It must depend on given.logprobs"
        (gradient,) = torch.autograd.grad(found.sum(), logprobs)
        return found.detach(), gradient

    everything = range(len(owner))
    _, gradient = of(everything, torch.zeros(6))
    wrong = [i for i in everything if float(gradient[i] * good[i]) >= 0]
    assert not wrong, (
        f"{name}: with ratios of 1 and advantages {good.tolist()} the gradient to the log-probabilities is "
        f"{gradient.tolist()}. It must be negative for positive advantages, because a loss is minimized"
    )
    for moved in (torch.zeros(6), torch.linspace(-1, 1, 6), torch.tensor([500.0, -500.0, 0.0, 500.0, -500.0, 0.1])):
        value, gradient = of(everything, moved)
        assert torch.isfinite(value).all(), (
            f"{name} returns {value.tolist()} for log ratios {moved.tolist()}. Use given.ratio, which stays finite"
        )
        assert torch.isfinite(gradient).all(), (
            f"{name} has the gradient {gradient.tolist()} for log ratios {moved.tolist()}. Use given.ratio, "
            "which stays finite"
        )
    moved = torch.linspace(-0.3, 0.3, 6)
    whole, parts = of(everything, moved)[0], [of(at, moved)[0] for at in ((0, 1, 2), (3,), (4, 5))]
    assert torch.allclose(whole, torch.cat(parts), atol=1e-6), (
        f"{name} returns {whole.tolist()} for three samples together, but {torch.cat(parts).tolist()} for each alone. "
        "A token's loss may depend on its own sample only (given.sample_mean), because batches are split"
    )


def check_advantages(estimator: AdvantageEstimator) -> None:
    """Check that an advantage estimator returns a finite number for each reward, in their order, and twice the same.

    The better of two attempts must get the greater advantage in either order.
    """
    name = getattr(estimator, "__name__", type(estimator).__name__)
    for norm in (True, False):
        for rewards in REWARDS:
            of = Compared(rewards=rewards, groups=("g",) * len(rewards), norm_by_std=norm)
            found = estimate_advantages(name, estimator, of)
            again = estimate_advantages(name, estimator, of)
            assert found == again, f"{name} returns different values for the same input. Do not keep state"
            turned = Compared(rewards=rewards[::-1], groups=of.groups, norm_by_std=norm)
            again = estimate_advantages(name, estimator, turned)[::-1]
            same = all(math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9) for a, b in zip(found, again, strict=True))
            assert same, f"{name} returns {found} for {rewards}, but {again} for the same rewards in another order"
            best, worst = rewards.index(max(rewards)), rewards.index(min(rewards))
            assert found[best] >= found[worst], f"{name} returns {found} for {rewards}: the best attempt gets less"
    if is_step_wide(estimator):
        two = Compared(rewards=(1.0, 0.0, 0.0, 0.0), groups=("g", "g", "h", "h"))
        estimate_advantages(name, estimator, two)


# ---- backbones -------------------------------------------------------------------------------------------------------


def check_backbone(backbone_cls: Any, config: Any, *, max_tokens: int = 8) -> None:
    """Check one backbone with a config whose model it can load.

    - ``capabilities`` names existing keys, and does not reject keys that it honors;
    - ``plan`` returns lines of text without loading weights;
    - ``serve`` yields an engine and a tokenizer with a chat template, twice in a row;
    - a generation contains the prompt unchanged, one finite log-probability per token, at most ``max_tokens`` tokens
      and a matching finish reason; greedy decoding is repeatable, alone and in concurrent calls;
    - a prompt without space for an answer raises `ContextOverflow`; a canceled call leaves the engine usable.
    """
    name = backbone_cls.__name__
    check_capabilities(name, backbone_cls.capabilities)
    backbone = backbone_cls(config)
    plan = backbone.plan()
    assert isinstance(plan, Mapping), f"{name}.plan returned {plan!r}. Return a mapping of label -> text"
    assert all(isinstance(k, str) and isinstance(v, str) for k, v in plan.items()), f"{name}.plan must map text to text"
    for _ in range(2):
        with backbone.serve() as served:
            assert isinstance(served, Served), (
                f"{name}.serve yielded {served!r}. Yield Served(engine=…, tokenizer=…, name=…)"
            )
            assert isinstance(served.engine, InferenceEngine), f"{name}: the engine must be an InferenceEngine"
            assert served.tokenizer.chat_template, f"{name}: the tokenizer has no chat template"
            asyncio.run(_check_engine(name, served, max_tokens))


def check_capabilities(name: str, capabilities: Any) -> None:
    """Check the capability contract, which needs no model."""
    from astuner import AstunerSection

    assert isinstance(capabilities, Capabilities), f"{name}.capabilities must be a Capabilities"
    keys = {*capabilities.honours, *capabilities.only, *capabilities.instead}
    unknown = sorted(k for k in keys if not _is_key(AstunerSection, k.split(".")))
    assert not unknown, (
        f"{name}.capabilities names astuner.{unknown[0]}, which is not a key. Leave out the leading 'astuner.'"
    )
    both = sorted(set(capabilities.honours) & set(capabilities.instead))
    assert not both, f"{name}.capabilities both honors and refuses {', '.join(both)}"


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
    assert list(again.response_ids) == list(first.response_ids), f"{name}: greedy decoding returned different answers"
    prompts = [ids[: 1 + i % len(ids)] for i in range(CALLED_AT_ONCE)]
    together = await asyncio.gather(*(engine.generate(p, greedy, session=f"check/b{i}") for i, p in enumerate(prompts)))
    for prompt, generation in zip(prompts, together, strict=True):
        _check_generation(name, generation, prompt, max_tokens)
    end = first.response_ids[0]
    stopped = await engine.generate(
        ids, SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=(end,)), session="check/s"
    )
    got = (list(stopped.response_ids), stopped.finish_reason)
    assert got == ([end], FinishReason.STOP), (
        f"{name}: with the stop token {end} the answer is {got[0]} ({stopped.finish_reason.value}). "
        "Stop at this token and keep it"
    )
    await _check_overflow(name, engine, ids)
    call = asyncio.ensure_future(engine.generate(ids, SamplingParams(max_tokens=max_tokens), session="check/c"))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait({call})
    after = await engine.generate(ids, greedy, session="check/d")
    assert list(after.response_ids) == list(first.response_ids), f"{name}: answers differ after a canceled call"


async def _check_overflow(name: str, engine: InferenceEngine, ids: Sequence[int]) -> None:
    try:
        await engine.generate(list(ids[:1]) * engine.max_model_len, SamplingParams(max_tokens=1), session="check/o")
    except ContextOverflow:
        return
    raise AssertionError(f"{name}: a prompt as long as max_model_len leaves no space. Raise ContextOverflow")


def _check_generation(name: str, generation: Any, prompt: Sequence[int], max_tokens: int) -> None:
    assert isinstance(generation, Generation), f"{name}: generate returned {generation!r}"
    assert list(generation.prompt_ids) == list(prompt), f"{name}: prompt_ids differ from the requested prompt"
    n = len(generation.response_ids)
    assert 1 <= n <= max_tokens, f"{name}: {n} response tokens, but max_tokens is {max_tokens}"
    for value in generation.logprobs:
        assert -math.inf < value <= 1e-6, f"{name}: {value} is not a log-probability"
    if generation.finish_reason is FinishReason.LENGTH:
        assert n == max_tokens, f"{name}: the finish reason is length after {n} of {max_tokens} tokens"
