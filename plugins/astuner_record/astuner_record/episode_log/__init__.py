"""Episode log: every episode of a run with its tokens, in a compact SQLite database that other tools can read.

::

    rows        columns of a row, and conversion of episodes to rows and back
    store       database ``episodes/episodes.sqlite`` of the run folder, written as episodes end, rewound on resume
    tokenizers  tokenizer files next to the log, to decode token IDs without the model
    reader      lists, filters, steps and groups for everything that inspects a run
    convert     export to parquet, jsonl, sft, dpo and other formats
    format1     reader for logs of older ASTuner versions

``docs/episode_log.md`` describes the format. pyarrow is imported only when it is used.
"""

from __future__ import annotations

from astuner_record.episode_log.reader import EpisodeLog, LoggedEpisode
from astuner_record.episode_log.store import FORMAT, EpisodeLogWriter, rewind
from astuner_record.episode_log.tokenizers import keep_tokenizers, tokenizer_file

__all__ = ["FORMAT", "EpisodeLog", "EpisodeLogWriter", "LoggedEpisode", "keep_tokenizers", "rewind", "tokenizer_file"]
