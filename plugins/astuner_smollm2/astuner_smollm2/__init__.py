"""Provide SmolLM2-135M-Instruct by name: ``model: {path: smollm2-135m}``."""
