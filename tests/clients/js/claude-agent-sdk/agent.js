import { readFileSync } from "node:fs";
import { createSdkMcpServer, query, tool } from "@anthropic-ai/claude-agent-sdk";
import { z } from "zod";
import { calculate } from "./calculate.js";

const calculator = tool(
  "calculator",
  "Evaluate an arithmetic expression.",
  { expression: z.string() },
  async ({ expression }) => ({ content: [{ type: "text", text: calculate(expression) }] }),
);
const options = {
  model: "astuner",
  systemPrompt: "You solve math problems with a calculator. Answer with \\boxed{}.",
  mcpServers: { math: createSdkMcpServer({ name: "math", tools: [calculator] }) },
  allowedTools: ["mcp__math__calculator"],
  tools: [],
};
for await (const message of query({ prompt: readFileSync(0, "utf8"), options })) {
  if (message.type === "result") console.log(message.result);
}
