"""What ASTuner is known not to hold (docs/reliability.md, "What is not held"): not drawn, until it is mended."""

NOT_HELD: tuple[str, ...] = ()
