"""Train agents in AppWorld: workflow, task reader, judge, and an adapter for the `appworld` package."""
