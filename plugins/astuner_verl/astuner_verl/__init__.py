"""The VERL backbone of ASTuner: the same experiment, trained by VERL on a Ray cluster."""
