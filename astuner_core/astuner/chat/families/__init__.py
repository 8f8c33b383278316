"""How model families write: where a turn ends, how a tool is called.

A family is data (`table.FAMILIES`) and a few small readers.  Which one a chat template belongs to is found out by
rendering with it (`astuner.chat.probe`), never by the model's name.

Invariant: reading never fails and never guesses; what cannot be read stays in the text and is listed.
"""
