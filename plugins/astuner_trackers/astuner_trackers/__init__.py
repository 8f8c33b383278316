"""Log sinks for external services: OpenTelemetry, AgentScope Studio, MLflow, W&B, SwanLab, TensorBoard."""
