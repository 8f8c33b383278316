"""An OpenAI client with a tool, traced as its users would trace it: SDK MODEL_URL COLLECTOR_URL QUESTION...

Each question is asked after the earlier ones; a sum is answered by way of the tool `add`.
"""

import json
import os
import sys

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
SYSTEM = "You add numbers."


def converse(client, questions, turn):
    """``turn(question, answer)`` gets a function that answers, and calls it where the SDK would have it called."""
    messages = [{"role": "system", "content": SYSTEM}]

    def answer(question):
        messages.append({"role": "user", "content": question})
        while True:
            made = client.chat.completions.create(model="scripted", messages=messages, tools=[TOOL])
            said = made.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            if not said.tool_calls:
                return said.content
            for call in said.tool_calls:
                given = json.loads(call.function.arguments)
                content = str(given["a"] + given["b"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})

    for question in questions:
        turn(question, answer)


def provider(collector):
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    made = TracerProvider()
    made.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(f"{collector}/v1/traces")))
    return made


def client(model):
    from openai import OpenAI

    return OpenAI(base_url=model, api_key="k", max_retries=0)


def openinference(model, collector, questions):
    from openinference.instrumentation import using_session
    from openinference.instrumentation.openai import OpenAIInstrumentor

    spans = provider(collector)
    OpenAIInstrumentor().instrument(tracer_provider=spans)
    tracer = spans.get_tracer("an.app")

    def turn(question, answer):
        with tracer.start_as_current_span("turn"):
            answer(question)

    with using_session("session-1"):
        converse(client(model), questions, turn)


def openllmetry(model, collector, questions):
    from opentelemetry.instrumentation.openai import OpenAIInstrumentor

    spans = provider(collector)
    OpenAIInstrumentor().instrument(tracer_provider=spans)
    tracer = spans.get_tracer("an.app")

    def turn(question, answer):
        with tracer.start_as_current_span("turn"):
            answer(question)

    converse(client(model), questions, turn)


def langfuse(model, collector, questions):
    os.environ.update(
        LANGFUSE_HOST=collector, LANGFUSE_BASE_URL=collector, LANGFUSE_PUBLIC_KEY="pk", LANGFUSE_SECRET_KEY="sk"
    )
    from langfuse import get_client, propagate_attributes
    from langfuse.openai import OpenAI

    own = get_client()

    def turn(question, answer):
        with own.start_as_current_observation(as_type="agent", name="turn", input=question) as span:
            with propagate_attributes(session_id="session-1"):
                span.update(output=answer(question))
            own.score_current_trace(name="user-feedback", value=1, data_type="BOOLEAN")

    converse(OpenAI(base_url=model, api_key="k", max_retries=0), questions, turn)
    own.flush()


def logfire(model, collector, questions):
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = collector
    import logfire as sdk

    sdk.configure(send_to_logfire=False, console=False)
    sdk.instrument_openai()

    def turn(question, answer):
        with sdk.span("turn"):
            answer(question)

    converse(client(model), questions, turn)
    sdk.force_flush()


def pydantic_ai(model, collector, questions, version=None):
    from pydantic_ai import Agent
    from pydantic_ai.models.instrumented import InstrumentationSettings
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    spans = provider(collector)
    settings = InstrumentationSettings(tracer_provider=spans, **({"version": version} if version else {}))
    try:
        from pydantic_ai.capabilities import Instrumentation
    except ImportError:  # 1.x
        how = {"instrument": settings}
    else:
        how = {"capabilities": [Instrumentation(settings=settings)]}
    scripted = OpenAIChatModel("scripted", provider=OpenAIProvider(base_url=model, api_key="k"))
    agent = Agent(scripted, instructions=SYSTEM, name="helper", **how)

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    history = []
    for question in questions:
        history = agent.run_sync(question, message_history=history).all_messages()


def pydantic_ai_1(model, collector, questions):
    pydantic_ai(model, collector, questions, version=1)


def pydantic_ai_2(model, collector, questions):
    pydantic_ai(model, collector, questions, version=2)


def openai_agents(model, collector, questions):
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool
    from openai import AsyncOpenAI
    from openinference.instrumentation.openai_agents import OpenAIAgentsInstrumentor

    OpenAIAgentsInstrumentor().instrument(tracer_provider=provider(collector))

    @function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    scripted = OpenAIChatCompletionsModel("scripted", AsyncOpenAI(base_url=model, api_key="k"))
    agent, history = Agent(name="helper", instructions=SYSTEM, tools=[add], model=scripted), []
    for question in questions:
        history = Runner.run_sync(agent, [*history, {"role": "user", "content": question}]).to_input_list()


def genai(model, collector, questions):
    os.environ.setdefault("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "true")
    from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
    from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor

    spans, logs = provider(collector), LoggerProvider()
    logs.add_log_record_processor(SimpleLogRecordProcessor(OTLPLogExporter(f"{collector}/v1/logs")))
    try:
        from opentelemetry.sdk._events import EventLoggerProvider
    except ImportError:  # its successor takes the logs themselves
        older = {}
    else:
        older = {"event_logger_provider": EventLoggerProvider(logs)}
    OpenAIInstrumentor().instrument(tracer_provider=spans, logger_provider=logs, **older)
    tracer = spans.get_tracer("an.app")

    def turn(question, answer):
        with tracer.start_as_current_span("turn"):
            answer(question)

    converse(client(model), questions, turn)


if __name__ == "__main__":
    name, base_url, to, *asked = sys.argv[1:]
    globals()[name](base_url, to, asked)
