#!/bin/sh
exec claude --print --tools "" \
  --system-prompt 'You solve math problems with a calculator. Answer with \boxed{}.' \
  --mcp-config '{"mcpServers": {"math": {"command": "node", "args": ["calculator.js"]}}}' \
  --allowedTools mcp__math__calculator
