"""Reading and checking an experiment file: every mistake at once, at its place, with what to type next."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from astuner import ConfigError, PluginError, find_backbone, load_config
from astuner.config.schema import AstunerSection
from astuner.contracts.errors import told
from astuner.contracts.places import Tree
from astuner.contracts.secrets import is_secret
from astuner.testing import fake_config
from tests.table import table

BAD = """\
astuner:
  project_name: 2024
  rollout:
    temprature: 0.7
    num_repeat: four
    max_env_worker: -3
    multi_turn:
      max_samples_per_task: 4
      max_steps: true
    max_num_seqs: ${astuner.dtaa.x}
  model:
    pth: Qwen/Qwen2.5-14B-Instruct
    dtype: bf16
  trainer_common:
    optim: {lr: -1e-6, betas: [1, 2, 3]}
    logger: [console, swanlabb]
    total_epochs: 1.5
  task_reader:
    type: jsnl
    jsonl: {training: {file_pth: x}}
  data: 3
rolout: {}
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def write_file(text: str | bytes, name: str = "exp.yaml") -> str:
        Path(name).write_bytes(text.encode() if isinstance(text, str) else text)
        return name

    return write_file


def problems(path: str, *overrides: str, **options: str) -> list[str]:
    with pytest.raises(ConfigError) as e:
        load_config(path, overrides, **options)
    return list(e.value.problems)


def minimal(more: str = "") -> str:
    return f"astuner:\n  model: {{path: m}}\n{more}"


def test_all_mistakes_at_once_in_file_order(write):
    assert problems(write(BAD), "astuner.rolout.x=1", "rollout.num_repeat=3", "oops", "astuner.seed=[") == [
        "exp.yaml:2:3: astuner.project_name should be a quoted string, got 2024",
        "exp.yaml:4:5: unknown key astuner.rollout.temprature; did you mean temperature?",
        "exp.yaml:5:5: astuner.rollout.num_repeat should be an integer, got 'four'",
        "exp.yaml:6:5: astuner.rollout.max_env_worker should be at least 1, got -3",
        "exp.yaml:8:7: unknown key astuner.rollout.multi_turn.max_samples_per_task; did you mean max_sample_per_task?",
        "exp.yaml:9:7: astuner.rollout.multi_turn.max_steps should be integer or null ≥ 1, ≤ 1,000,000,000, got True",
        "exp.yaml:10:5: astuner.rollout.max_num_seqs: interpolation key 'astuner.dtaa.x' not found",
        "exp.yaml:11:3: astuner.model.path is required",
        "exp.yaml:12:5: unknown key astuner.model.pth; did you mean path?",
        "exp.yaml:13:5: astuner.model.dtype should be 'auto', 'float32', 'bfloat16' or 'float16', got 'bf16'; "
        "did you mean bfloat16?",
        "exp.yaml:15:13: astuner.trainer_common.optim.lr should be at least 0, got -1e-06",
        "exp.yaml:15:24: astuner.trainer_common.optim.betas should have at most 2 entries, got [1, 2, 3]",
        "exp.yaml:16:23: astuner.trainer_common.logger: unknown log sink 'swanlabb'; did you mean swanlab?",
        "exp.yaml:17:5: astuner.trainer_common.total_epochs should be an integer, got 1.5",
        "exp.yaml:19:5: astuner.task_reader.type: unknown task reader 'jsnl'; did you mean jsonl?",
        "exp.yaml:20:13: astuner.task_reader.jsonl.training.file_path is required",
        "exp.yaml:20:24: unknown key astuner.task_reader.jsonl.training.file_pth; did you mean file_path?",
        "exp.yaml:21:3: astuner.data should be a section (keys below it), got 3",
        "exp.yaml:22:1: unknown section rolout; did you mean rollout? It belongs below astuner:",
        "command line: 'rollout.num_repeat=3' does not start with a section; write astuner.rollout.num_repeat=3",
        "command line: 'oops' is not an override; write KEY=VALUE, e.g. astuner.rollout.num_repeat=8",
        "command line: 'astuner.seed=[': the value is not valid YAML: while parsing a flow node expected the node "
        "content, but found '<stream end>' in \"<unicode string>\", line 1, column 2: [ ^",
        "command line: unknown key astuner.rolout; did you mean rollout?",
    ]


