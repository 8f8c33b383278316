import asyncio
import sys

from google.adk.agents import LlmAgent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types
from tool import SYSTEM, calculator

agent = LlmAgent(name="math", model=LiteLlm(model="openai/astuner"), instruction=SYSTEM, tools=[calculator])


async def main() -> None:
    runner = InMemoryRunner(agent=agent, app_name="math")
    session = await runner.session_service.create_session(app_name="math", user_id="me")
    question = types.Content(role="user", parts=[types.Part(text=sys.stdin.read())])
    answer = ""
    async for event in runner.run_async(user_id="me", session_id=session.id, new_message=question):
        if event.is_final_response() and event.content:
            answer = "".join(part.text or "" for part in event.content.parts if not part.thought)
    print(answer)


asyncio.run(main())
