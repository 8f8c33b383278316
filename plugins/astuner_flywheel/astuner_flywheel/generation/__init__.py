"""New tasks by a helper model, from passages of documents or from a handful of samples, each of them checked.

One way through: `seeds` and `documents` are what there is (`material`), `units` what is asked in which order, `propose`
asks, `checks` and `verify` decide, `making` leads all of it, and `folder` writes down every step so that it can go on
after any interruption.  `entry` is where the command and the task reader come in.
"""
