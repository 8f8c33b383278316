"""Training runs with a planted fault, recorded as ``metrics.jsonl`` for the tests of the sentinel.

``python -m tests.planted`` trains each fault of `tests.planted.faults` on the `local` backbone with the tiny model.
"""
