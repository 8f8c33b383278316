// A server of the Model Context Protocol over standard input and output, with one tool.
import { createInterface } from "node:readline";
import { calculate } from "./calculate.js";

const answers = {
  initialize: ({ protocolVersion }) => ({
    protocolVersion,
    capabilities: { tools: {} },
    serverInfo: { name: "math", version: "1.0.0" },
  }),
  ping: () => ({}),
  "tools/list": () => ({
    tools: [
      {
        name: "calculator",
        description: "Evaluate an arithmetic expression.",
        inputSchema: { type: "object", properties: { expression: { type: "string" } }, required: ["expression"] },
      },
    ],
  }),
  "tools/call": ({ arguments: { expression } }) => ({ content: [{ type: "text", text: calculate(expression) }] }),
};

for await (const line of createInterface({ input: process.stdin })) {
  const { id, method, params } = JSON.parse(line);
  if (id === undefined) continue;
  const known = answers[method];
  const answer = known ? { result: known(params) } : { error: { code: -32601, message: `${method} is not known` } };
  console.log(JSON.stringify({ jsonrpc: "2.0", id, ...answer }));
}
