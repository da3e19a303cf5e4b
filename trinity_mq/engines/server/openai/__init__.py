"""The OpenAI-compatible API of an engine: request and response bodies, streams, tool calls."""
