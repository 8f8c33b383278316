"""The model over HTTP: an endpoint for agents, a server of what was trained, feedback of users, any program."""
