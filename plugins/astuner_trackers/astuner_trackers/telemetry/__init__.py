"""What a run tells tracing systems: OpenTelemetry spans (GenAI semantic conventions) to any OTLP collector.

Spans are made of finished episodes, in the thread of the log sink `otel`, so no rollout ever waits for them.  They are
plain data (`spans`) until they are exported (`export`); no tracer provider is made, so the process's own, which an
agent framework may use, is never touched.
"""
