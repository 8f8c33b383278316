"""Benchmarks: ratios measured in one run, against a named peer or the machine's limit; see ``benchmarks/README.md``.

Nothing here is a test, and no test looks at a clock.  A benchmark is a module with ``run(quick) -> Report``.
"""
