"""The `debug` backbone: run a few tasks of an experiment in one process, without Ray and without training.

Workflows run on the main thread's event loop, so breakpoints in them stop there.  Tokens come from the `local`
backbone's engine, from a running OpenAI-compatible server, or from a vLLM server that this run starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from astuner import debug_folder, describe_failure
from astuner.contracts.backbone import Backbone, Capabilities, Served
from astuner.contracts.errors import RunError
from astuner.contracts.events import Note, TokenizersLoaded
from astuner.contracts.messages import mapping_of
from astuner.contracts.types import Episode, ExternalTurn, Turn
from astuner_debug.engine import OpenAICompletionsEngine, running_vllm
from astuner_models.serving import load_tokenizer, serve_policies

if TYPE_CHECKING:
    from astuner.contracts.run import Run


class DebugBackbone(Backbone):
    """Run one episode of each of the first tasks and show every turn."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        trains=False,
        honours=frozenset({"model", "rollout", "debug"}),
        only={
            "rollout.tensor_model_parallel_size": (1,),
            "rollout.name": (None,),
            "rollout.multi_turn.expected_steps": (1,),
            "rollout.oversample": (1,),
            "rollout.num_repeat": (1,),
            "rollout.min_group_size": (),
            "rollout.max_failed_share": (),
            "rollout.multi_turn.max_sample_per_task": (),
        },
    )

    _interrupted: Callable[[], bool] = staticmethod(lambda: False)

    def plan(self) -> Mapping[str, str]:
        d = self.config.astuner.debug
        self.check()
        return {
            "debug": f"first {d.debug_first_n_tasks} training tasks, one episode each, "
            f"{d.debug_max_parallel} in parallel, no training",
            "engine": {
                "openai": f"server at {d.base_url}",
                "vllm": "vLLM server started by this run",
                "local": "engine of the local backbone",
            }[d.engine],
        }

    def check(self) -> None:
        if self.config.astuner.debug.engine == "local":
            self._local().check()

    def serve(self, model_path: str | None = None) -> AbstractContextManager[Served]:
        engine = self.config.astuner.debug.engine
        if engine == "local":
            return self._local().serve(model_path)
        return self._remote(model_path or self.config.locate_model(), start=engine == "vllm")

    def _local(self) -> Backbone:
        local: Backbone = self.config.resolve("backbone", "local")(self.config)
        return local

    @contextmanager
    def _remote(self, model: str, *, start: bool) -> Iterator[Served]:
        settings = self.config.astuner.debug
        trusted = self.config.astuner.model.trust_remote_code
        tokenizer = load_tokenizer(model, trust_remote_code=trusted)
        if start:
            log = debug_folder(self.config.run_dir) / "vllm.log"
            a, stop = self.config.astuner, self._interrupted
            longest, dtype = a.rollout.max_model_len, a.model.dtype
            with running_vllm(
                model,
                settings,
                max_model_len=longest,
                dtype=dtype,
                log=log,
                interrupted=stop,
                trust_remote_code=trusted,
            ) as engine:
                yield Served(engine=engine, tokenizer=tokenizer, name=engine.model)
        else:
            key = os.environ.get(settings.api_key_env, "")
            paths = (self.config.astuner.model.path, model)
            engine = OpenAICompletionsEngine(settings.base_url, api_key=key, paths=paths)
            yield Served(engine=engine, tokenizer=tokenizer, name=engine.model, note=engine.note)

    def train(self, run: Run) -> None:
        """Run the first tasks and show their turns; the weights do not change.

        :raises RunError: No episode could be scored.
        """
        settings = self.config.astuner.debug
        self._interrupted = lambda: run.interrupt.requested
        with serve_policies(self, self.config) as (served, models):
            for note in dict.fromkeys(one.note for one in served.values() if one.note):
                run.publish(Note(text=note))
            loaders = {name: partial(getattr, one, "tokenizer") for name, one in served.items()}
            run.publish(TokenizersLoaded(load=loaders))
            episodes = run.try_out(
                models,
                tasks=settings.debug_first_n_tasks,
                max_parallel=min(settings.debug_max_parallel, self.config.astuner.rollout.max_env_worker),
            )
        for episode in episodes:
            run.publish(Note(text=transcript_text(episode)))
        run.publish(Note(text=_summary(episodes)))
        if all(e.reward is None for e in episodes):
            raise RunError(
                f"none of {len(episodes)} episodes could be scored; the first one: {describe_failure(episodes[0])}"
            )


def _summary(episodes: list[Episode]) -> str:
    endings = ", ".join(
        f"{e.workflow_task.task.task_id or e.workflow_task.episode_id}: {e.stop_reason.value}" for e in episodes
    )
    rewards = [e.reward for e in episodes if e.reward is not None]
    return f"{len(episodes)} episodes ({endings}); rewards {rewards or 'none'}; no training in the debug backbone"


def transcript_text(episode: Episode) -> str:
    """Return the conversation of an episode as text for a terminal."""
    lines = [f"── episode {episode.workflow_task.episode_id}: {episode.workflow_task.task.main_query}"]
    everybody: Sequence[Turn | ExternalTurn] = [*episode.turns, *episode.external]
    for turn in sorted(everybody, key=lambda turn: turn.index):
        lines += [f"   {m.get('role', '?'):<9} {_content(m)}" for m in map(mapping_of, turn.request)]
        lines.append(f" ▶ {turn.agent:<9} {_content(turn.message)}   [{_facts(turn)}]")
    lines.append(
        f"   {episode.stop_reason.value}, reward {episode.reward} "
        f"({episode.reward_source or 'not scored'}) {episode.error}"
    )
    return "\n".join(lines)


def _facts(turn: Turn | ExternalTurn) -> str:
    if isinstance(turn, ExternalTurn):
        return f"{turn.model}, external model"
    facts = [
        f"{len(turn.generation.prompt_ids)} + {len(turn.generation.response_ids)} tokens",
        turn.generation.finish_reason.value,
    ]
    if turn.branch_reason:
        facts.append(f"branch: {turn.branch_reason}")
    if turn.approximation:
        facts.append(f"approximate: {turn.approximation}")
    if not turn.trained:
        facts.append("not trained")
    return ", ".join(facts)


def _content(message: Mapping[str, Any]) -> str:
    parts = [str(message.get("content") or "")]
    for call in message.get("tool_calls") or ():
        parts.append(f"{call['function']['name']}({call['function']['arguments']})")
    return " ".join(p for p in parts if p)
