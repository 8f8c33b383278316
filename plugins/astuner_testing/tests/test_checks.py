"""The conformance checks accept what keeps to a contract, and name what does not.

A check that accepts everything would be worse than none, so each breach has a broken example here.
"""

import asyncio
import importlib.metadata
import itertools
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest

from astuner import Environment, Evaluation, Judge, JudgeOutput, Task, TaskReader, Workflow, WorkflowOutput
from astuner.contracts.backbone import Capabilities, Served
from astuner.contracts.environment import StepResult
from astuner.contracts.errors import ContextOverflow, ModelFailed
from astuner.contracts.types import FinishReason, SamplingParams
from astuner.testing import (
    FakeBackbone,
    FakeEngine,
    check_backbone,
    check_environment,
    check_judge,
    check_plugin,
    check_task_reader,
    check_workflow,
    fake_config,
    make_tokenizer,
    workflow_task,
)
from astuner_testing import checks
from astuner_testing.checks import check_capabilities
from tests.table import table

TASK = workflow_task(answer="4")
OUTPUT = WorkflowOutput(metadata={"final_answer": "4"})


# ------------------------------------------------------------------------------------------------- fakes


def generate(engine, ids, **sampling):
    return asyncio.run(engine.generate(ids, SamplingParams(**{"max_tokens": 50, **sampling})))


