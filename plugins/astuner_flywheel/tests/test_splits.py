"""Splits: nothing is lost, nothing leaks, and what was moved is said."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner import Task
from astuner_flywheel.near import NearDuplicates
from astuner_flywheel.splits import asked, separate, split


def task(text, task_id=None):
    return Task(task_id=task_id or text, main_query=text)


def distinct(n):
    return [task(f"question{i} about{i} subject{i} number{i}") for i in range(n)]


def leaks_between(train, validation, threshold=0.8):
    near = NearDuplicates(threshold)
    for each in train:
        near.keep(each.task_id, asked(each))
    return [each.task_id for each in validation if near.near(asked(each))]


def test_the_share_is_met_and_the_order_kept():
    tasks = distinct(40)
    parts = split(tasks, validation_share=0.25, seed=3)
    assert len(parts.validation) == 10
    assert parts.leaks == ()
    ids = [t.task_id for t in tasks]
    for side in (parts.train, parts.validation):
        assert [t.task_id for t in side] == [i for i in ids if i in {t.task_id for t in side}]


def test_the_same_tasks_are_split_the_same_way_in_any_order_and_otherwise_with_another_seed():
    tasks = distinct(40)
    one = {t.task_id for t in split(tasks, validation_share=0.25, seed=3).validation}
    assert {t.task_id for t in split(tasks[::-1], validation_share=0.25, seed=3).validation} == one
    assert {t.task_id for t in split(tasks, validation_share=0.25, seed=4).validation} != one


def test_near_duplicates_are_moved_to_one_side_and_reported():
    tasks = distinct(30)
    tasks += [task(t.main_query + "?", task_id=f"copy{i}") for i, t in enumerate(tasks)]
    parts = split(tasks, validation_share=0.3, seed=1)
    assert leaks_between(parts.train, parts.validation) == []
    assert parts.leaks, "a plain draw of 18 from 60 tears some of 30 pairs apart"
    on_train = {t.task_id for t in parts.train}
    for leak in parts.leaks:
        assert (leak.action == "moved to train") == (leak.task_id in on_train)
        assert (leak.like in on_train) == (leak.task_id in on_train)
    report = parts.report()
    assert report["leaks"][0] == vars(parts.leaks[0])
    assert report["train"] + report["validation"] == 60


def test_chains_stay_together():
    base = list("abcdefghijklmnopqrstuvwxyz")
    chain = []
    for step in range(12):
        changed = list(base)
        changed[:step] = [f"x{i}" for i in range(step)]
        chain.append(task(" ".join(changed), task_id=str(step)))
    parts = split([*chain, *distinct(12)], validation_share=0.3, seed=0)
    sides = {t.task_id in {t.task_id for t in parts.validation} for t in chain}
    assert len(sides) == 1


def test_one_cluster_is_not_torn_apart():
    parts = split([task("the same question", task_id=str(i)) for i in range(5)], validation_share=0.4)
    assert len(parts.train) == 5
    assert parts.validation == ()
    assert "validation is empty" in parts.notes[0]


def test_two_clusters_give_the_smaller_one_even_if_it_is_too_large():
    tasks = [task("first question of all", str(i)) for i in range(6)]
    tasks += [task("another entirely different thing", f"b{i}") for i in range(4)]
    parts = split(tasks, validation_share=0.1)
    assert [t.task_id for t in parts.validation] == ["b0", "b1", "b2", "b3"]
    assert "4 of 1 requested tasks" in parts.notes[0]


def test_small_sets_and_no_validation():
    assert split([], validation_share=0.2).train == ()
    assert len(split(distinct(1), validation_share=0.5).train) == 1
    assert len(split(distinct(2), validation_share=0.01).validation) == 1
    assert split(distinct(9), validation_share=0).validation == ()
    with pytest.raises(ValueError, match="share"):
        split([], validation_share=1.0)


def test_what_users_said_is_compared_and_not_the_system_prompt_that_all_share():
    system = {"role": "system", "content": "You are a helpful assistant of the shop. " * 20}
    one = Task(task_id="1", main_query="Where is my parcel?", init_messages=(system,))
    two = Task(task_id="2", main_query="How do I return shoes?", init_messages=(system,))
    follow_up = Task(task_id="3", main_query="yes", init_messages=({"role": "user", "content": "Shall I pay now?"},))
    parts = split([one, two, follow_up], validation_share=0.3)
    assert len(parts.validation) == 1
    assert asked(follow_up) == "Shall I pay now?\nyes"


def test_a_given_validation_set_stays_and_training_gives_way():
    validation = [task("a question of the given benchmark", "v")]
    parts = separate([task("A question of the given benchmark!", "t1"), task("another one", "t2")], validation)
    assert [t.task_id for t in parts.train] == ["t2"]
    assert [t.task_id for t in parts.dropped] == ["t1"]
    assert parts.validation == tuple(validation)
    assert parts.report()["leaks"] == [{"task_id": "t1", "like": "v", "action": "dropped from train"}]


@given(
    st.lists(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=6).map(" ".join), max_size=25),
    st.floats(0, 0.9),
    st.integers(0, 3),
)
def test_nothing_is_lost_and_equal_texts_are_on_one_side(texts, share, seed):
    tasks = [task(text, task_id=str(i)) for i, text in enumerate(texts)]
    parts = split(tasks, validation_share=share, seed=seed, threshold=0.7)
    assert sorted(t.task_id for t in (*parts.train, *parts.validation)) == sorted(t.task_id for t in tasks)
    assert not {asked(t) for t in parts.train} & {asked(t) for t in parts.validation}
