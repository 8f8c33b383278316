"""Math tasks for ASTuner: a workflow, two judges, and the limited process that compares answers as mathematics."""
