"""`astuner chat`: what it asks the model, what it shows, and what it says where it cannot."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from astuner.cli import main
from astuner.testing import FakeBackbone, FakeEngine, fake_config, make_tokenizer
from astuner_debug import chat_command


@pytest.fixture
def astuner_command(capsys):
    """Run a command line; gives its exit code, stdout and stderr."""

    def run(*arguments):
        with pytest.raises(SystemExit) as e:
            main(list(arguments))
        shown = capsys.readouterr()
        return SimpleNamespace(code=e.value.code or 0, out=shown.out, err=shown.err)

    return run


@pytest.fixture
def chat_with(monkeypatch):
    """Let `astuner chat` talk to a fake engine."""

    def serve(replies, **rollout):
        from contextlib import contextmanager

        from astuner import Serving
        from astuner.chat.codec import ChatCodec
        from astuner.rollout.models import one_model

        tokenizer = make_tokenizer()
        engine = FakeEngine(replies, tokenizer)
        settings = {"max_response_length_in_one_turn": 200, **rollout}
        config = SimpleNamespace(astuner=SimpleNamespace(rollout=SimpleNamespace(**settings)))
        served = SimpleNamespace(engine=engine, tokenizer=tokenizer, name="fake")

        @contextmanager
        def fake(*_, **__):
            models = one_model(engine, ChatCodec(tokenizer))
            yield Serving(config=config, served=dict.fromkeys(models, served), models=models)

        monkeypatch.setattr("astuner_models.serving.serve", fake)
        return engine

    return serve


def typing(monkeypatch, *lines):
    left = iter(lines)

    def read(prompt):
        line = next(left, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", read)


def test_chat_one_message(astuner_command, chat_with):
    chat_with(["Hello, Ada."])
    assert astuner_command("chat", "x.yaml", "--message", "I am Ada").out == "Hello, Ada.\n"
    chat_with(["Hello, Ada."])
    answer = json.loads(astuner_command("chat", "x.yaml", "--message", "I am Ada", "--json").out)
    assert answer["message"]["content"] == "Hello, Ada."
    assert answer["response_tokens"] == len("Hello, Ada.") + 1


def test_chat_remembers_and_forgets(astuner_command, chat_with, monkeypatch):
    engine = chat_with(["one", "two", "three"])
    typing(monkeypatch, "first", "second", "/tokens", "/reset", "third", "/what", "/exit")
    result = astuner_command("chat", "x.yaml")
    assert result.code == 0
    prompts = [engine.tokenizer.decode(ids) for ids, *_ in engine.calls]
    assert "first" in prompts[1]
    assert "one" in prompts[1]
    assert "first" not in prompts[2]
    assert engine.calls[1][0][: len(engine.calls[0][0])] == engine.calls[0][0]  # continued, not rendered again
    assert "4 response tokens" in result.out  # t w o <|im_end|>
    assert result.out.count("/exit quits") == 2


def test_chat_ends_with_the_input(astuner_command, chat_with, monkeypatch):
    chat_with([])
    typing(monkeypatch)
    assert astuner_command("chat", "x.yaml").code == 0


def test_chat_json_needs_a_message(astuner_command, chat_with):
    chat_with([])
    assert "--message TEXT" in astuner_command("chat", "x.yaml", "--json").err


def test_tool_calls_are_shown():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    answer = {
        "turns": [
            {"request": [{"role": "user", "content": "1 + 1?"}], "message": {"content": "", "tool_calls": [call]}},
            {"request": [{"role": "tool", "content": "2"}], "message": {"content": "It is 2."}},
        ],
        "stop_reason": "judge_failed",
        "error": "no answer key",
    }
    assert (
        chat_command._shown(answer)
        == '  calls add({"a": 1})\n  tool: 2\nIt is 2.\n(not judged: a typed question has no reference answer)'
    )


@pytest.fixture
def little_agent(tmp_path, monkeypatch):
    """An experiment whose workflow asks twice, served by a fake backbone."""
    (tmp_path / "workflow.py").write_text(
        "from astuner import Workflow, WorkflowOutput\n"
        "class Twice(Workflow):\n"
        "    async def execute(self, task, tuner):\n"
        "        first = {'role': 'user', 'content': task.task.main_query}\n"
        "        reply = await tuner.chat([first])\n"
        "        await tuner.chat([first, reply.message, {'role': 'user', 'content': 'Sure?'}])\n"
        "        return WorkflowOutput(reward=float(task.task.metadata['answer']))\n"
    )
    _serve_fake(monkeypatch, fake_config(tmp_path, "  rollout:\n    workflow: workflow.py->Twice\n"))


@pytest.fixture
def acting_agent(tmp_path, monkeypatch):
    """One whose workflow acts in an environment."""
    (tmp_path / "workflow.py").write_text(
        "from astuner import Workflow, WorkflowOutput\n"
        "class Acting(Workflow):\n"
        "    async def execute(self, task, tuner):\n"
        "        rules, seen = task.task.init_messages\n"
    )
    reader = "  task_reader:\n    type: env_service\n    env_service:\n      env_type: lake\n"
    _serve_fake(monkeypatch, fake_config(tmp_path, f"  rollout:\n    workflow: workflow.py->Acting\n{reader}"))


def _serve_fake(monkeypatch, config):
    monkeypatch.setattr("astuner_models.serving.load_config", lambda *_, **__: config)
    monkeypatch.setattr("astuner_models.serving.find_checkpoint", lambda *_: None)
    monkeypatch.setattr("astuner_models.serving.find_backbone", lambda *_: (FakeBackbone(config), ()))


def test_chat_with_the_workflow_shows_every_turn_and_why_there_is_no_reward(astuner_command, little_agent):
    result = astuner_command("chat", "x.yaml", "--workflow", "--message", "What is 2 + 2?")
    assert result.code == 1, "a workflow that failed is no success"
    answer, question, again, note = result.out.splitlines()
    assert (answer, question, again) == ("The answer is 4.", "  user: Sure?", "The answer is 4.")
    assert note.startswith("(workflow_failed: the workflow raised KeyError: 'answer'")
    result = astuner_command("chat", "x.yaml", "--workflow", "--message", "What is 2 + 2?", "--json")
    assert result.code == 1
    assert [t["message"]["content"] for t in json.loads(result.out)["turns"]] == ["The answer is 4."] * 2
    assert "environment" not in json.loads(result.out)["error"]


def test_a_typed_message_has_no_environment_and_chat_says_what_has(astuner_command, acting_agent):
    result = astuner_command("chat", "x.yaml", "--workflow", "--message", "Go right")
    assert result.code == 1
    assert result.out.startswith("(workflow_failed: the workflow raised ValueError: not enough values to unpack")
    assert "a typed message has none" in result.out
    assert "astuner run " in result.out
    assert "astuner env try NAME" in result.out


@pytest.mark.parametrize(("reward", "code"), [("1.0", 0), ("None", 0)])
def test_chat_with_a_workflow_that_answers_is_a_success_judged_or_not(
    astuner_command, little_agent, tmp_path, reward, code
):
    file = tmp_path / "workflow.py"
    file.write_text(file.read_text().replace("float(task.task.metadata['answer'])", reward))
    assert astuner_command("chat", "x.yaml", "--workflow", "--message", "What is 2 + 2?").code == code
