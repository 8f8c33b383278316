import { readFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";
import { calculate } from "./calculate.js";

const message = await new Anthropic().beta.messages.toolRunner({
  model: "astuner",
  max_tokens: 1024,
  system: "You solve math problems with a calculator. Answer with \\boxed{}.",
  messages: [{ role: "user", content: readFileSync(0, "utf8") }],
  tools: [
    betaTool({
      name: "calculator",
      description: "Evaluate an arithmetic expression.",
      inputSchema: { type: "object", properties: { expression: { type: "string" } }, required: ["expression"] },
      run: ({ expression }) => calculate(expression),
    }),
  ],
});
console.log(message.content.findLast((block) => block.type === "text").text);
