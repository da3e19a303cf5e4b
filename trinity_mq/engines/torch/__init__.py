"""The ``transformers`` engine: generation with torch in this process."""
