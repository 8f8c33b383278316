"""Use a model class of AgentScope as a helper model, for vendors whose API is not OpenAI-compatible.

AgentScope's models are asynchronous and bound to the event loop of their first use, so all of them share an event loop
in a daemon thread. AgentScope is imported when the helper model is created.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import os
import threading
import weakref
from typing import Any

from pydantic import BaseModel, ValidationError

from astuner.contracts.errors import ConfigError, MissingDependency
from astuner_helpers.agentscope_models import make_model
from astuner_helpers.reply import EMBEDDINGS, NoReply, Question, Reply
from astuner_helpers.server import QUESTION_REFUSED
from astuner_helpers.settings import HelperModel

_MAY_PASS = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_CLOSE_SECONDS = 2.0
_INSTALL = "pip install astuner-agentscope"


class AgentScopeServer:
    """A server that is reached through a class of `agentscope.model`."""

    def __init__(self, section: HelperModel, key: str, where: str) -> None:
        """Create the model.

        :param where: The key that names the class, as users write it.
        :raises ConfigError: The class does not exist, or cannot be created with these options.
        :raises MissingDependency: AgentScope is not installed.
        """
        assert section.agentscope is not None  # the section checks that
        self._timeout = section.timeout
        self.name = f"agentscope {section.agentscope}"
        self.identity = {"agentscope": section.agentscope, "kwargs": section.agentscope_kwargs}
        model_class = _class_of(section.agentscope, where)
        try:
            self._model = make_model(model_class, section, key)
        except Exception as e:  # vendors' clients raise exceptions of any type
            reason = f"{type(e).__name__}: {e}"
            reason = reason.replace(key, "***") if key else reason
            raise ConfigError(
                f"{where}: cannot create {section.agentscope}: {reason}; check agentscope_kwargs and api_key_env"
            ) from e
        weakref.finalize(self, _close, self._model.model)

    def send(self, question: Question, answer: type[BaseModel] | None) -> Reply:
        """See `astuner_helpers.server.OpenAIServer.send`."""
        if question.route == EMBEDDINGS:
            raise NoReply("embeddings require a helper model with a base_url", again=False, billed=False)
        structure = answer if "response_format" in question.body else None
        asked = asyncio.wait_for(self._model.ask(question.body, structure), self._timeout)
        work = asyncio.run_coroutine_threadsafe(asked, _loop(os.getpid()))
        try:
            return work.result()
        except asyncio.TimeoutError:
            raise NoReply(f"{self.name} gave no answer within {self._timeout:g} s", again=True, billed=True) from None
        except (TypeError, AttributeError, NotImplementedError) as e:
            told = f"the request to {self.name} failed: {type(e).__name__}: {e}"
            raise NoReply(told, again=False, billed=False) from e
        except ValidationError as e:
            told = f"the answer does not have the required form: {e}"
            raise NoReply(told, again=True, billed=True, about_question=True) from None
        except NoReply:
            raise
        except Exception as e:  # vendors' clients raise exceptions of any type
            raise _no_reply(self.name, e) from e


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
        raise MissingDependency(f"{where} needs AgentScope ({e}): {_INSTALL}") from e
    found = getattr(agentscope.model, name, None)
    if not (isinstance(found, type) and hasattr(agentscope.model, "ChatModelBase") and name != "ChatModelBase"):
        names = sorted(n for n in dir(agentscope.model) if n.endswith("Model"))
        raise ConfigError(f"{where}: agentscope.model has no class {name!r}; available: {', '.join(names)}")
    return found


def _close(model: Any) -> None:
    """Close the client's connections if it supports that."""
    close = getattr(getattr(model, "client", None), "close", None)
    if inspect.iscoroutinefunction(close):
        with contextlib.suppress(concurrent.futures.TimeoutError):
            asyncio.run_coroutine_threadsafe(close(), _loop(os.getpid())).result(_CLOSE_SECONDS)


@functools.lru_cache(maxsize=1)
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """Return the event loop of all AgentScope helper models of this process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="astuner-helper-agentscope", daemon=True).start()
    return loop
