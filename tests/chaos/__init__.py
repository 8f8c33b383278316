"""Runs among misbehaving agents, judges, tools, environments, engines, packages and disks, killed and gone on with.

``python -m tests.chaos --hours 1`` by hand; a round of about 200 episodes is in ``tests/end_to_end/test_chaos.py``.
"""
