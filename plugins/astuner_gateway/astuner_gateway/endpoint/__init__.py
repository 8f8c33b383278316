"""The model of an episode over HTTP: OpenAI's chat completions and responses, and Anthropic's messages.

Each dialect is a pair of pure functions around one `ChatRequest`: a body becomes a request, and the model's answers
become a body, from which the events of a stream are cut.  Everything between them is the same: keys, limits, retries,
errors.  Invariant: what a request asks for is honoured, or refused with the field's name; nothing is dropped.
"""

from astuner_gateway.endpoint.access import Access
from astuner_gateway.endpoint.server import Endpoint

__all__ = ["Access", "Endpoint"]
