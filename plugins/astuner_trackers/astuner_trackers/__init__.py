"""Log sinks for what others run: OpenTelemetry, AgentScope Studio, MLflow, W&B, SwanLab, TensorBoard."""
