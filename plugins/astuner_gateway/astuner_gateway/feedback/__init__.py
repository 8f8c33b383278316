"""Train from conversations with real users and their ratings.

A separate service process connects two sides. An application uses it like OpenAI's API and later sends a rating for
each conversation. Episodes of the run (workflow ``feedback``) offer their models to the service: the model of one
episode leads each conversation, and its rating becomes the reward of the episode. Tokens and log-probabilities are
recorded in the run as usual, on any backbone; the service never receives them.

- ``settings``: config keys
- ``service`` and ``server``: start the process, and the process itself
- ``conversations``: assign conversations to episodes
- ``workflow``: task reader and workflow in the run
"""
