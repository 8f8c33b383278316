"""ASTuner: losses and advantage estimators from the literature, and what trainers share around them."""
