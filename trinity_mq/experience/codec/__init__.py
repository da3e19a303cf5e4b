"""The experience body on the wire: msgpack head, safetensors tail, columns in between."""
