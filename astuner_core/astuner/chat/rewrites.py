"""Rewritings of history that agent frameworks are known to make, undone where that is exact.

AgentScope 1.0.7 stores a plain answer X of the model as if the model had called a tool: an assistant message that
calls ``generate_response`` with ``{"response": X}`` under an id of its own, a tool message saying that it worked,
and X again.  All three together mean no more than X.
"""

from __future__ import annotations

from collections.abc import Sequence

from astuner.contracts.messages import Message, call_parts, key_of, parse_arguments

_FINISH_TOOL, _FINISHED = "generate_response", "Successfully generated response."


def finish_call(messages: Sequence[Message], at: int) -> tuple[str, int] | None:
    """The answer that the made-up finish call at ``at`` stands for, and how many messages it takes up."""
    calls = messages[at]["tool_calls"]
    if len(calls) != 1 or at + 1 >= len(messages):
        return None
    name, arguments = call_parts(calls[0])
    given = parse_arguments(arguments)
    if name != _FINISH_TOOL or given is None or given.keys() != {"response"} or not isinstance(given["response"], str):
        return None
    said: str = given["response"]
    if key_of(messages[at + 1]) != ("tool", _FINISHED, key_of(messages[at])[1]):
        return None
    repeated = at + 2 < len(messages) and key_of(messages[at + 2]) == ("assistant", said)
    return said, 3 if repeated else 2
