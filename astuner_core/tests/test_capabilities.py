"""The capability contract: what was written is honoured, or refused by name."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from astuner import ConfigError, Provider, hookimpl, load_config
from astuner.config import Config
from astuner.config.capabilities import CORE, check_capabilities, honours
from astuner.config.checking import field_at
from astuner.config.schema import AstunerSection
from astuner.contracts.backbone import Backbone, Capabilities
from astuner.plugins import registry
from astuner.plugins.loader import PluginManager, load_plugins
from tests.table import table

LITTLE = Capabilities(
    honours=frozenset({"trainer_common.optim", "rollout.max_num_seqs"}),
    only={"trainer_common.nnodes": (1,), "rollout.name": (None, "vllm")},
    instead={"trainer_common.optim.momentum": "use betas", "trainer_common.nnodes": "use --backbone verl"},
)


class Everything(Backbone):
    capabilities = Capabilities(honours=frozenset(AstunerSection.model_fields))

    def serve(self, model_path=None):
        raise NotImplementedError

    def train(self, experiment):
        raise NotImplementedError


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manager: PluginManager):
    monkeypatch.chdir(tmp_path)

    def load_text(text: str, *overrides: str) -> Config:
        Path("e.yaml").write_text(f"astuner:\n  model: {{path: m}}\n{text}", encoding="utf-8")
        return replace(load_config("e.yaml", overrides, backbone="debug"), plugins=manager)

    return load_text


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> PluginManager:
    """A backbone that honours everything, and one that cannot be imported."""
    made = ModuleType("acme_backbones")
    made.Everything = Everything
    monkeypatch.setitem(sys.modules, "acme_backbones", made)
    offered = {
        "rich": Provider(target="acme_backbones:Everything"),
        "absent": Provider(target="a:b", requires=("no_such_module_here",)),
    }
    made.register_backbones = hookimpl(lambda: offered)
    dist = SimpleNamespace(name="acme", version="1", requires=[])
    return PluginManager().load([SimpleNamespace(name="acme", value="acme", dist=dist, load=lambda: made)])


@table(
    ("key", "value", "verdict"),
    [
        ("rollout.num_repeat", 8, True),  # the core's
        ("task_judge.anything.below", 1, True),
        ("trainer_common.optim.lr", 1.0, True),
        ("trainer_common.optim.momentum", 0.5, False),  # the more specific entry decides
        ("trainer_common.kl_loss_coef", 0.1, False),
        ("trainer_common.optimum", 0.1, False),  # a prefix of the word is no section
        ("rollout.max_num_seqs", 4, True),
        ("rollout.max_model_len", 4, False),
        ("trainer_common.nnodes", 1, True),
        ("trainer_common.nnodes", 2, False),
        ("trainer_common.nnodes", True, False),
        ("rollout.name", None, True),
        ("rollout.name", "sglang", False),
    ],
)
def test_the_most_specific_entry_decides(key: str, value: object, verdict: bool):
    assert honours(LITTLE, key, value) is verdict


def test_only_written_keys_are_asked_about_and_all_refusals_come_at_once(load, manager):
    assert check_capabilities(load(""), LITTLE) == ()
    text = """\
  rollout: {name: sglang, num_repeat: 2}
  trainer_common:
    nnodes: 2
    optim: {momentum: 0.5, lr: 1.0}
