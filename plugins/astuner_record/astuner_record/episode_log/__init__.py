"""The episode log: every episode of a run with its tokens, compact, readable by others, and never in the way.

::

    writer   episodes and their credit, as they come, to append-only Arrow streams in ``episodes/`` of the run folder
    journal  episodes that have ended and are in no batch yet, for whoever comes after a process that was killed
    stream   one such file: its whole batches, and what a killed process left behind them
    rows     an episode as one row, and back
    index    what lists, filters and searches need, in SQLite; derived, so it may be deleted at any time
    tokenizers  beside the files, so that ids can be turned into text without the model
    reader   what everything that looks at a run uses: list, filter, jump
    overview what it says of steps, groups and values
    convert  parquet, jsonl, sft and dpo files made of it, the latter two from its `conversations`

Invariant: the Arrow files are the truth and hold whole episodes only, apart from the last bytes of a file whose writer
was killed; what ended and is not in them is in a journal.  The format is described in ``docs/episode_log.md``.  Nothing
here imports pyarrow before it is used.
"""

from __future__ import annotations

from astuner_record.episode_log.reader import EpisodeLog, LoggedEpisode
from astuner_record.episode_log.rewinding import rewind
from astuner_record.episode_log.schema import FORMAT
from astuner_record.episode_log.tokenizers import keep_tokenizers, tokenizer_file
from astuner_record.episode_log.writer import EpisodeLogWriter

__all__ = ["FORMAT", "EpisodeLog", "EpisodeLogWriter", "LoggedEpisode", "keep_tokenizers", "rewind", "tokenizer_file"]