def test_the_tokenizer_is_lossless_and_has_a_template_with_tools():
    tokenizer = make_tokenizer()
    text = "naïve 日本 🎈\n\t<x>"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {}}}}}]
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    shown = tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "1 + 1?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "2"},
        ],
        tools=tools,
        add_generation_prompt=True,
        tokenize=False,
    )
    for part in ("Be brief.", '"name": "add"', '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'):
        assert part in shown
    assert shown.endswith("<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


def test_the_engine_says_its_replies_in_order_and_then_fails():
    engine = FakeEngine(["one", "two"])
    ids = engine.tokenizer.encode("x", add_special_tokens=False)
    said = [engine.tokenizer.decode(generate(engine, ids).response_ids, skip_special_tokens=True) for _ in range(2)]
    assert said == ["one", "two"]
    with pytest.raises(ModelFailed, match="2 replies"):
        generate(engine, ids)


def test_the_engine_keeps_to_lengths():
    engine = FakeEngine(lambda prompt: f"you said {prompt}", max_model_len=10)
    ids = engine.tokenizer.encode("hello", add_special_tokens=False)
    short = generate(engine, ids)
    assert (len(short.response_ids), short.finish_reason) == (5, FinishReason.LENGTH)
    assert len(generate(engine, ids, max_tokens=2).response_ids) == 2
    with pytest.raises(ContextOverflow):
        generate(engine, ids * 2)


# ------------------------------------------------------------------------------------------------ judges


class GoodJudge(Judge):
    def judge(self, workflow_task, output):
        return JudgeOutput(reward=float(output.metadata["final_answer"] == workflow_task.task.metadata["answer"]))


class GoodAsyncJudge(GoodJudge):
    async def judge(self, workflow_task, output):
        await asyncio.sleep(0)
        return super().judge(workflow_task, output)


@table("judge", [GoodJudge(), GoodAsyncJudge()])
def test_good_judges_pass(judge):
    assert check_judge(judge, TASK, OUTPUT).reward == 1.0


def bad_judge(body):
    return type("BadJudge", (Judge,), {"judge": body})()


async def blocking_async(self, task, output):
    time.sleep(0.05)
    return JudgeOutput(reward=1.0)


async def shared(self, task, output):
    self.answer = object()
    mine = self.answer
    await asyncio.sleep(0)
    return JudgeOutput(reward=float(self.answer is mine))


counter = itertools.count()


@table(
    ("body", "says"),
    [
        (lambda self, task, output: (1.0, True), "Return JudgeOutput"),
        (lambda self, task, output: JudgeOutput(reward=next(counter)), "for the same attempt"),
        (lambda self, task, output: output.metadata.clear() or JudgeOutput(reward=1.0), "changed the output"),
        (lambda self, task, output: task.task.metadata.clear() or JudgeOutput(reward=1.0), "changed the workflow task"),
        (shared, "do not keep state on self"),
        (blocking_async, "blocked the event loop"),
    ],
)
def test_bad_judges_are_named(body, says, monkeypatch):
    monkeypatch.setattr("astuner_testing.checks.LONGEST_BLOCK", 0.5)  # 20 at once, 0.05 s each
    with pytest.raises(AssertionError, match=says):
        check_judge(bad_judge(body), workflow_task(answer="4"), WorkflowOutput(metadata={"final_answer": "4"}))


def test_a_judge_class_is_not_a_judge():
    with pytest.raises(AssertionError, match=r"GoodJudge\(\)"):
        check_judge(GoodJudge, TASK, OUTPUT)


def test_the_heartbeat_sees_a_block_at_the_very_end():
    async def work():
        await asyncio.sleep(0.01)
        time.sleep(0.3)
        return 5

    result, blocked = checks.run(work())
    assert result == 5
    assert blocked > 0.2


# ------------------------------------------------------------------------------------------ task readers


class GoodReader(TaskReader):
    def read(self, split):
        for i in range(3):
            yield Task(task_id=f"{split.value}-{i}", main_query="?", metadata={"answer": i})


def test_good_readers_pass():
    assert len(check_task_reader(GoodReader())) == 3


def bad_reader(body):
    return type("BadReader", (TaskReader,), {"read": body})()


class Forgetful(TaskReader):
    """Yields its tasks once."""

    def __init__(self):
        self.left = [Task(task_id=str(i), main_query="?") for i in range(6)]

    def read(self, split):
        while self.left:
            yield self.left.pop()


class OneCursor(TaskReader):
    """Two readings at once share a position."""

    def read(self, split):
        self.at = 0
        while self.at < 4:
            yield Task(task_id=str(self.at), main_query="?")
            self.at += 1


@table(
    ("reader", "says"),
    [
        (bad_reader(lambda self, split: [Task(task_id="1", main_query="?")]), "Yield the tasks"),
        (bad_reader(lambda self, split: iter(())), "yielded no tasks"),
        (bad_reader(lambda self, split: iter([{"query": "?"}])), r"Yield astuner\.Task"),
        (bad_reader(lambda self, split: iter([Task(task_id="", main_query="?")])), "empty task_id"),
        (bad_reader(lambda self, split: iter([Task(task_id=7, main_query="?")])), "task_id 7"),
        (bad_reader(lambda self, split: iter([Task(task_id="1")])), "contains no question"),
        (bad_reader(lambda s, split: iter([Task(task_id="1", main_query="?", metadata={"x": {1}})])), "JSON"),
        (bad_reader(lambda s, split: iter([Task(task_id=str(next(counter)), main_query="?")])), "stable order"),
        (Forgetful(), "different tasks the second time"),
        (OneCursor(), "different tasks the second time"),
    ],
)
def test_bad_readers_are_named(reader, says):
    with pytest.raises(AssertionError, match=says):
        check_task_reader(reader)


# --------------------------------------------------------------------------------------------- workflows

ASK = [{"role": "user", "content": "?"}]


class GoodWorkflow(Workflow):
    async def execute(self, workflow_task, model_tuner):
        reply = await model_tuner.chat([{"role": "user", "content": workflow_task.task.main_query}])
        return WorkflowOutput(metadata={"final_answer": reply.text})


class GoodSyncWorkflow(Workflow):
    def execute(self, workflow_task, model_tuner):
        reply = model_tuner.chat_sync([{"role": "user", "content": workflow_task.task.main_query}])
        return WorkflowOutput(reward=1.0, metadata={"final_answer": reply.text})


@table("workflow", [GoodWorkflow, GoodSyncWorkflow])
def test_good_workflows_pass(workflow):
    assert check_workflow(workflow, TASK, replies=["42"]).metadata["final_answer"] == "42"


def bad_workflow(body):
    return type("BadWorkflow", (Workflow,), {"execute": body})


async def asks_nothing(self, task, tuner):
    return WorkflowOutput(reward=1.0)


async def returns_text(self, task, tuner):
    return (await tuner.chat(ASK)).text


async def nan_reward(self, task, tuner):
    await tuner.chat(ASK)
    return WorkflowOutput(reward=float("nan"))


async def random_prompt(self, task, tuner):
    await tuner.chat([{"role": "user", "content": str(next(counter))}])
    return WorkflowOutput(reward=1.0)


async def on_the_class(self, task, tuner):
    kind = type(self)
    kind.said = [*getattr(kind, "said", []), *ASK]
    await asyncio.sleep(0.01)
    await tuner.chat(kind.said or ASK)
    kind.said = []
    return WorkflowOutput(reward=1.0)


async def blocks(self, task, tuner):
    await tuner.chat(ASK)
    time.sleep(0.4)
    return WorkflowOutput(reward=1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "says"),
    [
        (asks_nothing, "never called the model"),
        (returns_text, "Return WorkflowOutput"),
        (nan_reward, "finite number"),
        (random_prompt, r"the second time.*call 0"),
        (on_the_class, "4 concurrent episodes"),
        (blocks, "blocked the event loop"),
    ],
)
def test_bad_workflows_are_named(body, says, monkeypatch):
    monkeypatch.setattr("astuner_testing.checks.LONGEST_BLOCK", 0.3)
    with pytest.raises(AssertionError, match=f"(?s){says}"):
        check_workflow(bad_workflow(body), TASK, replies=["fine"])


