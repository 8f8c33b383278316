"""JSON over HTTP as packages of ASTuner speak it: a client, and reading what anybody may have sent."""
