"""Several policies in one run: each learns from its own agents only, and shares what it does not change."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from astuner import Config, evaluate, load_config, run, serve
from astuner.contracts.errors import CheckpointError, ConfigError, Interrupted
from astuner.contracts.types import Sample
from astuner_local.engine import LocalEngine
from astuner_local.loop import TrainingLoop
from astuner_local.plugin import locate_model
from astuner_local.policy import LocalPolicy, running, twin
from astuner_local.trainer.checkpoint import Part, latest_checkpoint, read_checkpoint, restore, save_checkpoint
from astuner_local.trainer.trainer import PolicyTrainer

from ._samples import random_samples, with_
from ._tiny_models import tiny_model

WORKFLOW = """
from astuner import Workflow, WorkflowOutput

TALKERS = {talkers}

class Play(Workflow):
    async def execute(self, workflow_task, model_tuner):
        attempt, said = workflow_task.attempt, []
        for agent in TALKERS:
            messages = [{{"role": "user", "content": " ".join([workflow_task.task.main_query, *said[-1:]])}}]
            said.append((await model_tuner.chat(messages, agent_name=agent)).message["content"])
        return WorkflowOutput(reward={reward})
"""
SETTINGS = """
astuner:
  experiment_dir: {folder}
  experiment_name: run
  model: {{path: tiny-calculator}}
  task_reader:
    type: jsonl
    jsonl: {{training: {{file_path: tasks.jsonl}}, validation: {{file_path: tasks.jsonl}}}}
  data: {{train_batch_size: 2, max_validation_tasks: 1}}
  rollout:
    workflow: play.py->Play
    num_repeat: 4
    max_model_len: 128
    max_response_length_in_one_turn: 8
    compute_madness_checklist: []
  trainer_common:
    total_steps: 2
    total_epochs: 100
    test_freq: 100
    val_before_train: false
    micro_batch_tokens: 4096
    optim: {{lr: 0.01}}
    logger: []
  agents: {agents}
"""
AGENTS = "{wolf: {policy: a}, villager: {policy: b}}"
WOLF_LEARNS = '{"wolf": attempt % 2, "villager": 0.5}'
BOTH_LEARN = '{"wolf": attempt % 2, "villager": 1 - attempt % 2}'
LORA = "astuner.model.lora.rank=4"


@pytest.fixture
def game(tmp_path: Path) -> Callable[..., Path]:
    def write(reward: str = WOLF_LEARNS, talkers: Sequence[str] = ("wolf", "villager"), agents: str = AGENTS) -> Path:
        (tmp_path / "play.py").write_text(WORKFLOW.format(talkers=list(talkers), reward=reward))
        tasks = [{"question": f"Tom has {n} pens and gets {n + 1} more.", "answer": str(2 * n + 1)} for n in range(4)]
        (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
        (tmp_path / "game.yaml").write_text(SETTINGS.format(folder=tmp_path, agents=agents))
        return tmp_path / "game.yaml"

    return write


class Watched:
    """What the trainers of a run were given, and its policies' weights at the end."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.given: dict[str, list[list[Sample]]] = {}
        self.ended: dict[str, dict[str, Tensor]] = {}
        self._names: dict[int, str] = {}
        self.update = update = PolicyTrainer.update
        go = TrainingLoop.run

        def watched_update(trainer: PolicyTrainer, samples: Sequence[Sample], *progress: Any) -> dict[str, float]:
            self.given[self._names[id(trainer)]].append(list(samples))
            return update(trainer, samples, *progress)

        def watched_run(loop: TrainingLoop, done: int) -> None:
            self._names = {id(p.trainer): name for name, p in loop.policies.items() if p.trainer is not None}
            self.given = {name: [] for name in self._names.values()}
            go(loop, done)
            self.ended = {name: weights(p) for name, p in loop.policies.items()}

        patch.setattr(PolicyTrainer, "update", watched_update)
        patch.setattr(TrainingLoop, "run", watched_run)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def weights(policy: LocalPolicy) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in policy.loaded.model.named_parameters()}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def config_of(path: Path, *overrides: str) -> Config:
    return load_config(path, list(overrides), backbone="local")


