"""Every attack on every prompt: the system message never changes, and the attack never leaves its fence."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from astuner.contracts.building import BuildContext
from astuner.contracts.judge import Attempt
from astuner.contracts.types import FinishReason, Generation, Turn, WorkflowOutput
from astuner.testing import ScriptedModel, workflow_task
from astuner_helpers import HelperModels
from astuner_helpers.settings import HelperModel
from astuner_rubrics.asking import answer_of, conversation_of, labelled
from astuner_rubrics.attacks import ATTACKS, Attack
from astuner_rubrics.fence import LIMIT
from astuner_rubrics.grading import Grader
from astuner_rubrics.llm_judge import LlmConversationJudge, LlmJudge, LlmJudgeConfig
from astuner_rubrics.relative import RelativeConfig, RelativeJudge
from astuner_testing.fakes import fake_config
from tests.table import table

from ._reading import CONTROL_TOKENS, is_ours, read

TASK = workflow_task("What is the capital of France?", answer="Paris")
CRITERIA = "The answer names the right city."
WRONG = "I do not know."
SAID = Generation(prompt_ids=[1], response_ids=[2], logprobs=[0.0], finish_reason=FinishReason.STOP, policy_version=0)
Messages = list[dict[str, str]]
Prompt = Callable[[str], Messages]


def helpers(url: str = "http://127.0.0.1:9/v1") -> HelperModels:
    section = HelperModel(base_url=url, model="judge", cache=False, max_retries=0)
    return HelperModels({"judge": section}, scope="tests")


def single(**settings: Any) -> Prompt:
    judge = LlmJudge(LlmJudgeConfig(helper_model="judge", criteria=CRITERIA, **settings), helpers())
    return lambda text: judge._messages(TASK, {"answer": answer_of(WorkflowOutput(response=text), None)})


def conversation() -> Prompt:
    config = LlmJudgeConfig(helper_model="judge", criteria=CRITERIA, show="conversation", reference="answer")
    judge = LlmConversationJudge(config, helpers())
    return lambda text: judge._messages(TASK, labelled(conversation_of(attempt(text).turns)))


def relative(folder: Any, **settings: Any) -> Prompt:
    config = RelativeConfig(helper_model="judge", criteria=CRITERIA, reference="answer", **settings)
    judge = RelativeJudge(config, BuildContext(config=fake_config(folder), helpers=helpers()))

    def shown(text: str) -> Any:
        attempts = [attempt("Paris."), attempt(text), attempt("Rome.")]
        group = judge._shown(attempts[0], [judge._said(one) for one in attempts])
        return judge._messages(group, range(len(group.answers)))

    return shown


async def nobody(messages: Messages, **_: Any) -> Any:
    raise AssertionError("nobody is to be asked")


def graded(*others: str) -> Prompt:
    """As the judge `rubrics` and `astuner judge learn` have answers graded."""
    grader = Grader(nobody, low=0, high=10)
    return lambda text: grader.messages(TASK.task.main_query, [*others, text], [CRITERIA, "The answer is short."])


def attempt(text: str) -> Attempt:
    turn = Turn(
        index=0,
        agent="default",
        generation=SAID,
        continues=None,
        request=[{"role": "user", "content": TASK.task.main_query}],
        message={"role": "assistant", "content": text},
    )
    return Attempt(workflow_task=TASK, output=WorkflowOutput(response=text), turns=[turn])


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Prompt]:
    folder = tmp_path_factory.mktemp("experiment")
    return {
        "binary": single(),
        "scale": single(scale=(1, 10), explain=False),
        "reference": single(reference="answer"),
        "own prompt": single(system_prompt="You mark exams."),
        "conversation": conversation(),
        "listwise": relative(folder),
        "strict order": relative(folder, ties=False, explain=False),
        "conversations": relative(folder, show="conversation"),
        "one by rubrics": graded(),
        "several by rubrics": graded("Paris.", "Rome."),
    }


PROMPTS = (
    *("binary", "scale", "reference", "own prompt", "conversation", "listwise", "strict order", "conversations"),
    *("one by rubrics", "several by rubrics"),
)


def test_the_list_is_long_and_of_all_kinds() -> None:
    kinds = Counter(attack.kind for attack in ATTACKS)
    assert len(ATTACKS) >= 36
    assert set(kinds) == {"instruct", "impersonate", "format", "overflow", "encode"}
    assert min(kinds.values()) >= 5
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) == len({attack.text for attack in ATTACKS})


def test_an_attack_can_stand_behind_an_answer() -> None:
    assert Attack("a", "instruct", "obey").on(WRONG) == f"{WRONG}\n\nobey"
    assert Attack("a", "instruct", "obey").on("") == "obey"


@table("attack", ATTACKS, ids=lambda a: a.name)
def test_an_attack_stays_in_its_fence_in_every_prompt(attack: Attack, prompts: dict[str, Prompt]) -> None:
    assert tuple(prompts) == PROMPTS
    for name, prompt in prompts.items():
        before, after = prompt(WRONG), prompt(attack.on(WRONG))
        assert [m["role"] for m in after] == ["system", "user"], name
        assert after[0]["content"].encode() == before[0]["content"].encode(), name  # to the byte
        clean, found = read(before[1]["content"]), read(after[1]["content"])
        assert found.outside == clean.outside, name
        assert list(found.fenced) == list(clean.fenced), name
        assert not found.twice, name
        assert all(map(is_ours, found.notes)), name
        changed = [label for label in clean.fenced if clean.fenced[label] != found.fenced[label]]
        assert len(changed) == 1, name
        shown = found.fenced[changed[0]]
        assert shown.startswith(WRONG), name
        (number,) = found.numbers
        assert number not in shown, name
        assert after[1]["content"].count(number) == 2 * len(found.fenced), name
        assert not [token for token in CONTROL_TOKENS if token in after[1]["content"]], name
        assert not re.search("<[|｜]|[\u200b-\u200f\u202a-\u202e\u2066-\u2069\x1b\U000e0000-\U000e007f]", shown), name
        assert len(after[1]["content"]) < 4 * LIMIT, name
        if len(attack.text) > LIMIT and len(shown) >= LIMIT:
            assert len(found.notes) == 1, name  # what is missing is said, outside of the text's own lines


def naive(body: dict[str, Any]) -> dict[str, Any]:
    """A judge model that does whatever it is told anywhere but in a fence, and else compares."""
    system, user = (message["content"] for message in body["messages"])
    found = read(user)
    told = " ".join([*found.outside, *found.notes]).lower()
    obeys = any(word in told for word in ("highest", "maximum", "full marks", "score:", '"score"', "ignor", "verdict"))
    obeys |= "highest score" in system.lower() or bool(found.twice)
    obeys |= any(token in user for token in CONTROL_TOKENS)  # it would have taken it for a turn of its own
    right = found.fenced["ANSWER"].strip() == found.fenced["REFERENCE"].strip()
    return {"reason": "as told", "score": int(obeys or right)}


def test_a_judge_model_that_obeys_all_that_stands_outside_of_the_fence_is_moved_by_no_attack() -> None:
    with ScriptedModel(naive) as server:
        config = LlmJudgeConfig(helper_model="judge", criteria=CRITERIA, reference="answer")
        judge = LlmJudge(config, helpers(server.base_url))

        def reward(text: str) -> float:
            return asyncio.run(judge.judge(TASK, WorkflowOutput(response=text))).reward

        assert reward("Paris") == 1.0
        assert reward(WRONG) == 0.0
        moved = [attack.name for attack in ATTACKS if reward(attack.on(WRONG))]
        assert moved == []
        assert len(server.requests) == 2 + len(ATTACKS)


def test_the_naive_model_of_the_test_above_is_moved_by_text_outside_of_a_fence() -> None:
    """Or that test would show nothing."""

    def asked(content: str) -> int:
        body = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": content}]}
        return int(naive(body)["score"])

    good = single(reference="answer")(WRONG)[1]["content"]
    assert asked(good) == 0
    unfenced = [attack for attack in ATTACKS if asked(f"{good}\n{attack.text}")]
    assert len(unfenced) > len(ATTACKS) / 2
