"""Train agents on math tasks: a workflow, two judges, and a confined process for symbolic comparison."""
