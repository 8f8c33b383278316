"""The Trinity-RFT backbone of ASTuner: train an experiment with rollouts and training on separate GPUs."""
