"""The OpenAI-compatible HTTP server: requests in, answers out, control routes."""
