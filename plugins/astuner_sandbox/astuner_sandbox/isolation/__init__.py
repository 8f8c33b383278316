"""Processes of their own for code that is not ours: environments, and what a model writes.

Standard library only, Python 3.10 and later, because most of it also runs inside interpreters that have nothing of
ASTuner's installed.  `zygotes` starts a warm process (`zygote_process`) whose children cost milliseconds (`fork`),
`child` starts one child of the process at hand, `confine` takes rights away from the calling process, `channel`
carries JSON between them, and `borrow` lends packages to a foreign interpreter.
"""
