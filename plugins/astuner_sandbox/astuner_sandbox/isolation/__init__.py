"""Run untrusted code in separate processes: environments, and code that a model writes.

This package uses only the standard library of Python 3.10 and later, because most of it also runs in interpreters
without ASTuner. `zygotes` starts a warm process (`zygote_process`) whose children start in milliseconds (`fork`);
`child` starts a child of the current process; `confine` removes rights from the current process; `channel` carries JSON
between processes; `start` lends packages to another interpreter.
"""
