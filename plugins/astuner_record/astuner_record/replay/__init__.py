"""A recorded episode once more: judged again, or run again from some turn on; what `astuner replay` does.

::

    recorded    a run folder's episodes and settings
    verdicts    asks a judge about recorded episodes, as the runner would
    agreement   how two judges agree
    recording   which recorded reply answers which request, and where a run of the workflow leaves the record
    engine      the models of a fork: recorded replies first, then a real model
    outside     the same for models outside of the run
    stepping    what happens around each model call: stops, breakpoints, the person at the terminal
    fork        runs the workflow again
    folder      writes forks to a folder that every tool opens as a run
    text        what a person reads

Invariant: a run is never changed, and a recorded reply answers only a request with exactly the recorded tokens.
"""

from __future__ import annotations

from astuner_record.replay.recorded import RecordedRun

__all__ = ["RecordedRun"]
