"""Requests to a model class of AgentScope, of the installed version: 1.x or 2.x.

The two versions differ in how a model is made and asked. AgentScope is imported when a model is made.

Invariant: a call of `ask` sends one request. AgentScope's retries and the retries of vendor clients are turned off.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import typing
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from astuner_helpers.reply import NoReply, Reply, count_of
from astuner_helpers.settings import HelperModel

_FORMATTERS_1 = {"AnthropicChatModel": "AnthropicChatFormatter", "GeminiChatModel": "GeminiChatFormatter"}
"""Models of 1.x with a message format other than OpenAI's, and the formatters that write it."""
_LENGTH_KEYS_1 = {"GeminiChatModel": "max_output_tokens", "OpenAIResponseModel": "max_output_tokens"}
_STRUCTURED_TOOL = "generate_structured_output"
"""Tool that AgentScope 2.x uses to request structured output."""


class VendorModel(ABC):
    """A model object of AgentScope and the way to ask it."""

    model: Any

    @abstractmethod
    async def ask(self, body: Mapping[str, Any], structure: type[BaseModel] | None) -> Reply:
        """Send one request.

        :param body: `messages`, `temperature`, `max_tokens` and, with a structure, `response_format`.
        :raises NoReply: the answer does not have the required form.
        """


def make_model(model_class: Any, section: HelperModel, key: str) -> VendorModel:
    """Create a model of a class of `agentscope.model`. Raises the errors of AgentScope or of the vendor's client."""
    takes_credential = "credential" in inspect.signature(model_class).parameters
    made = Model2(model_class, section, key) if takes_credential else Model1(model_class, section, key)
    _turn_off_retries(made.model, section)
    return made


class Model1(VendorModel):
    """A model of AgentScope 1.x."""

    def __init__(self, model_class: Any, section: HelperModel, key: str) -> None:
        self._class_name = model_class.__name__
        options = dict(section.agentscope_kwargs)
        if "stream" in inspect.signature(model_class).parameters:
            options.setdefault("stream", False)
        if key:
            options["api_key"] = key
        self.model = model_class(model_name=section.model, **options)

    async def ask(self, body: Mapping[str, Any], structure: type[BaseModel] | None) -> Reply:
        options: dict[str, Any] = {
            "temperature": body["temperature"],
            _LENGTH_KEYS_1.get(self._class_name, "max_tokens"): body["max_tokens"],
        }
        if self._class_name == "OllamaChatModel":
            options = {"options": {"temperature": body["temperature"], "num_predict": body["max_tokens"]}}
        if structure is not None:
            options["structured_model"] = structure
        messages = await format_messages_1(self._class_name, body["messages"])
        response = await _last_part(await self.model(messages, **options))
        structured = getattr(response, "metadata", None) if structure is not None else None
        blocks = getattr(response, "content", None) or []
        texts = (block.get("text") or "" for block in blocks if block.get("type") == "text")
        return _reply(json.dumps(structured, ensure_ascii=False) if structured else "".join(texts), response)