# ------------------------------------------------------------------------------------------ environments


class GoodWorld(Environment):
    @classmethod
    def tasks(cls, split, params):
        if split != "train":
            raise ValueError(f"no split is called {split}; there is train")
        yield Task(task_id="1", main_query="?")
        yield Task(task_id="2", main_query="?")

    def reset(self, task):
        if task.task_id not in ("1", "2"):
            raise ValueError(f"no task is called {task.task_id}")
        self.said = 0
        return StepResult(observation=f"task {task.task_id}")

    def step(self, action):
        self.said += 1
        return StepResult(observation=f"step {self.said}", terminated=self.said == 3)

    def evaluate(self):
        return Evaluation(score=float(self.said), details={"said": self.said})


class BareWorld(GoodWorld):
    """A number is short for an evaluation."""

    def evaluate(self):
        return float(self.said)


@table("world", [GoodWorld, BareWorld])
def test_good_environments_pass(world):
    check_environment(world)


def bad_world(**changes):
    return type("BadWorld", (GoodWorld,), changes)


class CommonWorld(GoodWorld):
    """Keeps its state where every instance sees it."""

    def reset(self, task):
        super().reset(task)
        CommonWorld.common = 0
        return StepResult(observation="start")

    def step(self, action):
        CommonWorld.common += 1
        return StepResult(observation=f"step {CommonWorld.common}")

    def evaluate(self):
        return 0.0


class CountingWorld(GoodWorld):
    def evaluate(self):
        self.said += 1
        return float(self.said)


class NeedsMore(GoodWorld):
    def reset(self, task):
        return StepResult(observation=f"{super().reset(task).observation} {task.main_query[0]}")


class Picky(GoodWorld):
    def step(self, action):
        return StepResult(observation=f"You said {action['content'][0]}")


def raises(*_):
    raise KeyError("lost")


def any_split(cls, split, params):
    yield from GoodWorld.tasks("train", params)


def twice(cls, split, params):
    for task in GoodWorld.tasks(split, params):
        yield from (task, task)


