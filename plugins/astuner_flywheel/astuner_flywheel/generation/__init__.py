"""Generate tasks with a helper model from passages of documents or from samples, and check each of them.

`material` provides passages and samples and the order of requests, `entry` runs the generation (with `prompts` and
`screening`) and is used by the command and the task reader, and `folder` records every step, so that an interrupted
generation can continue.
"""
