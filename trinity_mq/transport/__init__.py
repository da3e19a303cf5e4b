"""Experiences on the wire: message parts, batched publishing, and the blob store for what no message can carry."""
