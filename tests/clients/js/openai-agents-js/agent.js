import { readFileSync } from "node:fs";
import { Agent, run, tool } from "@openai/agents";
import { z } from "zod";
import { calculate } from "./calculate.js";

const agent = new Agent({
  name: "Calculator",
  instructions: "You solve math problems with a calculator. Answer with \\boxed{}.",
  tools: [
    tool({
      name: "calculator",
      description: "Evaluate an arithmetic expression.",
      parameters: z.object({ expression: z.string() }),
      execute: async ({ expression }) => calculate(expression),
    }),
  ],
});
const result = await run(agent, readFileSync(0, "utf8"));
console.log(result.finalOutput);
