"""A recorded episode once more: judged again, or run again from some turn on; what `astuner replay` does.

::

    recorded    a run folder's episodes and settings
    verdicts    asks a judge about recorded episodes, as the runner would, and how two judges agree
    recording   which recorded reply answers which request, where a run of the workflow leaves the record, and the
                models of a fork, which answer from it first
    fork        runs the workflow again, with stops around each model call, and writes a folder that opens as a run
    text        what a person reads

Invariant: a run is never changed, and a recorded reply answers only a request with exactly the recorded tokens.
"""

from __future__ import annotations

from astuner_record.replay.recorded import RecordedRun

__all__ = ["RecordedRun"]
