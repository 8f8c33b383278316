"""JSON over HTTP for packages of ASTuner: a client, and a strict parser for untrusted requests."""
