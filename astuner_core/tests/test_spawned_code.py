"""Functions and classes of a user's file can be used in processes that the run starts."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from astuner import import_user_code

FILE = """
import dataclasses
import enum
import functools
import pathlib

from beside import double

HERE = pathlib.Path(__file__).parent.name


def length(text):
    return len(text)


def of_another_file(number):
    return double(number)


def folder(_):
    return HERE


def fails(text):
    raise Wrong(text)


class Wrong(Exception):
    pass


@dataclasses.dataclass
class Graded:
    text: str

    def __call__(self, more):
        return Graded(self.text + more)

    @staticmethod
    def static(text):
        return text.upper()

    @classmethod
    def of(cls, text):
        return cls(text)

    class Inner:
        def __call__(self, number):
            return number + 1


class Colour(enum.Enum):
    RED = 1


def colour(_):
    return Colour.RED


@functools.cache
def cached(number):
    return number * 3


PARTIAL = functools.partial(max, 5)
"""


@pytest.fixture(scope="module")
def user_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experiment")
    (folder / "agent.py").write_text(FILE)
    (folder / "beside.py").write_text("def double(number):\n    return 2 * number\n")
    other = folder / "other"
    other.mkdir()
    (other / "agent.py").write_text("def length(text):\n    return -1\n")
    return folder / "agent.py"


def _of(file: Path, name: str) -> Any:
    return import_user_code(f"{file}->{name}")


CASES: dict[str, tuple[str, Any, Any]] = {
    "function": ("length", "abc", 3),
    "function that uses a file beside it": ("of_another_file", 4, 8),
    "value of the module": ("folder", None, "experiment0"),
    "static method": ("Graded.static", "a", "A"),
    "class method": ("Graded.of", "a", "a"),
    "cached function": ("cached", 2, 6),
    "partial": ("PARTIAL", 7, 7),
    "enum": ("colour", None, 1),
}


def _plain(value: Any) -> Any:
    return getattr(value, "text", getattr(value, "value", value))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_pool_runs_code_of_the_user(method: str, user_file: Path, subtests: pytest.Subtests) -> None:
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        for name, (attribute, argument, expected) in CASES.items():
            with subtests.test(name):
                first, *rest = attribute.split(".")
                code = _of(user_file, first)
                for part in rest:
                    code = getattr(code, part)
                assert _plain(pool.submit(code, argument).result(60)) == expected
        with subtests.test("instance"):
            graded = _of(user_file, "Graded")
            assert pool.submit(graded("a"), "b").result(60) == graded("ab")
        with subtests.test("instance of an inner class"):
            assert pool.submit(_of(user_file, "Graded").Inner(), 1).result(60) == 2
        with subtests.test("exception"), pytest.raises(_of(user_file, "Wrong"), match="no"):
            pool.submit(_of(user_file, "fails"), "no").result(60)
        with subtests.test("another file of the same name"):
            assert pool.submit(_of(user_file.parent / "other" / "agent.py", "length"), "abc").result(60) == -1
    with context.Pool(1) as workers, subtests.test("Pool"):
        assert workers.map(_of(user_file, "length"), ["a", "bb"]) == [1, 2]
    with subtests.test("Process"):
        process = context.Process(target=_of(user_file, "length"), args=("abc",))
        process.start()
        process.join(60)
        assert process.exitcode == 0


@pytest.mark.slow
def test_a_module_is_importable_wherever_sys_path_is_passed_on(user_file: Path) -> None:
    pickled = pickle.dumps(_of(user_file, "length"))
    code = f"import sys, pickle; sys.path[:] = {sys.path!r}; print(pickle.loads({pickled!r})('abcd'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "4\n"


def test_what_was_made_for_it_is_removed(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("x = 1\n")
    code = (
        "import os, sys, tempfile; from astuner import import_user_code\n"
        f"import_user_code({str(tmp_path / 'agent.py')!r} + '->x')\n"
        "child = os.fork()\n"
        "if not child: sys.exit()\n"
        "os.waitpid(child, 0)\n"
        "print(len(os.listdir(tempfile.gettempdir())))\n"
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    env = {"TMPDIR": str(temporary), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout == "1\n"  # a fork that ends removes nothing
    assert list(temporary.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_uses_stays(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(): ...\n")
    code = (
        "import sys, tempfile, time\nfrom pathlib import Path\nfrom astuner import import_user_code\n"
        "import_user_code('mine.py->f', Path.cwd())\nprint('ready', flush=True)\ntime.sleep(float(sys.argv[1]))\n"
    )

    def start(seconds: float) -> subprocess.Popen[str]:
        environ = {**os.environ, "TMPDIR": str(tmp_path)}
        command = [sys.executable, "-c", code, str(seconds)]
        child = subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    def folders() -> set[str]:
        return {path.name for path in tmp_path.glob("astuner-user-code-*")}

    with start(60) as killed:
        (of_killed,) = folders()
        killed.kill()
    with start(60) as living:
        assert of_killed not in folders()
        (of_living,) = folders()
        with start(0) as last:
            assert last.wait() == 0
        assert folders() == {of_living}
        living.kill()
