"""What ASTuner is known not to hold (docs/reliability.md, "What is not held"): not drawn, until it is mended."""

NOT_HELD = (
    "ends_the_process",
    "leaves_children",
    "tool_says_megabytes",
    "package_metadata",
    "package_interrupts",
    "package_mute",
    "package_listens",
    "clears_environment",
)
