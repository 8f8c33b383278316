"""Which questions there are already, by their words and, where that is wanted, by their meaning."""

from __future__ import annotations

from collections.abc import Sequence

from astuner_flywheel.generation.config import DataGenerationConfig
from astuner_flywheel.near import NearDuplicates, NearVectors
from astuner_helpers import Helper, HelperFailed

_WHERE = "astuner.task_reader.data_generation.near_in_meaning.helper_model"


class Known:
    """The questions so far; `near` asks about one, `keep` adds one.

    :param embedder: who embeds questions, where the section compares by meaning.
    """

    def __init__(self, config: DataGenerationConfig, embedder: Helper | None) -> None:
        self._config, self._embedder = config, embedder
        self._words = self._new_words()
        self._vectors: NearVectors | None = None
        self._embedded: dict[str, Sequence[float]] = {}
        if config.near_in_meaning is not None:
            self._vectors = NearVectors(config.near_in_meaning.threshold)

    def _new_words(self) -> NearDuplicates:
        config = self._config
        return NearDuplicates(config.near_duplicate_threshold, numbers_tell_apart=config.numbers_tell_apart)

    async def prepare(self, questions: Sequence[str]) -> None:
        """Embed them in one request; without a comparison by meaning this does nothing."""
        new = [question for question in dict.fromkeys(questions) if question not in self._embedded]
        if self._embedder is not None and new:
            vectors = await self._embedder.embed(new, purpose="compare tasks")
            self._embedded.update(zip(new, vectors, strict=True))

    def near(self, question: str) -> tuple[str, str] | None:
        """The name of a question that this one repeats, and how: ``near-duplicate`` or ``near in meaning``."""
        if found := self._words.near(question):
            return found[0][0], "near-duplicate"
        if self._vectors is not None:
            try:
                name = self._vectors.near(self._embedded[question])
            except ValueError as e:
                raise HelperFailed(f"{_WHERE}: cannot compare what it gives: {e}; choose another model") from None
            if name is not None:
                return name, "near in meaning"
        return None

    def keep(self, name: str, question: str) -> None:
        """Make a question known; it was prepared."""
        self._words.keep(name, question)
        if self._vectors is not None:
            self._vectors.keep(name, self._embedded[question])

    def beside(self) -> Known:
        """An empty one that shares what was embedded: for the questions of one batch among each other."""
        other = Known(self._config, self._embedder)
        other._embedded = self._embedded
        return other