"""
    with pytest.raises(ConfigError) as e:
        check_capabilities(load(text, "astuner.trainer_common.ppo_epochs=2"), LITTLE)
    assert list(e.value.problems) == [
        "e.yaml:3:13: astuner.rollout.name: the backbone 'debug' supports only null or vllm, not 'sglang'; "
        "supported by rich",
        "e.yaml:5:5: astuner.trainer_common.nnodes: the backbone 'debug' supports only 1, not 2; "
        "use --backbone verl; supported by rich",
        "e.yaml:6:13: astuner.trainer_common.optim.momentum is not supported by the backbone 'debug'; remove it; "
        "use betas; supported by rich",
        "command line: astuner.trainer_common.ppo_epochs is not supported by the backbone 'debug'; remove it; "
        "supported by rich",
    ]


@table("estimator", ["grpo", "dr_grpo", "rloo"])
def test_groups_of_one_cannot_be_compared(load, manager, estimator: str):
    everything = Capabilities(honours=frozenset(AstunerSection.model_fields))
    text = "  rollout: {num_repeat: 1}\n  seed: 1\n"
    advantage = f"astuner.trainer_common.algorithm.adv_estimator={estimator}"
    with pytest.raises(ConfigError) as e:
        check_capabilities(load(text, advantage), everything)
    (problem,) = e.value.problems
    assert problem.startswith("e.yaml:3:13: astuner.rollout.num_repeat is 1,")
    assert estimator in problem
    assert problem.endswith("astuner.trainer_common.algorithm.adv_estimator: reinforce_plus_plus")
    check_capabilities(load(text, advantage), Capabilities(trains=False))
    check_capabilities(load(text, advantage, "astuner.rollout.num_repeat=2"), everything)
    check_capabilities(load(text, "astuner.trainer_common.algorithm.loss=reinforce_plus_plus"), everything)


def test_greedy_rollouts_leave_nothing_to_learn_from(load, manager):
    everything = Capabilities(honours=frozenset(AstunerSection.model_fields))
    with pytest.raises(ConfigError) as e:
        check_capabilities(load("  rollout: {temperature: 0}\n"), everything)
    (problem,) = e.value.problems
    assert problem.startswith("e.yaml:3:13: astuner.rollout.temperature is 0")
    assert "above 0" in problem
    check_capabilities(load("  rollout: {temperature: 0}\n"), Capabilities(trains=False))


def test_groups_of_one_are_told_together_with_what_is_ignored(load, manager):
    with pytest.raises(ConfigError) as e:
        check_capabilities(load("  rollout: {name: sglang, num_repeat: 1}\n"), LITTLE)
    assert [p.split(" ")[1].rstrip(":") for p in e.value.problems] == [
        "astuner.rollout.name",
        "astuner.rollout.num_repeat",
    ]


def test_implied_keys_are_not_held_against_a_person(load, manager):
    config = load("  trainer_common: {val_pass_n: 3}\n  task_reader: {type: ''}\n")
    assert check_capabilities(config, Capabilities()) == ()


def test_a_backbone_that_does_not_train_says_so_once(load, manager):
    text = "  trainer_common: {total_epochs: 3, optim: {lr: 1.0}}\n  debug: {engine: openai}\n  data: {shuffle: true}\n"
    config = load(text, "astuner.model.lora.rank=2")
    notes = check_capabilities(config, Capabilities(trains=False))
    assert notes == (
        "astuner.debug applies to the debug backbone only; the backbone 'debug' ignores it",
        "the backbone 'debug' does not train and ignores training keys",
    )


def test_the_cores_keys_exist():
    assert not [key for key in CORE if field_at(AstunerSection, tuple(key.split("."))) is None]


def test_installed_backbones_name_only_keys_that_exist():
    for _, name, provider in load_plugins().offers("backbone"):
        if any(importlib.util.find_spec(module) is None for module in provider.requires):
            assert name in ("trinity", "verl"), f"{name} is installed without what it needs"
            continue  # these are in environments of their own, and so are their tests
        capabilities = registry.resolve(load_plugins(), "backbone", name).capabilities
        for key in {*capabilities.honours, *capabilities.only, *capabilities.instead}:
            assert field_at(AstunerSection, tuple(key.split("."))) is not None, (name, key)


# ------------------------------------------------------------------------------------------------ agents and policies

TWO = "  agents: {wolf: {policy: a}, villager: {policy: b}}\n"
ONE_POLICY = Capabilities(honours=frozenset(AstunerSection.model_fields))
SEVERAL = Capabilities(honours=frozenset(AstunerSection.model_fields), policies=True)


@pytest.mark.parametrize(
    "text",
    [
        TWO,
        "  endpoint: {host: 127.0.0.1, port: 0, reconnect_timeout: 5, token_env: T}\n",
        "  rollout: {merge_level: text}\n",
        "  model: {path: m, chat_template_kwargs: {enable_thinking: false}}\n",
        "  trainer_common: {algorithm: {adv_compare: agent}}\n",
        "  agents: {wolf: {policy: a}, judge: {model: external, base_url: 'http://h/v1', name: n, timeout: 3}}\n",
        "  agents: {wolf: {policy: a}}\n  policies: {a: {path: n, lora: {rank: 4}}}\n",
        "  env_service: {url: 'http://h', params: {size: 4, deep: {er: 1}}}\n",
    ],
    ids=["agents", "endpoint", "merge level", "template", "comparison", "external", "policies", "environments"],
)
def test_the_core_honours_what_concerns_agents_for_every_backbone(tmp_path, manager, text: str):
    model = "" if "model: {path" in text else "  model: {path: m}\n"
    (tmp_path / "e.yaml").write_text(f"astuner:\n{model}{text}", encoding="utf-8")
    config = load_config(tmp_path / "e.yaml", backbone="debug")
    assert check_capabilities(config, Capabilities(policies=True)) == ()


def test_several_policies_need_a_backbone_that_has_them(load, manager, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Everything, "capabilities", SEVERAL)
    with pytest.raises(ConfigError) as e:
        check_capabilities(load(f"  seed: 1\n{TWO}"), ONE_POLICY)
    (problem,) = e.value.problems
    assert problem.startswith("e.yaml:4:19: astuner.agents uses 2 policies (a, b)")
    assert "'debug' supports one" in problem
    assert problem.endswith("--backbone rich")
    check_capabilities(load(TWO), SEVERAL)
    check_capabilities(load(TWO), Capabilities(trains=False))  # it only lets them speak
    check_capabilities(load(TWO, "astuner.agents.villager.policy=a"), ONE_POLICY)


def test_somebody_must_train_where_the_backbone_does(load, manager):
    nobody = "  agents: {wolf: {train: false}, judge: {model: external, base_url: 'http://h/v1', name: n}}\n"
    with pytest.raises(ConfigError, match=r"e.yaml:3:\d+: astuner.agents trains no agent; set train: true"):
        check_capabilities(load(nobody), SEVERAL)
    check_capabilities(load(nobody), Capabilities(trains=False))
    check_capabilities(load(nobody, "astuner.agents.wolf.train=true"), SEVERAL)


def test_adapters_for_a_policy_that_nobody_trains_would_be_ignored(load, manager):
    text = "  agents: {wolf: {policy: a}, villager: {policy: b, train: false}}\n  policies:\n    b: {lora: {rank: 4}}\n"
    with pytest.raises(ConfigError, match=r"e.yaml:5:\d+: astuner.policies.b.lora has no effect"):
        check_capabilities(load(text), SEVERAL)
    check_capabilities(load(text, "astuner.agents.villager.train=true"), SEVERAL)


@table(
    ("text", "place", "says"),
    [
        (
            "  policies:\n    b: {path: n}\n",
            "4:5",
            "astuner.policies.b is not used by any agent in astuner.agents (without",
        ),
        (f"{TWO}  policies:\n    aa: {{path: n}}\n", "5:5", "(used: a, b); did you mean a?"),
        (
            "  agents:\n    w: {base_url: 'http://h/v1'}\n",
            "4:9",
            "astuner.agents.w.base_url applies to external models",
        ),
        ("  agents:\n    w: {name: gpt}\n", "4:9", "astuner.agents.w.name applies to external models"),
        ("  agents:\n    w: {api_key_env: K}\n", "4:9", "astuner.agents.w.api_key_env applies to external models"),
        ("  agents:\n    w: {temperature: 0}\n", "4:9", "astuner.agents.w.temperature applies to external models"),
        ("  agents:\n    w: {timeout: 5}\n", "4:9", "astuner.agents.w.timeout applies to external models"),
        ("  agents:\n    w: {model: external, policy: a}\n", "4:26", "astuner.agents.w.policy has no effect"),
        ("  agents:\n    w: {model: external, train: true}\n", "4:26", "astuner.agents.w.train has no effect"),
        (
            "  agents:\n    w: {policy: ../up}\n",
            "4:9",
            "astuner.agents.w.policy is '../up', but a policy name is used for folders",
        ),
        (
            "  agents:\n    w: {policy: resume}\n",
            "4:9",
            "astuner.agents.w.policy is 'resume', but a policy name is used for folders",
        ),
    ],
)
def test_what_makes_no_sense_together_is_told_at_its_place(load, text: str, place: str, says: str):
    with pytest.raises(ConfigError) as e:
        load(text)
    (problem,) = e.value.problems
    assert problem.startswith(f"e.yaml:{place}: ")
    assert says in problem


def test_a_policy_may_be_written_though_there_are_no_agents(load):
    assert load("  policies: {default: {lora: {rank: 2}}}\n").model_of("default").lora.rank == 2


def test_names_that_only_look_taken_are_fine(load):
    load("  agents: {w: {policy: resume-2}, v: {policy: A_b}}\n")


def test_a_mistake_in_an_agent_is_told_once(load):
    with pytest.raises(ConfigError) as e:
        load("  agents: {w: {polcy: a, base_url: 'http://h/v1'}}\n")
    assert len(e.value.problems) == 1


def test_the_rules_hold_for_a_written_out_config_too(load, tmp_path: Path):
    """What it spells out were defaults, and nobody wrote them."""
    config = load("  agents: {w: {policy: a}, judge: {model: external, base_url: 'http://h/v1', name: n}}\n")
    (tmp_path / "resolved.yaml").write_text(config.dump_yaml(), encoding="utf-8")
    assert load_config(tmp_path / "resolved.yaml").astuner.agents == config.astuner.agents
