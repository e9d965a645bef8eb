"""Engines, chat rendering, the OpenAI server and refit."""
