"""Check that an agent keeps tokens exact, before training, without a GPU and without model weights.

A scripted model answers the experiment's agent in the format of the model family, through the real tokenizer, chat
template and codec; or a recording is replayed (`checks`, `scripted`). The agent's requests show whether its turns
continue token by token, and if not, which message breaks the continuation (`report`).

Invariant: the codec decides what continues, exactly as in training. This package only explains the result.
"""