@table(
    ("world", "says"),
    [
        (bad_world(tasks=classmethod(lambda cls, split, params: iter(()))), "no task"),
        (bad_world(tasks=classmethod(lambda cls, split, params: iter([1]))), r"must yield astuner\.Task"),
        (bad_world(tasks=classmethod(any_split)), "a split that does not exist"),
        (bad_world(tasks=classmethod(twice)), "a task_id twice"),
        (bad_world(reset=lambda self, task: "start"), "Return StepResult"),
        (bad_world(reset=lambda self, task: StepResult(observation=None)), "must be text"),
        (bad_world(reset=lambda self, task: setattr(self, "said", 0) or StepResult(observation="")), "does not exist"),
        (NeedsMore, "needs more than the task_id"),
        (Picky, "A model may send anything"),
        (bad_world(step=lambda self, action: StepResult(observation="", reward=float("inf"))), "not a finite number"),
        (bad_world(step=lambda self, action: StepResult(observation="", terminated=1)), "True or False"),
        (bad_world(step=lambda self, action: StepResult(observation="", messages=[{"content": ""}])), "no role"),
        (bad_world(describe=lambda self: {"rules": {1}}), "JSON"),
        (bad_world(evaluate=lambda self: None), "not a finite number"),
        (bad_world(evaluate=lambda self: Evaluation(score=float("nan"))), "must be a finite number"),
        (bad_world(evaluate=lambda self: Evaluation(score=0.0, details={"x": float("nan")})), "JSON"),
        (CountingWorld, "must not change the state"),
        (CommonWorld, "next to another instance"),
        *[
            (bad_world(**{name: raises}), rf"BadWorld\.{name} raised KeyError: 'lost' \(\S+\.py:\d+ in raises\)")
            for name in ("reset", "step", "evaluate", "describe", "close")
        ],
        (bad_world(tasks=raises), r"BadWorld\.tasks raised KeyError: 'lost' \(\S+\.py:\d+ in raises\)"),
        (bad_world(__init__=raises), r"BadWorld raised KeyError: 'lost' \(\S+\.py:\d+ in raises\)"),
    ],
)
def test_bad_environments_are_named(world, says):
    with pytest.raises(AssertionError, match=says):
        check_environment(world)


# --------------------------------------------------------------------------------------------- backbones


@pytest.fixture
def config(tmp_path):
    return fake_config(tmp_path)


def test_a_good_backbone_passes(config):
    check_backbone(FakeBackbone, config)


def broken_engine(**changes):
    """A backbone whose engine returns generations changed like this."""

    class Engine(FakeEngine):
        async def generate(self, prompt_ids, sampling, *, session=""):
            return changes["change"](await super().generate(prompt_ids, sampling, session=session))

    class Backbone(FakeBackbone):
        @contextmanager
        def serve(self, model_path=None):
            tokenizer = make_tokenizer()
            yield Served(engine=Engine(self.replies, tokenizer), tokenizer=tokenizer, name="broken")

    return Backbone


def cut(generation):
    """Three tokens, and says it was the length limit."""
    return replace(
        generation,
        response_ids=generation.response_ids[:3],
        logprobs=generation.logprobs[:3],
        finish_reason=FinishReason.LENGTH,
    )


def without_overflow():
    class Backbone(FakeBackbone):
        @contextmanager
        def serve(self, model_path=None):
            tokenizer = make_tokenizer()
            engine = FakeEngine(self.replies, tokenizer)
            engine.max_model_len = 50
            inner = FakeEngine(self.replies, tokenizer)
            engine.generate = inner.generate
            yield Served(engine=engine, tokenizer=tokenizer, name="endless")

    return Backbone


@table(
    ("backbone", "says"),
    [
        (type("B", (FakeBackbone,), {"plan": lambda self: {"memory": 3}}), "text to text"),
        (broken_engine(change=lambda g: replace(g, prompt_ids=(1, *g.prompt_ids))), "prompt_ids differ"),
        (broken_engine(change=lambda g: replace(g, logprobs=tuple(0.5 for _ in g.logprobs))), "not a log-probability"),
        (broken_engine(change=cut), "finish reason is length"),
        (
            broken_engine(change=lambda g: replace(g, response_ids=(*g.response_ids, 1), logprobs=(*g.logprobs, -1.0))),
            "max_tokens is",
        ),
        (without_overflow(), "Raise ContextOverflow"),
    ],
)
def test_bad_backbones_are_named(backbone, says, config):
    with pytest.raises(AssertionError, match=says):
        check_backbone(backbone, config)


@table(
    ("capabilities", "says"),
    [
        (Capabilities(honours=frozenset({"astuner.model.path"})), "leading 'astuner.'"),
        (Capabilities(honours=frozenset({"model.pth"})), "not a key"),
        (Capabilities(honours=frozenset({"model.lora"}), instead={"model.lora": "no"}), "both honors and refuses"),
        ({"model.path"}, "must be a Capabilities"),
    ],
)
def test_bad_capabilities_are_named(capabilities, says):
    with pytest.raises(AssertionError, match=says):
        check_capabilities("B", capabilities)


