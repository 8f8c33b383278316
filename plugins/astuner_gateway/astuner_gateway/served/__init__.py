"""Serve the model of an experiment to many conversations over a long time (`astuner serve`).

It supports the dialects of `astuner_gateway.endpoint`, which serves the model of one episode. Nothing is recorded for
training; to learn from conversations, send them to a collector (``--trace``) and read them back as tasks.

- ``model``: answers with the model or the agent
- ``conversations``: finds the conversation that a request continues
- ``handler``: turns requests into answers
- ``following``: switches to the next promoted model
- ``spans``: sends completions to a collector
"""