async def format_messages_1(class_name: str, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in the format of a model of AgentScope 1.x."""
    if class_name not in _FORMATTERS_1:
        return [dict(message) for message in messages]
    import agentscope.formatter
    from agentscope.message import Msg

    formatter = getattr(agentscope.formatter, _FORMATTERS_1[class_name])()
    formatted: list[dict[str, Any]] = await formatter.format(
        [Msg(name=m["role"], content=m["content"], role=m["role"]) for m in messages]
    )
    return formatted


class Model2(VendorModel):
    """A model of AgentScope 2.x, which has a credential and parameters.

    An option of `agentscope_kwargs` goes to the parameters, the credential or the model, by its name. Two spellings of
    1.x work too: `generate_kwargs` are fields of each request, and `client_kwargs.base_url` goes to the credential.
    """

    def __init__(self, model_class: Any, section: HelperModel, key: str) -> None:
        options = dict(section.agentscope_kwargs)
        self._request_fields: dict[str, Any] = options.pop("generate_kwargs", None) or {}
        client_options = dict(options.pop("client_kwargs", None) or {})
        self._parameters_class = model_class.Parameters
        self._parameters = _pop_all(options, self._parameters_class.model_fields)
        self._enforces_schemas = model_class.__name__ == "OpenAIChatModel"
        credential_class = _credential_class(model_class)
        credential = _pop_all(options, credential_class.model_fields)
        if "base_url" in credential_class.model_fields and "base_url" in client_options:
            credential.setdefault("base_url", client_options.pop("base_url"))
        if key:
            credential["api_key"] = key
        self.model = model_class(
            credential=credential_class(**credential),
            model=section.model,
            parameters=self._parameters_class(**self._parameters),
            client_kwargs=client_options,
            **{"stream": False, "max_retries": 0, **options},
        )

    async def ask(self, body: Mapping[str, Any], structure: type[BaseModel] | None) -> Reply:
        model = self._with_parameters(temperature=body["temperature"], max_tokens=body["max_tokens"])
        messages = _messages_2(body["messages"])
        fields = dict(self._request_fields)
        if structure is not None and not self._enforces_schemas:
            return await _ask_by_tool_2(model, messages, structure, fields)
        if structure is not None:
            fields["response_format"] = body["response_format"]
        response = await _last_part(await model(messages, **fields))
        if str(getattr(response, "finished_reason", "")) == "interrupted":  # it swallows the cancellation
            raise asyncio.TimeoutError
        blocks = getattr(response, "content", None) or []
        return _reply("".join(block.text for block in blocks if block.type == "text"), response)

    def _with_parameters(self, **sampling: Any) -> Any:
        """Return the model with other parameters. Classes without a temperature leave it to the vendor."""
        known = self._parameters_class.model_fields
        parameters = {**self._parameters, **{name: value for name, value in sampling.items() if name in known}}
        model = copy.copy(self.model)  # shares the client
        model.parameters = self._parameters_class(**parameters)
        return model


async def _ask_by_tool_2(model: Any, messages: Any, structure: type[BaseModel], fields: Mapping[str, Any]) -> Reply:
    from agentscope.exception import StructuredOutputError
    from agentscope.tool import ToolChoice

    choice = ToolChoice(mode=_STRUCTURED_TOOL)  # without one, AgentScope sends up to four requests
    try:
        response = await model.generate_structured_output(messages, structure, tool_choice=choice, **fields)
    except StructuredOutputError as e:
        message = f"the answer does not have the required form: {e}"
        raise NoReply(message, again=True, billed=True, about_question=True) from None
    return _reply(json.dumps(response.content, ensure_ascii=False), response)


def _messages_2(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    from agentscope.message import Msg, TextBlock

    return [Msg(name=m["role"], content=[TextBlock(text=m["content"])], role=m["role"]) for m in messages]


def _credential_class(model_class: Any) -> Any:
    annotation = inspect.signature(model_class).parameters["credential"].annotation
    return next(a for a in (annotation, *typing.get_args(annotation)) if hasattr(a, "model_fields"))


def _pop_all(options: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: options.pop(name) for name in [*options] if name in names}


def _turn_off_retries(model: Any, section: HelperModel) -> None:
    """Turn off the retries of clients such as OpenAI's and Anthropic's, unless the section sets them."""
    given = section.agentscope_kwargs
    client_options = given.get("client_kwargs") or given.get("client_args") or {}  # client_args: 1.x before 1.0.10
    client: Any = getattr(model, "client", None)
    if hasattr(client, "max_retries") and "max_retries" not in client_options:
        client.max_retries = 0


async def _last_part(response: Any) -> Any:
    """Return the last part of a streamed response, which has the complete text, or the response itself."""
    if not inspect.isasyncgen(response):
        return response
    last = None
    async for part in response:
        last = part
    return last


def _reply(text: str, response: Any) -> Reply:
    usage = getattr(response, "usage", None)
    return Reply(
        text=text,
        prompt_tokens=count_of(getattr(usage, "input_tokens", None)),
        completion_tokens=count_of(getattr(usage, "output_tokens", None)),
    )
