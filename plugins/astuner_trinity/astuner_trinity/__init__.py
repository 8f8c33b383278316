"""The Trinity-RFT backbone of ASTuner: the same experiment, with rollout and training apart from one another."""
