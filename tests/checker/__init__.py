"""Whether what a run trained are the tokens its model made: a reader of run folders that shares no code with ASTuner.

Written against ``docs/episode_log.md``, ``docs/tokens.md``, ``docs/concepts.md`` and ``docs/endpoint.md`` alone, and
imports nothing of the product, so that it cannot repeat a mistake of its. ``python -m tests.checker RUN_DIR``.
"""
