#!/bin/sh
# An agent of curl and jq: the messages are one JSON text that grows.
set -eu

tools='[{"type": "function", "function": {
  "name": "calculator",
  "description": "Evaluate an arithmetic expression.",
  "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
}}]'

# What each call of a message gives, as messages.
results='
  def calculate:
    (capture("^\\s*(?<left>-?[0-9.]+)\\s*(?<sign>[-+*×/])\\s*(?<right>-?[0-9.]+)\\s*$") // {}) as {$left, $sign, $right}
    | try (
        ($left | tonumber) as $left | ($right | tonumber) as $right
        | if $sign == "+" then $left + $right elif $sign == "-" then $left - $right
          elif $sign == "/" then $left / $right else $left * $right end | tostring
      ) catch "error: \(.)";
  [.tool_calls // [] | .[] | {
    role: "tool", tool_call_id: .id, content: (.function.arguments | fromjson | .expression | calculate)
  }]'

messages=$(jq -Rs '[
  {role: "system", content: "You solve math problems with a calculator. Answer with \\boxed{}."},
  {role: "user", content: .}
]')
for step in 1 2 3 4 5 6 7 8; do
  message=$(
    jq -n --argjson messages "$messages" --argjson tools "$tools" '{model: "astuner", messages: $messages, tools: $tools}' |
      curl -sS --fail-with-body -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" \
        --data-binary @- "$OPENAI_BASE_URL/chat/completions" | jq '.choices[0].message'
  )
  said=$(printf %s "$message" | jq "$results")
  messages=$(printf '%s%s%s' "$messages" "[$message]" "$said" | jq -s 'add')
  [ "$said" != "[]" ] || break
done
printf %s "$message" | jq -r .content
