"""Does an agent keep tokens exact?  Asked before any training, without a GPU and without weights.

A scripted model speaks the model family's own format through the real tokenizer, chat template and codec, to the
experiment's real agent, or says again what a recording holds (`checks`, `scripted`).  What the agent sends back shows
whether its turns continue token by token, and if not, which message broke it (`report`).

Invariant: the codec decides what continues, exactly as in training; this package only explains.
"""