# ----------------------------------------------------------------------------------------------- plugins


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Make an importable plugin with metadata, as an editable install would."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = itertools.count()

    def make(hook, *, extra="", requires=("astuner-core>=0.1,<0.2",), name="shop"):
        module = f"shop{next(made)}_{tmp_path.name.replace('-', '_')}"
        (tmp_path / f"{module}.py").write_text("from astuner import Provider, hookimpl\n" + hook + extra)
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        needs = "".join(f"Requires-Dist: {text}\n" for text in requires)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n{needs}\n")
        (info / "entry_points.txt").write_text(f"[astuner]\n{name} = {module}\n")
        importlib.invalidate_caches()
        return module

    return make


def offers(target, **more):
    """A plugin module that registers a judge like this."""
    settings = {"summary": "says yes", **more}
    words = ", ".join(f"{key}={value!r}" for key, value in settings.items())
    return (
        f"@hookimpl\ndef register_judges():\n    return {{'yes': Provider(target=__name__ + ':{target}', {words})}}\n"
    )


CLASSES = """
from pydantic import BaseModel, ConfigDict
from astuner import Judge, JudgeOutput

class Yes(Judge):
    def judge(self, workflow_task, output):
        return JudgeOutput(reward=1.0)

class Unfinished(Judge):
    pass

def made(config) -> Judge:
    return Yes()

def made_of_something(config):
    return Yes()
"""
CONFIGS = """
class Documented(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    strict: bool = True
    \"\"\"Whether no means no.\"\"\"

class Bare(BaseModel):
    model_config = ConfigDict(extra="forbid")
    strict: bool = True

class Loose(BaseModel):
    pass
"""


@pytest.mark.parametrize("target", ["Yes", "made"])
def test_a_good_plugin_passes(install, target):
    install(offers(target), extra=CLASSES)
    assert check_plugin("shop").provides["judge"]["yes"].summary == "says yes"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "options", "says"),
    [
        (offers("Yes", summary=""), {}, "has no summary"),
        (offers("Yes", summary="Says yes."), {}, "period"),
        (offers("Yes", summary="yes " * 30), {}, "one line"),
        (offers("Unfinished"), {}, "does not implement judge"),
        (offers("made_of_something"), {}, "without the return type Judge"),
        (offers("JudgeOutput"), {}, r"subclass of astuner\.Judge"),
        (offers("Yes", requires=("no_such_module",)), {}, "Set install="),
        (offers("Yes"), {"requires": ()}, "does not depend on astuner-core"),
        (offers("Yes"), {"requires": ("astuner-core>=0.1",)}, "any later"),
        (offers("Yes"), {"requires": ("astuner-core<0.1",)}, "incompatible"),
        ("import matplotlib\n" + offers("Yes"), {}, "imports matplotlib"),
        ("import no_such_module\n" + offers("Yes"), {}, "importing .* fails:.*no_such_module"),
        ("", {}, "registers nothing"),
        ("@hookimpl\ndef register_judgez():\n    return {}\n", {}, "broken"),
    ],
)
def test_bad_plugins_are_named(install, hook, options, says):
    install(hook, extra=CLASSES, **options)
    with pytest.raises(AssertionError, match=f"(?s){says}"):
        check_plugin("shop")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "says"), [("Documented", None), ("Bare", "not documented"), ("Loose", "misspelled"), ("Yes", "pydantic")]
)
def test_a_plugins_config_is_checked(install, config, says, tmp_path):
    hook = offers("Yes").replace("summary=", f'config=__name__ + ":{config}", summary=')
    install(hook, extra=CLASSES + CONFIGS)
    if says is None:
        check_plugin("shop")
        return
    with pytest.raises(AssertionError, match=says):
        check_plugin("shop")


def test_a_plugin_that_is_not_there_or_there_twice(install):
    with pytest.raises(AssertionError, match=r"entry-points\.astuner"):
        check_plugin("nowhere")
    install(offers("Yes"), extra=CLASSES)
    install(offers("Yes"), extra=CLASSES)
    with pytest.raises(AssertionError, match="2 installed distributions"):
        check_plugin("shop")
