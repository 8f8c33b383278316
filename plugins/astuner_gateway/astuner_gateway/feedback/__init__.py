"""Training from the conversations of real users and what they think of them.

Two sides meet in a service of their own process.  A person's application talks to it as to OpenAI, and tells it later
how good a conversation was.  Episodes of the run (the workflow ``feedback``) offer it their models: each conversation
is led with the model of one episode, and its rating is the episode's reward.  So tokens and log-probabilities are
recorded where they always are, whatever the backbone, and the service never sees any.

``settings`` what can be configured · ``service`` starts the process, ``server`` is it · ``conversations`` who talks
with which episode · ``workflow`` the run's side
"""
