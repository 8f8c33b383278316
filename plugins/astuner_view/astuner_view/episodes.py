"""An episode as the page wants it: what a list shows of it, and everything but its tokens."""

from __future__ import annotations

import json
from typing import Any

from astuner.contracts.types import StopReason
from astuner_record.episode_log.columns import Row
from astuner_record.episode_log.reader import Facets, Listed, LoggedEpisode
from astuner_view.failures import explained
from astuner_view.paths import credited_paths

_LISTED = (
    "episode_id", "group_id", "task_id", "step", "split", "attempt", "time", "query", "stop_reason", "reward",
    "success", "error", "seconds", "retries", "turns", "tokens", "prompt_tokens", "branches",
)  # fmt: skip
_TURN = (
    "index", "agent", "role", "policy", "trained", "lost", "continues", "branch_reason", "approximation",
    "finish_reason", "policy_version", "prompt_tokens", "response_tokens",
)  # fmt: skip


def listed_json(listed: Listed) -> dict[str, Any]:
    """A line of a list."""
    found = {name: getattr(listed, name) for name in _LISTED}
    return found | {"agents": list(listed.agents), "tools": list(listed.tools)}


def episode_json(listed: Listed, logged: LoggedEpisode) -> dict[str, Any]:
    """The page of an episode."""
    row = logged.row
    turns = [_turn(turn) for turn in row["turns"]] + [_external(turn) for turn in row["external"]]
    samples, problem = _samples(logged)
    return listed_json(listed) | {
        "query": row["query"],
        "reward_source": row["reward_source"],
        "rewards": _json(row["rewards"]),
        "task": _json(row["task"]),
        "output": _json(row["output"]),
        "metrics": _json(row["metrics"]),
        "turns": sorted(turns, key=lambda turn: turn["index"]),
        "samples": samples,
        "problems": [problem] if problem else [],
        "failure": explained(StopReason(row["stop_reason"]), row["error"]),
    }


def facets_json(facets: Facets | None) -> dict[str, Any]:
    counted = ("stop_reason", "split", "agent", "tool", "error")
    if facets is None:
        return {name: [] for name in counted} | {"step": None, "reward": None}
    return {name: getattr(facets, name) for name in (*counted, "step", "reward")}


def _turn(turn: Row) -> dict[str, Any]:
    said = {"request": _json(turn["request"]), "tools": _json(turn["tools"]), "reply": _json(turn["reply"])}
    return {name: turn[name] for name in _TURN} | {"external": False, "model": None} | said


def _external(turn: Row) -> dict[str, Any]:
    """A model outside of the run: there is nothing of tokens to say of it."""
    return {
        "index": turn["index"],
        "agent": turn["agent"],
        "role": turn["role"],
        "policy": "",
        "external": True,
        "model": turn["model"],
        "trained": False,
        "lost": False,
        "continues": None,
        "branch_reason": "",
        "approximation": "",
        "finish_reason": None,
        "policy_version": None,
        "prompt_tokens": turn["prompt_tokens"],
        "response_tokens": turn["response_tokens"],
        "request": _json(turn["request"]),
        "tools": None,
        "reply": _json(turn["reply"]),
    }


def _samples(logged: LoggedEpisode) -> tuple[list[dict[str, Any]], str]:
    """What it was credited with, and what is wrong with that."""
    try:
        paths = credited_paths(logged)
    except ValueError as e:
        return [], f"the credit of this episode does not fit its turns: {e}"
    return [
        {
            "sample": path.credit.sample,
            "step": path.credit.step,
            "agent": path.credit.agent,
            "policy": path.credit.policy,
            "advantage": path.credit.advantage,
            "token_weight": path.credit.token_weight,
            "reward": path.credit.reward,
            "trained_tokens": path.credit.trained_tokens,
            "policy_version": path.sample.policy_version,
            "turns": [turn.index for turn in path.turns],
        }
        for path in paths
    ], ""


def _json(text: str | None) -> Any:
    return None if text is None else json.loads(text)
