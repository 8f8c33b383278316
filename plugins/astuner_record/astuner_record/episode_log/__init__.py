"""The episode log: every episode of a run with its tokens, compact, readable by others, and never in the way.

::

    columns  what a row of it holds
    rows     an episode as a row, and back
    store    the database ``episodes/episodes.sqlite`` of the run folder: written as episodes end, rewound by a resume
    tokenizers  beside it, so that ids can be turned into text without the model
    reader   what everything that looks at a run uses: list, filter, jump; steps, groups and values
    convert  parquet, jsonl, sft and dpo files made of it
    format1  reads what earlier ASTuners wrote

The format is described in ``docs/episode_log.md``.  Nothing here imports pyarrow before it is used.
"""

from __future__ import annotations

from astuner_record.episode_log.reader import EpisodeLog, LoggedEpisode
from astuner_record.episode_log.store import FORMAT, EpisodeLogWriter, rewind
from astuner_record.episode_log.tokenizers import keep_tokenizers, tokenizer_file

__all__ = ["FORMAT", "EpisodeLog", "EpisodeLogWriter", "LoggedEpisode", "keep_tokenizers", "rewind", "tokenizer_file"]
