"""The kit with which an author checks a part of their own: does it keep to its contract (`astuner.contracts`)?

Each check is an ordinary function for a test.  What is wrong is an AssertionError that says what to write instead.
Training is checked end to end by a backbone's own tests; what every backbone must get right is here: the capability
contract, the plan, and an engine that returns exactly the tokens it produced.
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
"""Episodes of a workflow; attempts of a judge; calls of an engine."""
LONGEST_BLOCK = 2.0
"""Seconds; far above what a busy machine adds, far below what a person forgives."""


async def ask(function: Callable[..., Any], *arguments: Any) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    answer = await asyncio.to_thread(function, *arguments)
    return await answer if inspect.isawaitable(answer) else answer


def run(work: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """The result, and the longest time in seconds for which nothing else could run on the loop."""
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
        await asyncio.wait({watcher})  # its last beat counts what blocked to the very end
    return result, longest


async def _several(once: Callable[[], Coroutine[Any, Any, T]], at_once: int) -> list[T]:
    return await asyncio.gather(*(once() for _ in range(at_once)))


def is_finite_number(value: object) -> bool:
    return as_float(value) is not None


def _check_json(where: str, data: Any, hint: str = "", *, allow_nan: bool = False) -> None:
    try:
        json.dumps(data, allow_nan=allow_nan)
    except (TypeError, ValueError) as e:
        raise AssertionError(f"{where} does not fit into JSON: {e}{hint}") from e


# ---- task readers ----------------------------------------------------------------------------------------------------


def check_task_reader(
    reader: Any, *, splits: Sequence[Split] = (Split.TRAIN, Split.VALIDATION), first: int = 200
) -> list[Task]:
    """Check the first tasks of every split, and return those of the first one.

    - ``read`` is lazy: it returns an iterator, not a list;
    - every item is a `Task` with a label, something to ask, and data that JSON can hold;
    - reading again gives the same tasks in the same order (a resumed run depends on it);
    - two readings at the same time do not disturb each other.
    """
    name = type(reader).__name__
    found: dict[Split, list[Task]] = {}
    for split in splits:
        reading = reader.read(split)
        assert isinstance(reading, Iterator), (
            f"{name}.read({split}) returned a {type(reading).__name__}; yield the tasks instead"
        )
        tasks = found[split] = list(islice(reading, first))
        assert tasks, f"{name}.read({split}) yields no task; raise DataError when there should be some"
        for i, task in enumerate(tasks):
            _check_task(f"task {i} of {name}.read({split})", task)
        other = reader.read(split)
        again = []
        for task in islice(reader.read(split), first):
            next(other, None)  # in step with a second reading
            again.append(task)
        different = [i for i, (a, b) in enumerate(zip(tasks, again, strict=False)) if a != b]
        assert again == tasks, (
            f"{name}.read({split}) gave other tasks the second time (first difference: number "
            f"{different[0] if different else min(len(tasks), len(again))}); read in a stable order and do not shuffle"
        )
    return found[splits[0]]


def _check_task(where: str, task: Any) -> None:
    assert isinstance(task, Task), f"{where} is {task!r}; yield astuner.Task(task_id=…, main_query=…)"
    assert isinstance(task.task_id, str), f"{where} has the task_id {task.task_id!r}; make it text"
    assert task.task_id, f"{where} has no task_id; it is a label for people and logs"
    assert task.main_query or task.init_messages, (
        f"{where} ({task.task_id}) asks nothing; set main_query or init_messages"
    )
    _check_json(f"{where} ({task.task_id})", asdict(task), "; keep metadata to plain data", allow_nan=True)


# ---- workflows -------------------------------------------------------------------------------------------------------


def check_workflow(
    workflow_cls: Any, workflow_task: WorkflowTask, *, replies: Replies = ("The answer is 4.",), config: Any = None
) -> WorkflowOutput:
    """Run one workflow with a scripted model, and return what it returned.

    - it can be built without arguments, anew for every episode;
    - it asks ``model_tuner`` at least once (otherwise there is nothing to train);
    - it returns a `WorkflowOutput`; its reward is None or a finite number;
    - the same replies give the same prompts again, and 4 episodes at once do not mix;
    - as ``async def`` it does not hold up the event loop.

    :param replies: what the model says, one text per call, or a function of the prompt's text. A tool call is
        ``<tool_call>\\n{"name": "add", "arguments": {"a": 1}}\\n</tool_call>``.
    """
    name = getattr(workflow_cls, "__name__", str(workflow_cls))
    tokenizer = make_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        settings = config if config is not None else fake_config(Path(folder))

        async def once() -> tuple[Any, list[list[int]]]:
            engine = FakeEngine(replies, tokenizer)
            return await _episode(workflow_cls, workflow_task, engine, settings), [call[0] for call in engine.calls]

        (output, prompts), _ = run(once())
        # Measured the second time: the first call imports the agent's framework, once per process.
        (_, prompts_again), blocked = run(once())
        together, _ = run(_several(once, AT_ONCE))
    assert prompts, f"{name} never asked the model; pass model_tuner to the agent as its model"
    assert isinstance(output, WorkflowOutput), (
        f"{name}.execute returned {output!r}; return WorkflowOutput(reward=None, …)"
    )
    reward = output.reward
    rewards = list(reward.values()) if isinstance(reward, Mapping) else [reward]
    assert reward is None or (rewards and all(is_finite_number(r) for r in rewards)), (
        f"{name} returned the reward {reward!r}; return a finite number, a mapping of agents or roles to finite "
        "numbers, or None to ask the judge"
    )
    assert prompts_again == prompts, (
        f"{name} showed the model other prompts the second time, with the same task and replies: "
        f"{_difference(tokenizer, prompts, prompts_again)}; leave out clocks and random ids"
    )
    for _, others in together:
        assert others == prompts, (
            f"{AT_ONCE} episodes at once showed the model other prompts than one alone: "
            f"{_difference(tokenizer, prompts, others)}; keep an episode's state on self, not on class or module"
        )
    assert blocked < LONGEST_BLOCK, (
        f"{name}.execute held up the event loop for {blocked:.1f} s, and with it all other episodes; "
        "await what waits, or write a plain `def execute`, which runs in a thread of its own"
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
"""Actions that make no sense anywhere."""


def check_environment(
    env_cls: Any,
    *,
    params: Mapping[str, Any] | None = None,
    act: Callable[[str], Action] | None = None,
    steps: int = 3,
    split: str = "train",
) -> None:
    """Check one environment on its first task.

    - ``tasks`` yields tasks with different ids, the same ones every time, and refuses an unknown split with
      `ValueError`;
    - ``reset`` takes a task by its id alone, and refuses an unknown one with `ValueError`;
    - ``reset`` and ``step`` return a `StepResult` with text and JSON data, also for actions that make no sense;
    - ``evaluate`` is a finite number or an `Evaluation`, and changes nothing;
    - two instances do not disturb each other; ``close`` may be called after a failure and twice.

    :param params: what an experiment writes as ``astuner.env_service.params``.
    :param act: chooses an action (an OpenAI-style assistant message) for an observation; None always says hello.
    :param split: one of its splits.
    """
    act, params = act or (lambda observation: _reply("hello")), dict(params or {})
    name = env_cls.__name__
    env_cls = _of_today(env_cls)
    task, last = _check_tasks(name, env_cls, params, split)
    alone = []
    for other in (None, _call(name, env_cls, params)):  # the second time with another instance in step
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
        f"{name} answered {alone[1]} beside another instance, but {alone[0]} alone; keep the world's state on self"
    )
    _check_start_by_id(name, env_cls, params, task, alone[0][0])
    for action in NONSENSE:
        _check_nonsense(name, env_cls(params), task, action)
    env_cls(params).close()  # never reset: a failed start is closed too


def _of_today(env_cls: type) -> type[Environment]:
    """The class itself, or what runs one that was written for an older service."""
    if issubclass(env_cls, Environment):
        return env_cls
    wanted_by = f"{env_cls.__name__}, which is no subclass of astuner.Environment,"
    environments = find_part(load_plugins(), "environments", wanted_by=wanted_by)()
    adapted: type[Environment] | None = environments.adapt(env_cls)
    assert adapted is not None, (
        f"{env_cls.__name__} is no subclass of astuner.Environment, nor written for an older environment service"
    )
    return adapted


def _call(what: str, function: Callable[..., T], *arguments: Any) -> T:
    """What ``function`` returns, in an environment that works."""
    try:
        return function(*arguments)
    except Exception as e:
        raise AssertionError(f"{what} raised {type(e).__name__}: {e}{raised_at(e, caller=__file__)}") from e


def _check_tasks(name: str, env_cls: type[Environment], params: Mapping[str, Any], split: str) -> tuple[Task, Task]:
    """The first task, and another where there is one."""
    tasks = _call(f"{name}.tasks", lambda: list(islice(env_cls.tasks(split, params), 5)))
    assert tasks, f"{name}.tasks yields no task for the split {split!r}"
    assert all(isinstance(t, Task) for t in tasks), f"{name}.tasks must yield astuner.Task, not {tasks!r}"
    assert len({t.task_id for t in tasks}) == len(tasks), f"{name}.tasks has a task_id twice; they must differ"
    again = _call(f"{name}.tasks", lambda: list(islice(env_cls.tasks(split, params), 5)))
    assert tasks == again, f"{name}.tasks gave other tasks the second time; keep a stable order"
    _check_refuses(
        lambda: list(islice(env_cls.tasks(_NOWHERE, params), 1)),
        f"{name}.tasks gave tasks for a split that does not exist; raise ValueError, and say which splits there are",
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
                f"{name}.reset needs more than the task_id ({type(e).__name__}: {e}); the id may be all that crosses "
                "the wire, so make the rest from it"
            ) from e
    assert first == observation, f"{name}.reset showed {first!r} for the bare task_id, and {observation!r} for the task"
    with closing(env_cls(params)) as env:
        otherwise = f"{name}.reset started a task that does not exist; raise ValueError"
        _check_refuses(lambda: env.reset(Task(task_id=_NOWHERE)), otherwise)


def _check_nonsense(name: str, made: Environment, task: Task, action: Action) -> None:
    with closing(made) as env:
        try:
            env.reset(task)
            result = env.step(action)
        except Exception as e:
            raise AssertionError(
                f"{name}.step raised {type(e).__name__}: {e} for {action}; a model may say anything, so answer with an "
                "observation"
            ) from e
    _check_result(f"{name}.step with an action that makes no sense", result)


def _check_result(where: str, result: Any) -> StepResult:
    assert isinstance(result, StepResult), f"{where} returned {result!r}; return StepResult(observation=…)"
    assert isinstance(result.observation, str), f"{where}: the observation is {result.observation!r}; it must be text"
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
    assert first == second, f"{name}.evaluate gave {first} and then {second}; it must not change the world"


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
    """Check one judge on one attempt, or a group judge on all attempts of a group, and return what it says.

    - it returns a `JudgeOutput` (whose reward is finite by construction), for each attempt of a group, in their order;
    - the same attempt gets the same verdict twice, and 20 times at once;
    - in a group, whatever place it has among the others;
    - it changes neither task nor output;
    - as ``async def`` it does not hold up the event loop.

    :param output: the attempt's; of a group judge those of all attempts, or the attempts themselves where it reads
        their turns.
    """
    assert not isinstance(judge, type), f"pass a judge, not its class: check_judge({judge.__name__}(), …)"
    name = type(judge).__name__
    if isinstance(output, WorkflowOutput):
        return _check_judged(f"{name}.judge", judge.judge, (workflow_task, output), _one)
    assert isinstance(judge, GroupJudge), f"{name} judges one attempt alone: pass one output, not {len(output)}"
    attempts = [o if isinstance(o, Attempt) else Attempt(workflow_task=workflow_task, output=o) for o in output]

    def each(called: str, said: Any) -> list[JudgeOutput | JudgeFailed]:
        return _each(called, said, len(attempts))

    called = f"{name}.judge_group"
    found = _check_judged(called, judge.judge_group, (attempts,), each)
    turned_round, _ = run(ask(judge.judge_group, attempts[::-1]))
    assert _verdicts(each(called, turned_round)[::-1]) == _verdicts(found), (
        f"{called} gave {found}, and {turned_round} for the same attempts in the other order; an attempt's verdict "
        "must not depend on its place"
    )
    return found


def _one(called: str, said: Any) -> JudgeOutput:
    assert isinstance(said, JudgeOutput), f"{called} returned {said!r}; return JudgeOutput(reward=…)"
    return said


def _each(called: str, said: Any, wanted: int) -> list[JudgeOutput | JudgeFailed]:
    assert isinstance(said, (list, tuple)), f"{called} returned {said!r}; return a list with a JudgeOutput for each"
    assert len(said) == wanted, f"{called} returned {len(said)} verdicts for {wanted} attempts; return one for each"
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
        f"{called} gave {first} and then {again} for the same attempt; keep no state about an attempt"
    )
    together, blocked_together = run(_several(once, JUDGED_AT_ONCE))
    wrong = [v for v in together if _verdicts(v) != _verdicts(first)]
    assert not wrong, (
        f"asked {JUDGED_AT_ONCE} times at once, {called} gave {wrong[0]} where it gave {first} alone; "
        "it shares something between calls: keep no state on self while judging"
    )
    if given != before:
        what = "workflow task" if _tasks(given[0]) != _tasks(before[0]) else "output it was given"
        raise AssertionError(f"{called} changed the {what}; copy what you want to change")
    blocked = max(blocked, blocked_together)
    assert blocked < LONGEST_BLOCK, (
        f"{called} held up the event loop for {blocked:.1f} s, and all other episodes with it; "
        f"await what waits, or write a plain `def {called.partition('.')[2]}`, which runs in a thread of its own"
    )
    return first


def _tasks(given: WorkflowTask | Sequence[Attempt]) -> list[WorkflowTask]:
    return [given] if isinstance(given, WorkflowTask) else [attempt.workflow_task for attempt in given]


def _verdicts(said: Any) -> Any:
    """What is compared: of a failure what it says."""
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
"""What no check may fire on, unless it is there to demand a form that these do not have."""

ODD: tuple[Mapping[str, Any], ...] = (
    {},
    {"role": "assistant", "content": None},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}]},
    {"role": "assistant", "content": "", "unparsed_tool_calls": ["<tool_call>{"]},
)
"""Messages that a model can come to; a check answers for them too, whatever it says."""


def check_output_check(
    check: Callable[[OutputView], str | None],
    wrong: Sequence[str | Mapping[str, Any]],
    *,
    ordinary: Sequence[str | Mapping[str, Any]] = ORDINARY,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[str]:
    """Check one check, and return what it says about each of ``wrong``.

    - it is a plain function of one `OutputView`, and returns a text or None;
    - it fires on each of ``wrong`` and on none of ``ordinary``, and says the same twice;
    - it changes no message, and raises for none, also where one has no text.

    :param wrong: texts, or whole assistant messages, on which it must fire; at least one.
    :param ordinary: those on which it must not; by default a few texts in many languages, code and tables.
    :param tools: the OpenAI-style descriptions of the tools that were offered.
    """
    assert callable(check), f"pass the check itself, not {check!r}"
    name = getattr(check, "__name__", type(check).__name__)
    assert not isinstance(check, type), f"{name} is a class; a check is a plain function"
    assert not inspect.iscoroutinefunction(check), f"{name} is async; a check is a plain function and returns at once"
    assert wrong, f"pass at least one text on which {name} must fire; a check that never fires is of no use"
    said: list[str] = []
    for message in map(_reply, wrong):
        complaint = _complaint(check, name, message, tools)
        assert complaint, f"{name} has nothing to say about {_shown(message)}"
        assert "\n" not in complaint, f"{name} said {complaint!r}; say it in one line"
        said.append(complaint)
    for message in map(_reply, ordinary):
        complaint = _complaint(check, name, message, tools)
        assert complaint is None, (
            f"{name} said {complaint!r} about {_shown(message)}; a check that fires on ordinary text punishes good "
            "behaviour (where it is there to demand a form, pass ordinary=[…])"
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
    assert first is None or isinstance(first, str), f"{name} returned {first!r}; return a text, or None"
    assert first == again, f"{name} said {first!r} and then {again!r} about the same reply; keep no state"
    assert (message, tools) == before, f"{name} changed what it was shown; copy what you want to change"
    return first


def _reply(given: str | Mapping[str, Any]) -> Mapping[str, Any]:
    return {"role": "assistant", "content": given} if isinstance(given, str) else given


def _shown(message: Mapping[str, Any]) -> str:
    text = repr(dict(message))
    return text if len(text) <= 200 else f"{text[:200]}…"


# ---- losses and advantages -------------------------------------------------------------------------------------------


REWARDS = ((1.0, 0.0, 0.5, 0.0), (1.0, 1.0, 1.0), (0.3,), (-1e3, 1e3))
"""Groups: with different rewards, with equal ones, of one attempt, and far apart."""


def check_loss(loss: Loss, *, clip_low: float = 0.2, clip_high: float = 0.28) -> None:
    """Check one loss, on samples of several lengths; needs torch.

    - it returns a finite number for each token, with a finite gradient, also where ratios are enormous;
    - on the weights that the tokens were drawn with, a good token becomes more probable and a bad one less;
    - a token's loss depends on its own sample alone, so that it does not matter how a batch is cut into micro-batches;
    - it changes none of the tensors that it is given.

    :param clip_low: `algorithm.clip_ratio_low`; ``clip_high`` likewise.
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
        assert same, f"{name} changed a tensor that it was given; make a copy of what you change in place"
        assert found.requires_grad, f"the loss of {name} has no gradient; it must depend on given.logprobs"
        (gradient,) = torch.autograd.grad(found.sum(), logprobs)
        return found.detach(), gradient

    everything = range(len(owner))
    _, gradient = of(everything, torch.zeros(6))
    wrong = [i for i in everything if float(gradient[i] * good[i]) >= 0]
    assert not wrong, (
        f"{name}: with ratios of 1 and advantages {good.tolist()} the gradient to the log-probabilities is "
        f"{gradient.tolist()}; where the advantage is above 0 it must be below 0, for a loss is minimised"
    )
    for moved in (torch.zeros(6), torch.linspace(-1, 1, 6), torch.tensor([500.0, -500.0, 0.0, 500.0, -500.0, 0.1])):
        value, gradient = of(everything, moved)
        assert torch.isfinite(value).all(), (
            f"{name} gives {value.tolist()} where log ratios are {moved.tolist()}; take given.ratio, which stays finite"
        )
        assert torch.isfinite(gradient).all(), (
            f"{name} has the gradient {gradient.tolist()} where log ratios are {moved.tolist()}; take given.ratio, "
            "which stays finite"
        )
    moved = torch.linspace(-0.3, 0.3, 6)
    whole, parts = of(everything, moved)[0], [of(at, moved)[0] for at in ((0, 1, 2), (3,), (4, 5))]
    assert torch.allclose(whole, torch.cat(parts), atol=1e-6), (
        f"{name} gives {whole.tolist()} for three samples together and {torch.cat(parts).tolist()} for each alone; "
        "a token's loss may depend on its own sample only (given.sample_mean), for batches are cut as memory allows"
    )


