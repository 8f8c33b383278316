"""What the helper said while rubrics were learned, so that learning goes on where it was stopped.

Learning is deterministic given the helper's answers.  So the answers are the whole of its state: killed and started
again, it asks the same questions in the same order, and those that are in the journal are not asked a second time.
Another helper, or the same one asked in another way, is asked anew.

Invariant: an answer is in the file before anything is done with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from astuner.contracts.errors import DataError
from astuner.support.json_lines import append_jsonl, read_jsonl
from astuner_helpers import Helper
from astuner_rubrics.grading import Messages
from astuner_rubrics.labels import digest


@dataclass
class Spent:
    """What was asked in this run of the command."""

    asked: int = 0
    """Answers of the helper, those from its own cache included."""
    remembered: int = 0
    """Answers that were in the journal."""
    cost: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Journal:
    """A helper model whose answers are written down; one file for each rubric file.

    :raises DataError: the file there is no journal.
    """

    def __init__(self, path: Path, helper: Helper) -> None:
        self.path, self.spent = path, Spent()
        self._helper = helper
        self._identity = helper.identity
        self._answers = _read(path)

    @property
    def model(self) -> str:
        return self._helper.model

    async def ask(self, messages: Messages, *, purpose: str, answer: type[BaseModel], sample: int) -> BaseModel:
        """The answer of the journal, or else of the helper; raises as `Helper.ask`."""
        key = digest([self._identity, messages, answer.__name__, sample])
        if key in self._answers:
            try:
                found = answer.model_validate(self._answers[key])
            except ValidationError:
                pass  # of an older form; asked again
            else:
                self.spent.remembered += 1
                return found
        said = await self._helper.ask(messages, purpose=purpose, answer=answer, sample=sample)
        assert isinstance(said.data, BaseModel)
        data = said.data.model_dump(mode="json")
        append_jsonl(self.path, {"key": key, "purpose": purpose, "answer": data, "cost": said.cost})
        self._answers[key] = data
        self.spent.asked += 1
        self.spent.cost += said.cost
        self.spent.prompt_tokens += said.prompt_tokens
        self.spent.completion_tokens += said.completion_tokens
        return said.data

    async def embed(self, texts: list[str]) -> list[list[float]]:
        """Vectors of texts, of the journal where they are there; raises as `Helper.embed`."""
        keys = [digest([self._identity, "embedding", text]) for text in texts]
        missing = [i for i, key in enumerate(keys) if key not in self._answers]
        if missing:
            vectors = await self._helper.embed([texts[i] for i in missing], purpose="learn.embed")
            for i, vector in zip(missing, vectors, strict=True):
                append_jsonl(self.path, {"key": keys[i], "purpose": "learn.embed", "answer": vector})
                self._answers[keys[i]] = vector
        return [list(map(float, self._answers[key])) for key in keys]


def _read(path: Path) -> dict[str, Any]:
    """Key -> answer; a last line that a crash cut off is taken out of the file, so that the next one can follow."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for number, row in enumerate(read_jsonl(path), start=1):
        if not {"key", "answer"} <= row.keys():
            raise DataError(f"{path}:{number}: is no line of a learning journal; delete the file to begin anew")
        found[row["key"]] = row["answer"]
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
    return found
