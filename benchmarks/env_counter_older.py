"""`env_counter` in the format of the reference service; `env_peer` copies it into the service's environments."""

from __future__ import annotations

from typing import Any


class BaseEnv:
    """Base class with the name that the service requires."""


class CounterEnv(BaseEnv):
    """Environment that counts its steps."""

    def __init__(self, task_id: str, instance_id: str, params: Any = None) -> None:
        self.count = 0

    def get_init_state(self, params: Any = None) -> Any:
        return {"state": [{"role": "user", "content": "count"}], "info": {}}

    def step(self, action: Any, params: Any = None) -> Any:
        self.count += 1
        state = [{"role": "user", "content": str(self.count), "tool_calls": []}]
        return {"state": state, "reward": 0.0, "is_terminated": False, "info": {}}

    def evaluate(self, messages: Any = None, params: Any = None) -> float:
        return 1.0

    def get_info(self, messages: Any = None, params: Any = None) -> Any:
        return ""

    def close(self) -> None:
        return None

    @staticmethod
    def get_query_list(split: str = "train", params: Any = None) -> Any:
        return ["count"]