def check_advantages(estimator: AdvantageEstimator) -> None:
    """Check one advantage estimator: a finite number for each reward, in their order, and the same when asked twice.

    The better of two attempts gets the greater advantage, whoever is named first.
    """
    name = getattr(estimator, "__name__", type(estimator).__name__)
    for norm in (True, False):
        for rewards in REWARDS:
            of = Compared(rewards=rewards, groups=("g",) * len(rewards), norm_by_std=norm)
            found = estimate_advantages(name, estimator, of)
            again = estimate_advantages(name, estimator, of)
            assert found == again, f"{name} answers differently when asked twice; keep no state"
            turned = Compared(rewards=rewards[::-1], groups=of.groups, norm_by_std=norm)
            again = estimate_advantages(name, estimator, turned)[::-1]
            same = all(math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9) for a, b in zip(found, again, strict=True))
            assert same, f"{name} makes {found} of {rewards}, and {again} when they come in the other order"
            best, worst = rewards.index(max(rewards)), rewards.index(min(rewards))
            assert found[best] >= found[worst], f"{name} makes {found} of {rewards}: the best attempt gets less"
    if is_step_wide(estimator):
        two = Compared(rewards=(1.0, 0.0, 0.0, 0.0), groups=("g", "g", "h", "h"))
        estimate_advantages(name, estimator, two)


# ---- backbones -------------------------------------------------------------------------------------------------------


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
    from astuner import AstunerSection

    assert isinstance(capabilities, Capabilities), f"{name}.capabilities must be a Capabilities"
    keys = {*capabilities.honours, *capabilities.only, *capabilities.instead}
    unknown = sorted(k for k in keys if not _is_key(AstunerSection, k.split(".")))
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
