import { readFileSync } from "node:fs";
import OpenAI from "openai";
import { calculate } from "./calculate.js";

const runner = new OpenAI().chat.completions.runTools({
  model: "astuner",
  messages: [
    { role: "system", content: "You solve math problems with a calculator. Answer with \\boxed{}." },
    { role: "user", content: readFileSync(0, "utf8") },
  ],
  tools: [
    {
      type: "function",
      function: {
        name: "calculator",
        description: "Evaluate an arithmetic expression.",
        parameters: { type: "object", properties: { expression: { type: "string" } }, required: ["expression"] },
        parse: JSON.parse,
        function: ({ expression }) => calculate(expression),
      },
    },
  ],
});
console.log(await runner.finalContent());
