import { readFileSync } from "node:fs";
import { openai } from "@ai-sdk/openai";
import { generateText, stepCountIs, tool } from "ai";
import { z } from "zod";
import { calculate } from "./calculate.js";

const { text } = await generateText({
  model: openai.chat("astuner"),
  system: "You solve math problems with a calculator. Answer with \\boxed{}.",
  prompt: readFileSync(0, "utf8"),
  tools: {
    calculator: tool({
      description: "Evaluate an arithmetic expression.",
      inputSchema: z.object({ expression: z.string() }),
      execute: async ({ expression }) => calculate(expression),
    }),
  },
  stopWhen: stepCountIs(8),
});
console.log(text);
