"""A model of AgentScope 1.x as a helper model, for vendors whose API is not OpenAI's.

AgentScope's models are asynchronous and stay with the event loop they were first used on, so they have one loop of
their own here, in a daemon thread.  Their clients' own retries are turned off where that is possible, since every
request is to be on record.  agentscope is imported when the helper is made.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import json
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from astuner.contracts.errors import ConfigError, MissingDependency
from astuner_helpers.reply import EMBEDDINGS, NoReply, Question, Reply, count_of
from astuner_helpers.server import QUESTION_REFUSED
from astuner_helpers.settings import HelperModel

_MAY_PASS = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_OWN_RETRIES = ("OpenAIChatModel", "OpenAIResponseModel", "AnthropicChatModel")
_FORMATTERS = {"AnthropicChatModel": "AnthropicChatFormatter", "GeminiChatModel": "GeminiChatFormatter"}
"""Models whose messages are not OpenAI's -> what writes theirs."""
_LENGTHS = {"GeminiChatModel": "max_output_tokens", "OpenAIResponseModel": "max_output_tokens"}
_CLOSE_SECONDS = 2.0
_INSTALL = "pip install 'astuner-agentscope[agentscope1]'"


class AgentScopeServer:
    """Asks by a class of `agentscope.model`."""

    def __init__(self, section: HelperModel, key: str, where: str) -> None:
        """
        :param where: how a person writes the key that names the class.
        :raises ConfigError: there is no such class, or it cannot be made with what is given.
        :raises MissingDependency: AgentScope 1.x is not installed.
        """
        assert section.agentscope is not None  # the section checks that
        self._class, self._timeout = section.agentscope, section.timeout
        self.name = f"agentscope {section.agentscope}"
        self.identity = {"agentscope": section.agentscope, "kwargs": section.agentscope_kwargs}
        made = _class_of(section.agentscope, where)
        options = dict(section.agentscope_kwargs)
        known = inspect.signature(made).parameters
        if "stream" in known:
            options.setdefault("stream", False)
        if self._class in _OWN_RETRIES:
            old = "client_args" if "client_kwargs" not in known else "client_kwargs"  # before 1.0.10
            options[old] = {"max_retries": 0, "timeout": section.timeout, **(options.get(old) or {})}
        if key:
            options["api_key"] = key
        try:
            self._model = made(model_name=section.model, **options)
        except Exception as e:  # whatever a vendor's client raises
            told = f"{type(e).__name__}: {e}"
            told = told.replace(key, "***") if key else told
            raise ConfigError(f"{where}: {section.agentscope} cannot be made: {told}; see agentscope_kwargs") from e
        weakref.finalize(self, _close, self._model)

    def send(self, question: Question, answer: type[BaseModel] | None) -> Reply:
        """As `astuner_helpers.server.OpenAIServer.send`."""
        if question.route == EMBEDDINGS:
            raise NoReply("embeddings need a helper model with a base_url", again=False, billed=False)
        structure = answer if "response_format" in question.body else None
        asked = asyncio.wait_for(self._answer(question.body, structure), self._timeout)
        work = asyncio.run_coroutine_threadsafe(asked, _loop(os.getpid()))
        try:
            return work.result()
        except asyncio.TimeoutError:
            raise NoReply(f"{self.name} gave no answer within {self._timeout:g} s", again=True, billed=True) from None
        except (TypeError, AttributeError, NotImplementedError) as e:
            told = f"{self.name} cannot be asked: {type(e).__name__}: {e}"
            raise NoReply(told, again=False, billed=False) from e
        except ValidationError as e:
            told = f"its answer does not have the wanted form: {e}"
            raise NoReply(told, again=True, billed=True, about_question=True) from None
        except Exception as e:  # every vendor's client has exceptions of its own
            raise _no_reply(self.name, e) from e

    async def _answer(self, body: Mapping[str, Any], structure: type[BaseModel] | None) -> Reply:
        messages = await _formatted(self._class, body["messages"])
        options: dict[str, Any] = {
            "temperature": body["temperature"],
            _LENGTHS.get(self._class, "max_tokens"): body["max_tokens"],
        }
        if self._class == "OllamaChatModel":
            options = {"options": {"temperature": body["temperature"], "num_predict": body["max_tokens"]}}
        if structure is not None:
            options["structured_model"] = structure
        found = await self._model(messages, **options)
        if inspect.isasyncgen(found):  # each part has all that was said so far
            parts, found = found, None
            async for part in parts:
                found = part
        return _reply(found, structure is not None)


def _reply(found: Any, structured: bool) -> Reply:
    blocks = getattr(found, "content", None) or []
    text = "".join(block["text"] for block in blocks if block.get("type") == "text" and block.get("text"))
    if structured:
        text = json.dumps(found.metadata, ensure_ascii=False) if getattr(found, "metadata", None) else text
    usage = getattr(found, "usage", None)
    return Reply(
        text=text,
        prompt_tokens=count_of(getattr(usage, "input_tokens", None)),
        completion_tokens=count_of(getattr(usage, "output_tokens", None)),
    )


async def _formatted(name: str, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if name not in _FORMATTERS:
        return [dict(message) for message in messages]
    import agentscope.formatter
    from agentscope.message import Msg

    said = [Msg(name=m["role"], content=m["content"], role=m["role"]) for m in messages]
    formatted: list[dict[str, Any]] = await getattr(agentscope.formatter, _FORMATTERS[name])().format(said)
    return formatted


def _no_reply(name: str, error: Exception) -> NoReply:
    status = getattr(error, "status_code", None)
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    after = str(headers.get("retry-after", "")).strip()
    unsent = type(error.__cause__).__name__ == "ConnectError"
    return NoReply(
        f"{name}: {type(error).__name__}: {error}",
        again=status is None or status in _MAY_PASS,
        after=float(after) if after.isdigit() else 0.0,
        billed=status is None and not unsent,
        about_question=status in QUESTION_REFUSED,
    )


def _class_of(name: str, where: str) -> Any:
    try:
        import agentscope.model
    except ImportError as e:
        raise MissingDependency(f"{where} needs AgentScope 1.x ({e}): {_INSTALL}") from e
    found = getattr(agentscope.model, name, None)
    if not (isinstance(found, type) and hasattr(agentscope.model, "ChatModelBase") and name != "ChatModelBase"):
        names = sorted(n for n in dir(agentscope.model) if n.endswith("Model"))
        raise ConfigError(f"{where}: agentscope.model has no class {name!r}; there are {', '.join(names)}")
    return found


def _close(model: Any) -> None:
    """Give the client's connections back, where it has such a thing."""
    close = getattr(getattr(model, "client", None), "close", None)
    if inspect.iscoroutinefunction(close):
        with contextlib.suppress(concurrent.futures.TimeoutError):
            asyncio.run_coroutine_threadsafe(close(), _loop(os.getpid())).result(_CLOSE_SECONDS)


@functools.lru_cache(maxsize=1)
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """The loop of all AgentScope helpers of this process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="astuner-helper-agentscope", daemon=True).start()
    return loop
