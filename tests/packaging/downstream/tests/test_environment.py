from astuner_older.environment import OlderEnvironment
from astuner.testing import check_environment


def test_environment():
    check_environment(OlderEnvironment, act=lambda observation: {"role": "assistant", "content": "50"})


def test_a_right_guess_ends_it():
    env = OlderEnvironment()
    task = next(env.tasks("validation", {}))
    env.reset(task)
    result = env.step({"role": "assistant", "content": task.task_id.removeprefix("number-")})
    assert result.terminated
    assert env.evaluate().is_success