def started(config: Config) -> dict[str, dict[str, Tensor]]:
    """Every policy's weights before the first step."""
    with running(config, done=0, total_steps=2) as policies:
        return {name: weights(p) for name, p in policies.items()}


def rows(path: Path) -> list[dict[str, Any]]:
    lines = (path.parent / "run" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "reward/mean" in row]


def storages(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Address -> bytes of the memory that lies under ``tensors``, each piece once."""
    found = [t.untyped_storage() for t in tensors]
    return {s.data_ptr(): s.nbytes() for s in found}


def tensors_of(policy: LocalPolicy) -> list[Tensor]:
    """All that a policy keeps for generating and training, moments and caches aside."""
    weights = policy.engine._weights
    matrices = [m for layer in weights.layers for m in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    adapters = [m.adapter for m in matrices if m.adapter]
    inside = [t for part in (*weights.layers, *matrices) for t in vars(part).values() if isinstance(t, Tensor)]
    beside = [t for a in adapters for t in (a.down, a.up)]
    return [*policy.loaded.model.parameters(), *inside, *beside, weights.embedding, weights.head.weight, weights.norm]


# --- who learns from what ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [True, False], ids=["lora", "full"])
def test_a_policy_changes_by_its_own_agents_samples_only(game: Any, watched: Watched, adapters: bool) -> None:
    path = game(WOLF_LEARNS)
    how = [LORA] if adapters else []
    before = started(config_of(path, *how))
    run(path, how, backbone="local")
    assert {s.policy for step in watched.given["a"] for s in step} == {"a"}
    assert {s.agent for step in watched.given["a"] for s in step} == {"wolf"}
    assert {s.agent for step in watched.given["b"] for s in step} == {"villager"}
    assert same(watched.ended["b"], before["b"])  # equal rewards: nothing to learn from, bit by bit
    changed = [name for name, tensor in watched.ended["a"].items() if not torch.equal(tensor, before["a"][name])]
    assert changed
    assert all(("lora_" in name) is adapters for name in changed)
    given, ended = watched.given["a"], watched.ended["a"]
    with running(config_of(path, *how), done=0, total_steps=2) as policies:  # the same samples, and nothing else
        assert policies["a"].trainer is not None
        for samples in given:
            watched.update(policies["a"].trainer, samples)
        assert same(weights(policies["a"]), ended)


@pytest.mark.slow
def test_both_learn_and_each_has_its_numbers(game: Any, watched: Watched) -> None:
    path = game(BOTH_LEARN)
    before = started(config_of(path, LORA))
    run(path, [LORA], backbone="local")
    for policy in ("a", "b"):
        assert not same(watched.ended[policy], before[policy])
    first, last = rows(path)
    for policy in ("a", "b"):
        assert first[f"policy/{policy}/optimizer_steps"] == 1
        assert first[f"policy/{policy}/kl/mismatch_max"] < 1e-3
        assert last[f"policy/{policy}/kl/mismatch_max"] < 1e-3  # the engines follow their own adapters
        assert first[f"policy/{policy}/engine/requests"] == 8
    assert "loss" not in first
    assert first["reward/wolf/mean"] == first["reward/villager/mean"] == 0.5


@pytest.mark.slow
def test_a_policy_whose_agents_say_nothing_is_left_alone(game: Any, watched: Watched) -> None:
    path = game('{"wolf": attempt % 2}', talkers=["wolf"])
    before = started(config_of(path, LORA))
    run(path, [LORA], backbone="local")
    assert watched.given["b"] == [[], []]
    assert same(watched.ended["b"], before["b"])
    assert [row["policy/b/nothing_learnable"] for row in rows(path)] == [1, 1]
    assert [row["policy/b/optimizer_steps"] for row in rows(path)] == [0, 0]
    assert [row["policy/a/nothing_learnable"] for row in rows(path)] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [True, False], ids=["lora", "full"])
def test_a_policy_that_nobody_trains_speaks_and_never_changes(game: Any, watched: Watched, adapters: bool) -> None:
    path = game(BOTH_LEARN)
    how = [*([LORA] if adapters else []), "astuner.agents.villager.train=false"]
    before = started(config_of(path, *how))
    run(path, how, backbone="local")
    assert watched.given.keys() == {"a"}
    assert not same(watched.ended["a"], before["a"])
    shipped = load_file(Path(str(locate_model("tiny-calculator"))) / "model.safetensors")
    assert all(torch.equal(watched.ended["b"][name], tensor) for name, tensor in shipped.items())
    (row, _) = rows(path)
    assert row["policy/b/engine/requests"] == 8
    assert "policy/b/nothing_learnable" not in row
    assert sorted(p.name for p in (path.parent / "run" / "checkpoints" / "step-000002").iterdir()) == [
        "a",
        "manifest.json",
        "resume",
    ]


@pytest.mark.slow
def test_agents_that_share_a_policy_train_it_together_as_ever(game: Any, watched: Watched) -> None:
    path = game(BOTH_LEARN)
    run(path, ["astuner.agents.villager.policy=a"], backbone="local")
    assert {s.agent for s in watched.given["a"][0]} == {"wolf", "villager"}
    assert "loss" in rows(path)[0]
    assert (path.parent / "run" / "checkpoints" / "step-000002" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("trainer_common.use_kl_loss=true", "model.lora.rank=0"),
        ("trainer_common.use_kl_loss=true", "model.lora.rank=4"),
        ("trainer_common.algorithm.use_kl_in_reward=true", "trainer_common.kl_loss_coef=0.1", "model.lora.rank=4"),
        ("model.dtype=bfloat16", "model.lora.rank=4"),
        ("policies={a: {lora: {rank: 2}}}", "trainer_common.use_kl_loss=true"),
    ],
    ids=["full-kl", "lora-kl", "kl-in-reward", "bfloat16", "one-of-each"],
)
def test_other_ways_to_train_two(game: Any, settings: tuple[str, ...]) -> None:
    path = game(BOTH_LEARN)
    run(path, [f"astuner.{s}" for s in settings], backbone="local")
    for row in rows(path):
        assert row["policy/a/optimizer_steps"] == row["policy/b/optimizer_steps"] == 1
    if "trainer_common.use_kl_loss=true" in settings:
        assert rows(path)[0]["policy/a/kl/ref"] == pytest.approx(0, abs=1e-6)  # at the start it is the reference
        assert rows(path)[1]["policy/a/kl/ref"] > 0


# --- what is in memory ------------------------------------------------------------------------------------------


def test_two_adapters_share_one_base(game: Any) -> None:
    with running(config_of(game(), LORA), done=0, total_steps=2) as policies:
        a, b = policies["a"], policies["b"]
        base = sum(storages([p for n, p in a.loaded.model.named_parameters() if "lora_" not in n]).values())
        adapters = sum(p.nbytes for n, p in a.loaded.model.named_parameters() if "lora_" in n)
        together = sum(storages([*tensors_of(a), *tensors_of(b)]).values())
    assert adapters * 3 < base  # or this would say nothing
    # Each adapter twice for its trainer and its engine, where those of fused matrices are padded with zeros.
    assert together <= base + 2 * (adapters + 3 * adapters)
    assert together < 2 * base + 2 * adapters


def test_weights_that_are_trained_are_nobody_elses(game: Any) -> None:
    with running(config_of(game()), done=0, total_steps=2) as policies:
        a, b = (storages(tensors_of(p)) for p in policies.values())
    assert not a.keys() & b.keys()


def test_all_that_stays_as_it_is_is_loaded_once(game: Any) -> None:
    path = game(agents="{wolf: {policy: a}, villager: {policy: b, train: false}, sheep: {policy: c}}")
    more = ["astuner.policies={a: {lora: {rank: 4}}}", "astuner.trainer_common.use_kl_loss=true"]
    with running(config_of(path, *more), done=0, total_steps=2) as policies:
        a, b, c = policies["a"], policies["b"], policies["c"]
        assert c.trainer is not None
        assert c.trainer.reference_model is b.loaded.model
        assert b.trainer is None
        of_b = storages(list(b.loaded.model.parameters()))
        assert of_b.keys() <= storages(list(a.loaded.model.parameters())).keys()
        assert not of_b.keys() & storages(list(c.loaded.model.parameters())).keys()


def test_a_twin_computes_the_same_with_the_same_tensors() -> None:
    model = tiny_model("qwen3-tied")
    other = twin(model)
    assert [id(p) for p in other.parameters()] == [id(p) for p in model.parameters()]
    assert {id(m) for m in other.modules()}.isdisjoint(id(m) for m in model.modules())
    ids = torch.arange(9)[None]
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
        assert torch.equal(other(ids).logits, model(ids).logits)


# --- checkpoints ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_checkpoint_holds_every_policy_that_learns(game: Any, watched: Watched) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = game(BOTH_LEARN)
    run(path, [LORA], backbone="local")
    folder = path.parent / "run" / "checkpoints" / "step-000002"
    assert latest_checkpoint(folder.parent) == folder
    for policy in ("a", "b"):
        model = AutoModelForCausalLM.from_pretrained(folder / policy)
        assert AutoTokenizer.from_pretrained(folder / policy).chat_template
        name = "model.layers.0.mlp.down_proj"
        mine = {n.replace("base_model.model.", ""): t for n, t in watched.ended[policy].items()}
        delta = 8 * mine[f"{name}.lora_B.default.weight"] @ mine[f"{name}.lora_A.default.weight"]  # alpha 32, rank 4
        expected = mine[f"{name}.base_layer.weight"] + delta
        assert torch.allclose(model.get_parameter(f"{name}.weight"), expected, atol=1e-6)
        assert (folder / policy / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [True, False], ids=["lora", "full"])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(game: Any, tmp_path: Path, adapters: bool) -> None:
    config = config_of(game(), *([LORA] if adapters else []), "astuner.trainer_common.optim.optimizer=muon")
    mine = {"a": random_samples(seed=1), "b": random_samples(seed=2)}

    def learn(policies: Mapping[str, LocalPolicy], names: str) -> None:
        for name in names:
            trainer = policies[name].trainer
            assert trainer is not None
            trainer.update(with_(mine[name], policy=name))

    with running(config, done=0, total_steps=2) as policies:
        learn(policies, "ab")
        parts = {n: Part(p.trainer, p.loaded.tokenizer) for n, p in policies.items() if p.trainer is not None}
        saved = save_checkpoint(tmp_path / "saved", step=1, parts=parts, state={"n": 1})
        drawn = float(torch.rand(()))
        learn(policies, "aab")
        expected = {n: (weights(p), p.trainer.state_dict()) for n, p in policies.items() if p.trainer is not None}
        expected = {n: (w, {k: v.clone() for k, v in s.items()}) for n, (w, s) in expected.items()}
    with running(config, done=1, total_steps=2) as policies:
        restore(read_checkpoint(saved), {n: p.trainer for n, p in policies.items() if p.trainer is not None})
        assert float(torch.rand(())) == drawn
        learn(policies, "aab")
        for name, policy in policies.items():
            assert policy.trainer is not None
            assert same(weights(policy), expected[name][0])
            assert same(policy.trainer.state_dict(), expected[name][1])


@pytest.mark.slow
def test_a_run_is_resumed_with_all_its_policies_and_no_others(game: Any, watched: Watched) -> None:
    path = game(BOTH_LEARN)
    run(path, [LORA, "astuner.trainer_common.total_steps=1"], backbone="local")
    first = watched.ended
    with pytest.raises(CheckpointError, match=r"contains the policies a, b, but this run trains the policies a, c"):
        run(path, [LORA, "astuner.agents.villager.policy=c"], backbone="local", resume="must")
    with pytest.raises(CheckpointError, match=r"contains the policies a, b, but this run trains one policy"):
        run(path, [LORA, "astuner.agents.villager.policy=a"], backbone="local", resume="must")
    seen = {}
    original = TrainingLoop._step

    def look(loop: TrainingLoop, step: int) -> None:
        seen.update({name: weights(p) for name, p in loop.policies.items()})
        original(loop, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingLoop, "_step", look)
        run(path, [LORA], backbone="local", resume="must")
    assert [row["step"] for row in rows(path)] == [1, 2]
    assert all(same(seen[name], first[name]) for name in ("a", "b"))
    assert all(not same(seen[name], watched.ended[name]) for name in ("a", "b"))


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_finished_is_not_there(
    game: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from astuner_local.trainer import checkpoint

    with running(config_of(game(), LORA), done=0, total_steps=2) as policies:
        parts = {n: Part(p.trainer, p.loaded.tokenizer) for n, p in policies.items() if p.trainer is not None}
        first = save_checkpoint(tmp_path / "saved", step=1, parts=parts, state={})
        save_model = checkpoint._save_model

        def fails_for_the_second(model: Any, folder: Path) -> None:
            if folder.name == "b":
                raise OSError("disk full")
            save_model(model, folder)

        monkeypatch.setattr(checkpoint, "_save_model", fails_for_the_second)
        for step in (1, 2):
            with pytest.raises(CheckpointError, match=r"disk full.*step-000001"):
                save_checkpoint(tmp_path / "saved", step=step, parts=parts, state={})
        assert [p.name for p in (tmp_path / "saved").iterdir()] == ["step-000001"]
        assert latest_checkpoint(tmp_path / "saved") == first


# --- external models --------------------------------------------------------------------------------------------


class Moderator(BaseHTTPRequestHandler):
    """Speaks chat completions, as somebody else's server does."""

    asked: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append({"path": self.path, "key": self.headers["Authorization"], **body})
        answer = {
            "choices": [{"message": {"role": "assistant", "content": "Go on, wolf."}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 7, "completion_tokens": 4},
        }
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def moderator() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    asked: list[dict[str, Any]] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Moderator,), {"asked": asked}))
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1", asked
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.slow
def test_an_external_agent_takes_part_and_is_never_trained(
    game: Any, watched: Watched, moderator: tuple[str, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, asked = moderator
    monkeypatch.setenv("MODERATOR_KEY", "sk-not-to-be-shown")
    path = game(BOTH_LEARN, talkers=["moderator", "wolf", "villager"])
    who = f"{{model: external, base_url: '{url}', name: big, api_key_env: MODERATOR_KEY, temperature: 0.25}}"
    run(path, [LORA, f"astuner.agents.moderator={who}"], backbone="local")
    assert len(asked) == 2 * 8 + 1  # and one validation episode
    assert asked[0]["path"] == "/v1/chat/completions"
    assert asked[0]["key"] == "Bearer sk-not-to-be-shown"
    assert (asked[0]["model"], asked[0]["temperature"]) == ("big", 0.25)
    assert {s.agent for policy in watched.given.values() for step in policy for s in step} == {"wolf", "villager"}
    folder = path.parent / "run"
    said = [json.loads(line) for line in (folder / "episodes" / "step_000001.jsonl").read_text().splitlines()]
    assert len(said) == 8
    (wolf,) = (turn for turn in said[0]["turns"] if turn["agent"] == "wolf")
    assert wolf["new_messages"][0]["content"].endswith("Go on, wolf.")
    files = [p.read_bytes() for p in folder.rglob("*") if p.is_file()]
    assert not any(b"sk-not-to-be-shown" in data for data in files)


def test_a_run_in_which_nobody_learns_is_refused(game: Any) -> None:
    path = game()
    with pytest.raises(ConfigError, match="trains no agent"):
        run(path, ["astuner.agents.wolf.train=false", "astuner.agents.villager.train=false"], backbone="local")


# --- the plan ---------------------------------------------------------------------------------------------------


def test_the_plan_names_agents_and_policies_and_counts_their_memory(game: Any) -> None:
    def lines(agents: str, *overrides: str) -> Mapping[str, str]:
        plan = run(game(agents=agents), list(overrides), backbone="local", dry_run=True).plan
        assert plan is not None
        return plan.lines

    external = "judge: {model: external, base_url: 'https://api.example.com/v1', name: big}"
    two = lines(f"{{wolf: {{policy: a}}, villager: {{policy: b, train: false}}, {external}}}", LORA)
    assert two["agents"].startswith("wolf: policy a; villager: policy b, not trained; judge: big at https://")
    with pytest.raises(ConfigError, match="contains a user or password") as refused:
        lines(f"{{wolf: {{policy: a}}, {external.replace('//', '//me:secret@')}}}", LORA)
    assert "secret" not in str(refused.value)
    assert two["policies"] == "a: tiny-calculator, LoRA rank 4; b: tiny-calculator, not trained"
    assert two["parameters"].startswith("a: ")
    assert "in adapters" in two["parameters"].split("; b: ")[0]
    assert "not trained" in two["parameters"].split("; b: ")[1]
    alone = lines("{}")
    assert "agents" not in alone
    assert "policies" not in alone
    assert "; " not in alone["parameters"]


def test_the_estimate_counts_what_is_shared_once(game: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from astuner_local import memory

    monkeypatch.setattr(memory, "GIB", 1)  # read in bytes

    def weights_of(agents: str, *overrides: str) -> int:
        plan = memory.estimate(config_of(game(agents=agents), *overrides))
        return int(float(plan["memory (estimate)"].split("weights ")[1].split(",")[0]))

    frozen = "{wolf: {policy: a}, villager: {policy: b, train: false}}"
    model = weights_of("{}")
    assert weights_of("{}", LORA) == 2 * model  # the engine merges
    assert weights_of(AGENTS) == 2 * model
    assert weights_of(AGENTS, "astuner.trainer_common.use_kl_loss=true") == 3 * model
    adapters = weights_of(frozen, LORA) - model
    assert weights_of(AGENTS, LORA) == model + 2 * adapters
    assert weights_of(AGENTS, LORA, "astuner.trainer_common.use_kl_loss=true") == model + 2 * adapters


@pytest.mark.slow
def test_an_interrupt_between_steps_saves_all_policies(game: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = game(BOTH_LEARN)
    original = TrainingLoop._after

    def interrupted(loop: TrainingLoop, step: int) -> None:
        if step == 1:
            raise Interrupted("stopped on request")
        original(loop, step)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "_after", interrupted)
        with pytest.raises(Interrupted):
            run(path, [LORA], backbone="local")
    saved = latest_checkpoint(path.parent / "run" / "resume")
    assert saved is not None
    assert {p.name for p in saved.iterdir()} == {"a", "b", "resume", "manifest.json"}
    run(path, [LORA], backbone="local")
    assert [row["step"] for row in rows(path)] == [1, 2]


@pytest.mark.slow
def test_a_checkpoint_answers_with_each_policys_own_model(game: Any, watched: Watched) -> None:
    path = game(BOTH_LEARN)
    run(path, ["astuner.trainer_common.total_steps=1"], backbone="local")
    with serve(path, backbone="local") as serving:
        for policy in ("a", "b"):
            engine = serving.policy(policy)[0].engine
            assert isinstance(engine, LocalEngine)
            mine = dict(engine._weights.model.named_parameters())
            assert same({n: t.detach() for n, t in mine.items()}, watched.ended[policy])
        assert serving.models["a"].engine is not serving.models["b"].engine
    assert evaluate(path, backbone="local").tasks == 1


@pytest.mark.slow
def test_a_policy_that_nobody_trains_is_not_saved_and_answers_as_configured(game: Any) -> None:
    path = game(BOTH_LEARN, agents="{wolf: {policy: a}, villager: {policy: b, train: false}}")
    run(path, ["astuner.trainer_common.total_steps=1"], backbone="local")
    with serve(path, backbone="local") as serving:
        assert serving.served["a"].name.endswith("step-000001/a")
        assert serving.served["b"].name == locate_model("tiny-calculator")
    assert evaluate(path, backbone="local").tasks == 1
