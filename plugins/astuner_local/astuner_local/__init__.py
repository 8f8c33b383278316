"""The embedded backbone of ASTuner: one machine, CPU or one GPU, torch and transformers, nothing else."""
