"""The VERL backbone of ASTuner: train an experiment with VERL on a Ray cluster."""
