import { readFileSync } from "node:fs";
import { Agent } from "@mastra/core/agent";
import { createTool } from "@mastra/core/tools";
import { z } from "zod";
import { calculate } from "./calculate.js";

const agent = new Agent({
  id: "calculator-agent",
  name: "Calculator",
  instructions: "You solve math problems with a calculator. Answer with \\boxed{}.",
  model: "openai/astuner",
  tools: {
    calculator: createTool({
      id: "calculator",
      description: "Evaluate an arithmetic expression.",
      inputSchema: z.object({ expression: z.string() }),
      execute: async ({ expression }) => calculate(expression),
    }),
  },
});
const { text } = await agent.generate(readFileSync(0, "utf8"), { maxSteps: 8 });
console.log(text);
