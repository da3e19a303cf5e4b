"""The ``vllm`` engine: vLLM's own server as a child process. Only ``api`` knows vLLM's interfaces."""
