"""Rendering chats with a model's template, and reading tool calls from what it wrote."""
