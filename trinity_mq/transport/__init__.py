"""Experiences on the wire: message parts, batched publishing, and the blob store for experiences that exceed a
message.
"""
