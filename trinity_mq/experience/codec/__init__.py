"""Codec of the experience body: msgpack head with columns, safetensors tail."""
