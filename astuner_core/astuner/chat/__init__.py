"""Between messages and tokens.

`codec.ChatCodec` turns an OpenAI-style request into token ids and token ids into an assistant message.  What the
model wrote is never tokenised again: its recorded ids are spliced into the next prompt.
"""
