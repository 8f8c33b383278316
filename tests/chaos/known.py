"""Known limits of ASTuner (docs/reliability.md, "Known limits"), which are not drawn until they are fixed."""

NOT_HELD: tuple[str, ...] = ()
