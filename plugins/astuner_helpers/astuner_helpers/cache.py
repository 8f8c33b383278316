"""Answers that are kept on this machine, each under the key of its question.

Invariant: what comes out is what a server said to exactly this question, or nothing; the answers kept are bounded in
size, and the oldest go first.
"""

from __future__ import annotations

import array
import json
import logging
import time
from collections.abc import Mapping, Sequence

from astuner_helpers.database import Database
from astuner_helpers.reply import Reply, count_of

logger = logging.getLogger("astuner.helper_models")

MOST_BYTES = 1 << 30
"""What all answers may take together."""
_LOOK_EVERY = 64
_AFTER_EVICTION = 0.9
_PER_QUERY = 500
_VECTOR, _TEXT = b"v", b"t"


class Answers:
    """The answers kept in a database."""

    def __init__(self, database: Database, *, most_bytes: int = MOST_BYTES) -> None:
        self._database, self._most_bytes = database, most_bytes
        self._put = 0

    def get(self, keys: Sequence[str]) -> dict[str, Reply]:
        """What is kept under ``keys``; one that cannot be read is left out, and said."""
        found: dict[str, Reply] = {}
        for at in range(0, len(keys), _PER_QUERY):
            some = keys[at : at + _PER_QUERY]
            marks = ", ".join("?" * len(some))
            with self._database.reading() as db:
                rows = db.execute(f"SELECT key, value FROM answers WHERE key IN ({marks})", some).fetchall()
            for key, value in rows:
                try:
                    found[key] = _unpacked(value)
                except (ValueError, KeyError, TypeError) as e:
                    self.unreadable(key, str(e))
        return found

    def put(self, replies: Mapping[str, Reply]) -> None:
        """Keep replies under their keys."""
        now = time.time()
        rows = [(key, now, value) for key, reply in replies.items() if len(value := _packed(reply)) <= self._most_bytes]
        with self._database.writing() as db:
            db.executemany(
                "INSERT OR REPLACE INTO answers (key, time, size, value) VALUES (?, ?, ?, ?)",
                [(key, then, len(value), value) for key, then, value in rows],
            )
        if self._put % _LOOK_EVERY == 0:
            self.evict()
        self._put += 1

    def unreadable(self, key: str, why: str) -> None:
        """Forget an answer, and say so: it is asked again."""
        logger.warning(
            "the answer kept under %s… in %s cannot be read (%s); it is asked again", key[:12], self._database.path, why
        )
        with self._database.writing() as db:
            db.execute("DELETE FROM answers WHERE key = ?", (key,))

    def evict(self) -> int:
        """Forget the oldest answers where they take more than they may; how many went."""
        with self._database.writing() as db:
            total = int(db.execute("SELECT COALESCE(SUM(size), 0) FROM answers").fetchone()[0])
            if total <= self._most_bytes:
                return 0
            old = []
            for key, size in db.execute("SELECT key, size FROM answers ORDER BY time, rowid"):
                if total <= self._most_bytes * _AFTER_EVICTION:
                    break
                old.append((key,))
                total -= size
            db.executemany("DELETE FROM answers WHERE key = ?", old)
            return len(old)


def _packed(reply: Reply) -> bytes:
    if reply.vectors:
        return _VECTOR + array.array("d", reply.vectors[0]).tobytes()
    kept = {
        "text": reply.text,
        "finish_reason": reply.finish_reason,
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
    }
    return _TEXT + json.dumps(kept).encode()


def _unpacked(value: bytes) -> Reply:
    """:raises ValueError, KeyError, TypeError: it is none that was packed."""
    kind, rest = value[:1], value[1:]
    if kind == _VECTOR:
        vector = array.array("d")
        vector.frombytes(rest)
        return Reply(vectors=(tuple(vector),))
    if kind != _TEXT:
        raise ValueError(f"it is of no known kind: {kind!r}")
    kept = json.loads(rest)
    text, finish_reason = kept["text"], kept["finish_reason"]
    if not isinstance(text, str) or not isinstance(finish_reason, str):
        raise TypeError("its text is none")
    return Reply(
        text=text,
        finish_reason=finish_reason,
        prompt_tokens=count_of(kept["prompt_tokens"]),
        completion_tokens=count_of(kept["completion_tokens"]),
    )
