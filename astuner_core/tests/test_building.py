"""How what an experiment names is made: by `from_config`, or, where there is none, by the names of parameters."""

from pathlib import Path
from typing import Any

import pytest

from astuner import Backbone, BuildContext, Judge, RunDir, Workflow
from astuner.contracts.errors import PluginError
from astuner.rollout.parts import BY_NAME, build, build_judge, build_task_reader, make_judge, workflow_factory
from astuner.testing import fake_config
from tests.table import table

CODE = """
from astuner import Judge, TaskReader, Workflow

class W(Workflow):
    def __init__(self, temperature):
        self.temperature = temperature

    async def execute(self, workflow_task, model_tuner):
        ...

class Typed(W):
    @classmethod
    def from_config(cls, section, context):
        return cls(context.config.astuner.rollout.temperature)

class J(Judge):
    def __init__(self, config, seed=3):
        self.config, self.seed = config, seed

    def judge(self, workflow_task, output):
        ...

class Other(Judge):
    \"\"\"Decides which judge it is.\"\"\"

    @classmethod
    def from_config(cls, section, context):
        assert section is None
        return J(context.base_dir, context.seed)

    def judge(self, workflow_task, output):
        ...

class Plain:  # as the first judges were: no subclass of anything
    def __init__(self, config, *, experiment, base_dir):
        self.given = config, experiment, base_dir

    def compute_reward(self, workflow_task, output):
        ...

class R(TaskReader):
    def __init__(self, base_dir, on_bad_line="stop", dry_run=False, what="mine"):
        self.given = base_dir, on_bad_line, dry_run, what

    def read(self, split):
        ...

def make(config, *, experiment):
    return J(config)

class Raises(J):
    def __init__(self):
        raise KeyError("oh")

class Optional(J):
    def __init__(self, config=None):
        super().__init__(config)
"""


@pytest.fixture
def config(tmp_path: Path) -> Any:
    (tmp_path / "mine.py").write_text(CODE)
    return fake_config(tmp_path, "  seed: 8\n  rollout: {temperature: 0.5, workflow: mine.py->W}\n")


def made(config: Any, name: str) -> Any:
    return make_judge(f"mine.py->{name}", None, BuildContext(config=config))


def test_a_constructor_that_wants_what_nobody_gives_is_refused_with_what_to_write(config: Any) -> None:
    with pytest.raises(PluginError) as e:
        workflow_factory(config)
    line = CODE[: CODE.index("def __init__")].count("\n") + 1
    said = str(e.value)
    assert said.startswith(f"{config.base_dir / 'mine.py'}:{line}: W requires temperature, ")
    assert (
        "@classmethod def from_config(cls, section, context): return cls(temperature=…), where context.config" in said
    )


def test_it_is_made_by_its_from_config(config: Any) -> None:
    typed = build("workflow", "mine.py->Typed", None, BuildContext(config=config))
    assert typed.temperature == 0.5
    other = made(config, "Other")
    assert (other.config, other.seed) == (config.base_dir, 8)


def test_one_written_before_says_by_names_what_it_wants(config: Any) -> None:
    assert made(config, "J").config is config
    assert made(config, "make").config is config
    assert made(config, "Optional").config is None
    assert made(config, "Plain").given == (config, config, config.base_dir)
    reader = build_task_reader(
        fake_config(config.base_dir, "  task_reader: {type: mine.py->R}\n  data: {on_bad_line: skip}\n"), dry_run=True
    )
    assert reader.given == (config.base_dir, "skip", True, "mine")
    assert sorted(BY_NAME) == ["base_dir", "config", "dry_run", "experiment", "helper_models", "on_bad_line"]


def test_one_that_raises_is_named(config: Any) -> None:
    with pytest.raises(
        PluginError, match=r"^the judge 'mine.py->Raises' cannot be built: it raised KeyError: 'oh' \(.*mine.py:"
    ):
        made(config, "Raises")


class Sectioned(Judge):
    def judge(self, workflow_task: Any, output: Any) -> Any:
        raise AssertionError("not asked")


@table(("section", "kept"), [(None, None), ("a section", "a section")])
def test_by_default_it_is_given_its_section(config: Any, section: Any, kept: Any) -> None:
    assert Sectioned.from_config(section, BuildContext(config=config)).config == kept


def test_the_helper_models_of_who_has_it_made(config: Any) -> None:
    helpers: Any = object()
    context = BuildContext(config=config, helpers=helpers)
    assert context.helper_models is helpers
    assert context.run_dir == config.run_dir
    assert BuildContext(config=config, folder=Path("x")).run_dir == Path("x")
    assert "helpers" not in repr(context)


def test_no_judge(config: Any) -> None:
    assert build_judge(config) is None
    assert issubclass(config.resolve("workflow", "mine.py->W"), Workflow)


def test_a_backbone_that_knows_only_its_latest_state_goes_on_from_that(tmp_path: Path, config: Any) -> None:
    class Older(Backbone):
        serve = train = None  # type: ignore[assignment]  # nobody asks it for these here

        def latest_state(self, folder: Path) -> Path | None:
            return folder / "step-000002"

    assert [*Older(config).saved_states(RunDir(tmp_path))] == [(tmp_path / "resume" / "step-000002", "")]