@table(
    ("text", "message"),
    [
        ("", "exp.yaml: file is empty; create an experiment with `astuner new experiment NAME`"),
        ("# only a comment\n", "exp.yaml: file is empty; create an experiment with `astuner new experiment NAME`"),
        ("- a\n", "exp.yaml:1:1: expected `astuner:` with keys below it"),
        ("just text\n", "exp.yaml:1:1: expected `astuner:` with keys below it"),
        ("a: 1\n", "exp.yaml:1:1: section astuner: is missing; write the experiment's keys below astuner:"),
        ("astuner: 3\n", "exp.yaml:1:1: section astuner: is missing; write the experiment's keys below astuner:"),
        (b"astuner:\n  a: \xff\n", "exp.yaml:2:1: byte 14 is not UTF-8; save the file as UTF-8"),
        ("astuner:\n\tmodel: x\n", "exp.yaml:2:1: not YAML: found character '\\t' that cannot start any token; "
         "indent with spaces, not tabs"),
        (
            "astuner: {a: [1\n",
            "exp.yaml:2:1: not YAML: expected ',' or ']', but got '<stream end>'; close the bracket opened on this "
            "line or the line above, and quote values that contain any of {}[],",
        ),
        ("astuner: {}\n---\na: 1\n", "exp.yaml:2:1: not YAML: but found another document"),
        ("a: \x07\n", "exp.yaml: not YAML: unacceptable character #x0007: special characters are not allowed "
         "in \"<unicode string>\", position 3"),
        ("a: &a\n  b: *a\n", "exp.yaml:1:4: this alias refers to itself"),
        ("astuner:\n  model: {path: a}\n  model: {path: b}\n", "exp.yaml:3:3: astuner.model is set twice "
         "(first at line 2)"),
        ("a: !!python/object/apply:os.system [ls]\n", "exp.yaml:1:4: not YAML: could not determine a "
         "constructor for the tag 'tag:yaml.org,2002:python/object/apply:os.system'"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_experiment(write, text: str | bytes, message: str):
    assert problems(write(text))[0] == message


def test_a_missing_file_names_those_beside_it(write, tmp_path: Path):
    write(minimal(), "there.yaml")
    assert problems("thre.yaml") == ["thre.yaml: no such file; files in .: there.yaml"]
    assert problems(str(tmp_path)) == [f"{tmp_path}: is a folder; pass a file; files in {tmp_path}: there.yaml"]


def test_aliases_that_multiply_are_refused_early(write):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert "more than 10,000 keys" in problems(write("\n".join(lines)))[0]
    for nested in ("{x: *a%d}", "{<<: *a%d}", "[*a%d]"):
        chain = ["a0: &a0 {x: 1}"] + [f"a{n}: &a{n} {nested % (n - 1)}" for n in range(1, 2000)]
        assert "32 nested sections, after expanding aliases" in problems(write("\n".join(chain)))[0]


def test_anchors_and_merge_keys_keep_their_places(write):
    text = "base: &b {num_repeat: 0, top_p: 0.5}\nastuner:\n  model: {path: m}\n  rollout:\n    <<: *b\n    top_k: -2\n"
    assert problems(write(text)) == [
        "exp.yaml:1:1: unknown key base; known keys: astuner, debug, local, trinity, verl",
        "exp.yaml:1:11: astuner.rollout.num_repeat should be at least 1, got 0",
        "exp.yaml:6:5: astuner.rollout.top_k should be at least -1, got -2",
    ]


def test_a_bom_crlf_and_empty_sections_are_fine(write):
    text = "\ufeff" + minimal("  rollout:\n    # nothing yet\n  data: {shuffle: no}\n").replace("\n", "\r\n")
    config = load_config(write(text))
    assert config.astuner.rollout.num_repeat == 8
    assert config.astuner.data.shuffle is False


def test_numbers_are_read_as_omegaconf_reads_them(write):
    config = load_config(write(minimal("  trainer_common: {optim: {lr: 1e-5}}\n")), ["astuner.data.shuffle=off"])
    assert config.astuner.trainer_common.optim.lr == 1e-5
    assert config.astuner.data.shuffle is False


def test_values_left_open_are_asked_for(write):
    text = "astuner:\n  model: {path: '???'}\n  rollout:\n    workflow: ???\n"
    assert problems(write(text)) == [
        "exp.yaml:2:11: astuner.model.path is required; replace ??? with a value",
        "exp.yaml:4:5: astuner.rollout.workflow is required; replace ??? with a value",
    ]
    assert load_config("exp.yaml", ["astuner.model.path=m", "astuner.rollout.workflow=a->B"]).astuner.model.path == "m"


def test_layers_file_then_overrides_then_backbone(write):
    path = write(minimal("  backbone: local\n  rollout: {num_repeat: 4, top_p: 0.5}\n"))
    config = load_config(path, ["astuner.rollout.num_repeat=2", "astuner.rollout.num_repeat=3"], backbone="debug")
    rollout = config.astuner.rollout
    assert (rollout.num_repeat, rollout.top_p, config.astuner.backbone) == (3, 0.5, "debug")
    keys = ("rollout.num_repeat", "rollout.top_p", "backbone")
    origins = [str(config.origins[f"astuner.{key}"]) for key in keys]
    assert origins == ["command line", "exp.yaml:4:28", "--backbone"]
    assert "astuner.rollout.top_k" not in config.origins
    assert problems(path, backbone="lokal") == [
        "--backbone: astuner.backbone: unknown backbone 'lokal'; did you mean local?"
    ]


def test_an_override_may_be_a_section_a_list_or_an_interpolation(write):
    path = write(minimal())
    config = load_config(
        path,
        [
            "astuner.rollout={num_repeat: 3, val_kwargs: {temperature: 0.5}}",
            "astuner.trainer_common.logger=[console]",
            "astuner.data.train_batch_size=${astuner.rollout.num_repeat}",
        ],
    )
    assert config.astuner.rollout.val_kwargs.temperature == 0.5
    assert config.astuner.trainer_common.logger == ["console"]
    assert config.astuner.data.train_batch_size == 3
    assert {"astuner.rollout.num_repeat", "astuner.rollout.val_kwargs.temperature"} <= config.written
    assert problems(path, "astuner={}", "astuner.rollout.=3", "=3") == [
        "command line: 'astuner={}' would replace a complete root section; set one key: astuner.KEY=VALUE",
        "command line: 'astuner.rollout.=3' is not an override; write KEY=VALUE, e.g. astuner.rollout.num_repeat=8",
        "command line: '=3' is not an override; write KEY=VALUE, e.g. astuner.rollout.num_repeat=8",
    ]


def test_interpolations_see_what_was_written_defaults_implied_keys_and_the_environment(write, monkeypatch):
    monkeypatch.setenv("MY_MODEL", "org/model")
    text = """\
astune:
  model: {path: "${oc.env:MY_MODEL}"}
  project_name: ${astune.model.path}-${astuner.rollout.num_repeat}
  trainer_common:
    algorithm: {loss: dapo}
    kl_loss_coef: ${astuner.trainer_common.algorithm.clip_ratio_high}
    optim: ${astuner.trainer_common.missing}
"""
    assert problems(write(text)) == [
        "exp.yaml:7:5: astuner.trainer_common.optim: interpolation key 'astuner.trainer_common.missing' not found"
    ]
    config = load_config("exp.yaml", ["astuner.trainer_common.optim={lr: 1}"])
    assert config.astuner.project_name == "org/model-8"
    assert config.astuner.trainer_common.kl_loss_coef == 0.28
    monkeypatch.delenv("MY_MODEL")
    assert any("environment variable 'MY_MODEL' not found" in p for p in problems("exp.yaml"))


def test_a_loop_of_interpolations_is_an_error(write):
    text = minimal("  project_name: ${astuner.experiment_dir}\n  experiment_dir: ${astuner.project_name}\n")
    assert all("recursi" in p or "refers to itself" in p for p in problems(write(text)))


def test_names_and_folders(write, tmp_path: Path):
    config = load_config(write(minimal(), "math.v2.yaml"))
    assert (config.experiment_name, config.run_dir) == ("math.v2", Path("launcher_record/math.v2"))
    assert config.base_dir == Path()
    config = load_config("math.v2.yaml", ["astuner.experiment_name=run1", f"astuner.experiment_dir={tmp_path}"])
    assert config.run_dir == tmp_path / "run1"
    assert "a single folder" in problems("math.v2.yaml", "astuner.experiment_name=../up")[0]
    for name in ("x" * 201, "ä" * 101, "模" * 67):
        assert "shorten it" in problems("math.v2.yaml", f"astuner.experiment_name={name}")[0]
    assert load_config("math.v2.yaml", [f"astuner.experiment_name={'x' * 200}"]).run_dir.name == "x" * 200


def test_relations_between_keys_are_checked_with_everything_else(write):
    more = """\
  rollout:
    num_repeat: 4
    min_group_size: 5
    temperature: hot
  trainer_common:
    use_kl_loss: true
    algorithm: {use_kl_in_reward: true}
"""
    size, temperature, kl = problems(write(minimal(more)))
    assert size.startswith("exp.yaml:5:5: astuner.rollout.min_group_size is 5, but astuner.rollout.num_repeat is 4")
    assert temperature == "exp.yaml:6:5: astuner.rollout.temperature should be a number, got 'hot'"
    assert kl.startswith("exp.yaml:9:17: astuner.trainer_common.algorithm.use_kl_in_reward")
    assert "astuner.trainer_common.use_kl_loss" in kl


def test_a_relation_of_a_key_that_is_wrong_by_itself_is_not_spoken_of(write):
    assert problems(write(minimal("  rollout: {num_repeat: 0, min_group_size: 5}\n"))) == [
        "exp.yaml:3:13: astuner.rollout.num_repeat should be at least 1, got 0"
    ]


def test_a_group_is_as_large_as_its_episodes(write):
    path = write(minimal())
    assert load_config(path).astuner.rollout.min_group_size == 2
    for one in ("1", "'1'"):
        single = load_config(path, [f"astuner.rollout.num_repeat={one}"])
        assert single.astuner.rollout.min_group_size == 1
        assert str(single.origins["astuner.rollout.min_group_size"]) == "implied by rollout.num_repeat: 1"
    both = ["astuner.rollout.num_repeat=1", "astuner.rollout.min_group_size=2"]
    assert (
        "command line: astuner.rollout.min_group_size is 2, but astuner.rollout.num_repeat is 1"
        in problems(path, *both)[0]
    )
    assert "exp.yaml" not in problems(path, "astuner.rollout.min_group_size=9")[0]  # the default is 8 episodes


@table("key", ["rollout.val_kwargs.num_repeat", "trainer_common.val_pass_n"])
def test_repeating_a_greedy_validation_is_told(write, key: str):
    path = write(minimal())
    notes = [n for n in load_config(path, [f"astuner.{key}=4"]).notes if "greedy" in n]
    assert len(notes) == 1
    assert "astuner.rollout.val_kwargs.num_repeat is 4, but" in notes[0]
    sampled = load_config(path, [f"astuner.{key}=4", "astuner.rollout.val_kwargs.temperature=0.5"])
    assert not [n for n in sampled.notes if "greedy" in n]


@table(
    ("text", "message"),
    [
        (
            "astuner: " + "[" * 40 + "]" * 40,
            "exp.yaml:1:42: not YAML: more than 10,000 keys and values, or more than 32 nested sections",
        ),
        ("astuner: " + "{a: " * 1500 + "1" + "}" * 1500, "exp.yaml:1:135: not YAML: more than 10,000 keys and values"),
        ("astuner:\n" + "".join(f"  a{n}: 1\n" for n in range(30_000)), "exp.yaml:5000:"),
        ("astuner:\n  seed: 1 #" + "x" * 2**20, "exp.yaml: file is larger than 1,048,576 bytes"),
        (minimal("  seed: 1e400\n"), "exp.yaml:3:3: astuner.seed should be a finite number, got inf"),
        (minimal(f"  seed: {'9' * 5000}\n"), "exp.yaml:3:9: not YAML: '99999"),
        (minimal("  seed: !!bool x\n"), "exp.yaml:3:9: not YAML: 'x' cannot be read"),
        (minimal('  project_name: "\\ud800"\n'), "exp.yaml:3:17: not YAML: '\\ud800' cannot be read"),
        (minimal("  seed: 12:30:45\n"), "exp.yaml:3:3: astuner.seed should be an integer, got '12:30:45'"),
        (minimal("  rollout: {num_repeat: 1e30}\n"), "exp.yaml:3:13: astuner.rollout.num_repeat"),
        (minimal(f"  trainer_common: {{total_steps: {2**63}}}\n"), "exp.yaml:3:20: astuner.trainer_common.total_steps"),
        (minimal("  trainer_common: {optim: {lr: 1e5}}\n"), "exp.yaml:3:28: astuner.trainer_common.optim.lr should be"),
        (
            minimal("  trainer_common: {optim: {betas: [0, 1]}}\n"),
            "exp.yaml:3:39: astuner.trainer_common.optim.betas.1",
        ),
        (minimal(f"  rollout: {{workflow: '{'x' * 5000}.py->A'}}\n  seed: x\n"), "exp.yaml:4:3: astuner.seed"),
        (minimal("  rollout: {merge_level: [a]}\n"), "exp.yaml:3:13: astuner.rollout.merge_level"),
        (f"resolved: {{file: x, written: 5}}\n{minimal('  seed: x')}", "exp.yaml: astuner.seed should"),
        ("astuner:\n  model: {path: ' '}\n", "exp.yaml:2:11: astuner.model.path should not be empty, got ' '"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_too_much_or_nonsense_is_refused_with_its_place(write, text: str, message: str):
    assert problems(write(text))[0].startswith(message)


def test_a_time_of_day_is_a_text(write):
    assert load_config(write(minimal()), ["astuner.project_name=12:30:45"]).astuner.project_name == "12:30:45"


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf"])
@pytest.mark.parametrize("key", ["rollout.temperature", "rollout.agent_madness_reward", "trainer_common.optim.lr"])
def test_a_number_is_finite(write, key: str, value: str):
    (problem,) = problems(write(minimal()), f"astuner.{key}={value}")
    assert problem.startswith(f"command line: astuner.{key} should be a finite number, got ")


def test_a_config_travels_and_is_read_back_without_its_file(write):
    more = """\
  trainer_common: {algorithm: {loss: dr_grpo}, val_pass_n: 2}
  task_reader:
    type: jsonl
    jsonl: {training: {file_path: data/train.jsonl}}
"""
    config = load_config(write(minimal(more)), ["astuner.seed=5"])
    assert pickle.loads(pickle.dumps(config)) == config
    without = load_config("exp.yaml", disabled_plugins=["math"])
    assert pickle.loads(pickle.dumps(without)).plugins.disabled == {"math"}  # as a worker is told, which has its own
    Path("run").mkdir()
    Path("run/resolved.yaml").write_text(config.dump_yaml())
    Path("exp.yaml").write_text("gone")
    again = load_config("run/resolved.yaml")
    assert again.as_dict() == config.as_dict()
    assert again.written == config.written
    assert again.path == config.path.absolute()
    assert again.dump_yaml() == config.dump_yaml()
    changed = load_config("run/resolved.yaml", ["astuner.trainer_common.algorithm.loss=grpo"])
    assert changed.astuner.trainer_common.algorithm.norm_adv_by_std is True  # implied by dr_grpo only


def test_a_default_whose_package_is_missing_does_not_stop_a_written_out_config(write):
    resolved = write(load_config(write(minimal()), disabled_plugins=["checks"]).dump_yaml(), "resolved.yaml")
    again = load_config(resolved, disabled_plugins=["checks"])
    assert "nonsense" in again.astuner.rollout.compute_madness_checklist
    with pytest.raises(ConfigError, match="unknown output check 'nonsense'"):
        load_config(resolved, ["astuner.rollout.compute_madness_checklist=[nonsense]"], disabled_plugins=["checks"])


def test_secrets_are_known_by_name():
    names = ["api_key", "hf_token", "OPENAI_API_KEY", "secret", "db_password", "wandb-api-key", "authToken", "+api_key"]
    assert all(map(is_secret, names))
    assert not any(map(is_secret, ["api_key_env", "max_tokens", "eos_token", "tokenizer", "micro_batch_tokens", "key"]))


def test_errors_print_no_secret(write):
    text = minimal("  debug: {api_key: sk-12345, hf_token: {a: b}}\n")
    assert not [p for p in problems(write(text)) if "sk-12345" in p]


URLS = """\
  project_name: see https://grace:pw1@h/x and http://pw2@h
  model: {path: m, lora: {target_modules: [a, "http://pw4@h"]}}
  debug: {base_url: "http://grace:p@w3@127.0.0.1:8000/v1"}
"""


def test_what_is_told_of_an_exception_holds_no_secret(write, monkeypatch):
    for name in ("THE_API_KEY", "JUDGE_KEY", "SAYS_NOTHING", "SHORT_TOKEN"):
        monkeypatch.setenv(name, f"value-of-{name}" if name != "SHORT_TOKEN" else "abc")
    debug = '{api_key_env: SAYS_NOTHING, base_url: "http://ada:in-clear-1@h/v1"}'
    load_config(write(f"astuner:\n  model: {{path: m}}\n  debug: {debug}\n")).as_dict()
    text = f"{dict(os.environ)} in-clear-1 at https://me:pw@h/"
    said = told(ValueError(text))
    assert not [secret for secret in ("value-of", "in-clear-1", "pw@") if secret in said]
    assert "abc" in said


def test_the_user_of_a_url_is_a_secret(write):
    config = load_config(write(f"astuner:\n{URLS}"))
    assert config.astuner.debug.base_url == "http://grace:p@w3@127.0.0.1:8000/v1"
    shown = f"{config.as_dict()}{config.dump_yaml()}{list(config.items())}"
    assert not [secret for secret in ("grace", "pw1", "pw2", "w3", "pw4") if secret in shown]
    assert config.as_dict()["astuner"]["debug"]["base_url"] == "http://(removed: a secret)@127.0.0.1:8000/v1"
    path = write(config.dump_yaml(), "resolved.yaml")
    keys = ["astuner.project_name", "astuner.model.lora.target_modules", "astuner.debug.base_url"]
    assert [p.partition(": ")[2] for p in problems(path)] == [
        f"{key} was removed from this file because it is a secret; pass {key}=VALUE" for key in keys
    ]
    given = ["astuner.project_name=p", "astuner.model.lora.target_modules=[b]", "astuner.debug.base_url=http://h/v1"]
    assert load_config(path, given).astuner.debug.base_url == "http://h/v1"


@table(
    ("written", "shown"),
    [
        ("${oc.env:WHERE}", "${oc.env:WHERE}"),
        ("http://${oc.env:WHO}:${oc.env:PASS}@h", "http://${oc.env:WHO}:${oc.env:PASS}@h"),
        ("http://ada:s3cret@${oc.env:HOST}", "http://(removed: a secret)@h"),
        ("${oc.env:NOT_SET,'http://ada:s3cret@h'}", "http://(removed: a secret)@h"),
        ("http://h:80/a@b", "http://h:80/a@b"),
        ("ada@h", "ada@h"),
    ],
)
def test_a_url_from_the_environment_is_shown_as_it_was_written(write, monkeypatch, written: str, shown: str):
    for name, value in {"WHERE": "http://ada:s3cret@h", "WHO": "ada", "PASS": "s3cret", "HOST": "h"}.items():
        monkeypatch.setenv(name, value)
    config = load_config(write(minimal(f'  debug: {{base_url: "{written}"}}\n')))
    assert config.as_dict()["astuner"]["debug"]["base_url"] == shown
    assert "s3cret" not in config.dump_yaml()


def test_errors_print_no_user_of_a_url(write):
    (problem,) = problems(write(minimal()), "astuner.seed=http://ada:s3cret@h")
    assert "http://(removed: a secret)@h" in problem
    assert "s3cret" not in problem


PLAIN = {
    "astuner.rollout.num_repeat": st.integers(1, 100),
    "astuner.rollout.temperature": st.floats(0, 2),
    "astuner.data.shuffle": st.booleans(),
    "astuner.project_name": st.text(
        st.characters(codec="utf-8", exclude_characters="$?\\", exclude_categories=["Cc", "Cs"])
    ),
    "astuner.trainer_common.logger": st.lists(st.sampled_from(["console", "jsonl", "wandb"])),
    "astuner.trainer_common.algorithm.loss": st.sampled_from(["grpo", "dapo", "gspo", "rloo"]),
    "astuner.rollout.max_model_len": st.none() | st.integers(8, 10**6),
}
relaxed = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)


@pytest.mark.slow
@relaxed
@given(values=st.fixed_dictionaries({}, optional=PLAIN))
def test_what_is_written_is_what_is_loaded_from_file_override_and_dump(write, values):
    tree = Tree()
    for key, value in {"astuner.model.path": "m", **values}.items():
        tree.put(tuple(key.split(".")), value)
    from_file = load_config(write(yaml.safe_dump(tree.data, allow_unicode=True)))
    overrides = [
        f"{key}={yaml.safe_dump(value, default_flow_style=True, width=10**9)}" for key, value in values.items()
    ]
    from_overrides = load_config(write(minimal(), "minimal.yaml"), [*overrides, "astuner.experiment_name=exp"])
    settings_ = {key: value for key, value, _ in from_file.items()}
    for key, value in values.items():
        assert settings_[key] == value
    assert from_file.as_dict() == from_overrides.as_dict()
    assert from_file.written == {"astuner.model.path", *values}
    again = load_config(write(from_file.dump_yaml(), "resolved.yaml"))
    assert (again.as_dict(), again.written) == (from_file.as_dict(), from_file.written)


@relaxed
@given(
    text=st.text(st.sampled_from("astuner:\n  model{}[],&*x!|>-\"'#?$ \t0."), max_size=60)
    | st.binary(max_size=40).map(lambda b: b.decode("latin-1"))
)
def test_no_text_raises_anything_but_a_config_error(write, text):
    with pytest.raises(ConfigError):
        load_config(write(text))


@given(st.dictionaries(st.text(min_size=1), st.integers()), st.dictionaries(st.text(min_size=1), st.integers()))
def test_merging_trees_is_merging_dicts(below, above):
    assert Tree(dict(below)).merged(Tree(dict(above))).data == {**below, **above}


def test_every_key_is_documented_and_its_default_is_valid():
    from astuner.config.checking import walk_fields
    from astuner.config.sections import key_models
    from astuner.plugins.loader import load_plugins

    infos = {key: info for prefix, model in key_models(load_plugins()) for key, info in walk_fields(model, prefix)}
    assert len(infos) > 100
    assert not [key for key, info in infos.items() if not (info.description or "").strip().endswith(".")]
    AstunerSection.model_validate({"model": {"path": "m"}})


@pytest.mark.slow
def test_importing_and_loading_the_config_is_light(write):
    path = write(minimal())
    code = f"""
import sys
from astuner.config import load_config
load_config({path!r}, backbone="local")
watched = ("torch", "transformers", "agentscope", "datasets", "ray", "openai", "rich", "typer")
heavy = [name for name in watched if name in sys.modules]
sys.exit(repr(heavy) if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_the_package_of_the_default_backbone_only_a_run_is_refused(tmp_path: Path) -> None:
    config = fake_config(tmp_path, disabled_plugins=["debug"])
    assert config.astuner.backbone == "debug"
    (tmp_path / "resolved.yaml").write_text(config.dump_yaml())
    assert load_config(tmp_path / "resolved.yaml", disabled_plugins=["debug"]).as_dict() == config.as_dict()
    with pytest.raises(PluginError, match="unknown backbone 'debug': the plugin debug"):
        find_backbone(config)
    with pytest.raises(ConfigError, match=r"yaml:4:3: astuner.backbone: unknown backbone 'debug'"):
        fake_config(tmp_path, "  backbone: debug", disabled_plugins=["debug"])


def test_a_frequency_may_be_never(tmp_path: Path) -> None:
    text = "  trainer_common: {total_steps: 5, test_freq: never, save_freq: -1}\n"
    common = fake_config(tmp_path, text).astuner.trainer_common
    assert min(common.test_freq, common.save_freq) > 10**6
    with pytest.raises(ConfigError, match=r"test_freq should be at least 1, got -2"):
        fake_config(tmp_path, "  trainer_common: {test_freq: -2}\n")
