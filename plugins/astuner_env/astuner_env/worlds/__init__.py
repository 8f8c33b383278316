"""Environments by others, adapted: gymnasium's FrozenLake, reasoning-gym's tasks, TextArena's games.

Each module imports the package it adapts, so it is imported only where that package is installed: in the interpreter
of the instances, which is the service's own: pydantic, which the core needs, is there.
"""
