"""Benchmarks: ratios measured in one run against a named peer or the machine's limit; see ``benchmarks/README.md``.

Nothing here is a test, and tests never check times.  A benchmark is a module with ``run(quick) -> Report``.
"""
