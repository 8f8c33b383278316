import { readFileSync } from "node:fs";
import { ChatOpenAI } from "@langchain/openai";
import { createAgent, tool } from "langchain";
import { z } from "zod";
import { calculate } from "./calculate.js";

const calculator = tool(({ expression }) => calculate(expression), {
  name: "calculator",
  description: "Evaluate an arithmetic expression.",
  schema: z.object({ expression: z.string() }),
});
const agent = createAgent({
  model: new ChatOpenAI({ model: "astuner" }),
  tools: [calculator],
  systemPrompt: "You solve math problems with a calculator. Answer with \\boxed{}.",
});
const { messages } = await agent.invoke({ messages: [{ role: "user", content: readFileSync(0, "utf8") }] });
console.log(messages.at(-1).text);
