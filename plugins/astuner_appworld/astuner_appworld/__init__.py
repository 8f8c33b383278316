"""AppWorld for ASTuner: its agent, its tasks, its judge, and the adapter that runs the real package."""
