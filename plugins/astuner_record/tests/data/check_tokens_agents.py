"""Agents for `test_check_tokens`: a plain one, and what agents do to their history."""

from astuner import Workflow, WorkflowOutput

TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Look for something.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}},
            "required": ["query", "limit"],
        },
    },
}
OTHER = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "Tell the time.",
        "parameters": {"type": "object", "properties": {}},
    },
}


class Agent(Workflow):
    """An agent loop as simple as they come."""

    tools = (TOOL, OTHER)

    def change(self, messages):
        return messages

    async def execute(self, workflow_task, model_tuner):
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is it?"}]
        for sure in (False, True):
            for _ in range(6):
                reply = await model_tuner.chat(self.change(messages), self.tools)
                messages = [*messages, dict(reply.message)]
                if not reply.tool_calls:
                    break
                for call in reply.tool_calls:
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": "found it"})
            if not sure:
                messages.append({"role": "user", "content": "Are you sure?"})
        return WorkflowOutput(response=reply.text)


class Drops(Agent):
    """Shows a hint once."""

    async def execute(self, workflow_task, model_tuner):
        hint = {"role": "user", "content": "Hint: look twice."}
        first = [{"role": "user", "content": "Where is it?"}]
        reply = await model_tuner.chat([*first, hint], self.tools)
        await model_tuner.chat([*first, dict(reply.message), {"role": "user", "content": "Sure?"}], self.tools)
        return WorkflowOutput()


class Retools(Agent):
    """Takes a tool away."""

    def change(self, messages):
        self.tools = (TOOL,) if len(messages) > 2 else (TOOL, OTHER)
        return messages


class Redescribes(Agent):
    def change(self, messages):
        if len(messages) > 2:
            function = {**TOOL["function"], "description": "Look for something else."}
            self.tools = ({**TOOL, "function": function}, OTHER)
        return messages


class Rewrites(Agent):
    """Tells the model that it called something else."""

    def change(self, messages):
        def changed(message):
            if not message.get("tool_calls"):
                return message
            mine = {"name": "search", "arguments": '{"query": "mine"}'}
            return {**message, "tool_calls": [{**call, "function": mine} for call in message["tool_calls"]]}

        return [changed(m) for m in messages]


class Inserts(Agent):
    def change(self, messages):
        note = {"role": "user", "content": "By the way."}
        return messages if len(messages) == 2 else [*messages[:2], note, *messages[2:]]


class Forgets(Agent):
    """Every question is a conversation of its own."""

    async def execute(self, workflow_task, model_tuner):
        self.tools = ()
        for question in ("one?", "two?", "two?"):
            await model_tuner.chat([{"role": "user", "content": question}])
        return WorkflowOutput()


class Retells(Agent):
    """Puts the whole history into one message, as multi-agent formatters do."""

    async def execute(self, workflow_task, model_tuner):
        reply = await model_tuner.chat([{"role": "user", "content": "one?"}])
        history = f"<history>me: one? you: {reply.text}</history> two?"
        await model_tuner.chat([{"role": "user", "content": history}])
        return WorkflowOutput()


class Fails(Agent):
    def change(self, messages):
        if messages[-1]["role"] == "tool":
            raise RuntimeError("no network")
        return messages


class Endless(Agent):
    async def execute(self, workflow_task, model_tuner):
        messages = [{"role": "user", "content": "Go on."}]
        while True:
            reply = await model_tuner.chat(messages)
            messages += [dict(reply.message), {"role": "user", "content": "Go on."}]


class Client(Agent):
    """The same over HTTP, with OpenAI's own client."""

    async def execute(self, workflow_task, model_tuner):
        async with model_tuner.as_openai_client() as client:
            messages = [{"role": "user", "content": "Where is it?"}]
            for _ in range(6):
                answer = await client.chat.completions.create(model="any", messages=messages, tools=self.tools)
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    break
                messages += [{"role": "tool", "tool_call_id": c.id, "content": "ok"} for c in message.tool_calls]
        return WorkflowOutput()
