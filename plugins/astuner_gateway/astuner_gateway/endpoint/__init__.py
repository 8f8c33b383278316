"""Serve the model of an episode over HTTP: OpenAI's chat completions and Responses API, and Anthropic's messages.

Each dialect is a pair of pure functions around one `ChatRequest`: a body becomes a request, and the model's answers
become a body, which is split into the events of a stream. Keys, limits, retries and errors are shared by all dialects.
Invariant: every parameter of a request is honored, or rejected with the name of the field; none is silently dropped.
"""

from astuner_gateway.endpoint.access import Access
from astuner_gateway.endpoint.server import Endpoint

__all__ = ["Access", "Endpoint"]
