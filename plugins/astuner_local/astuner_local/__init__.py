"""The local backbone of ASTuner: one machine, CPU or one GPU, with torch and transformers only."""
