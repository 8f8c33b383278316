"""What a request to the model can be refused for."""

from __future__ import annotations

from astuner.contracts.errors import EpisodeError


class UnsupportedRequest(EpisodeError, ValueError):
    """A request holds something the chat codec does not turn into tokens; the message names the field."""
