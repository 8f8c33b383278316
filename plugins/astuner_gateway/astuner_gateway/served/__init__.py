"""The model of an experiment for many conversations, for a long time: what `astuner serve` does.

It speaks the dialects of `astuner.endpoint`, which serves the model of one episode.  Nothing is recorded for training;
who wants to learn from what was said sends it to a collector (``--trace``) and reads it back as tasks.

``model`` who answers: a conversation's voice, or the agent · ``conversations`` which one a request continues ·
``handler`` from a request to its answer · ``following`` the next model, when one was promoted · ``spans`` what a
collector is told of it
"""
