"""Adapt third-party environments: FrozenLake of gymnasium, tasks of reasoning-gym, games of TextArena.

Each module imports the package it adapts, so import it only in the interpreter of the instances. That interpreter is
the service's own, so pydantic is available.
"""
