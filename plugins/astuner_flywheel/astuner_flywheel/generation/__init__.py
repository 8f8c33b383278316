"""New tasks by a helper model, from passages of documents or from a handful of samples, each of them checked.

One way through: `material` is what there is and what is asked about it in which order, `making` asks (`prompts`) and
decides, and `folder` writes down every step so that it can go on after any interruption.  `entry` is
where the command and the task reader come in.
"""
