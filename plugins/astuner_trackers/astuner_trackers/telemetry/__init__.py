"""OpenTelemetry traces of a run (GenAI semantic conventions) for any OTLP collector.

Spans are created from finished episodes in the thread of the log sink `otel`, so rollouts never wait for them. They are
plain data (`spans`) until they are exported (`export`). No tracer provider is created, so the global provider,
which an agent framework may use, is unchanged.
"""
