"""A judge for ASTuner, as a third party would publish it."""
