"""A WorkflowRunner on a real engine server."""

from contextlib import asynccontextmanager

from tests.unit.workflows.tiny_engines import tiny_engine
from trinity_mq.config import Config
from trinity_mq.scheduling import WorkflowRunner


@asynccontextmanager
async def running(generator, tmp_path, *, max_prompt_tokens=5000, max_response_tokens=3000, **explorer):
    """Yield a WorkflowRunner whose engine serves ``generator``."""
    rollout = {"enable_history": True, **explorer.pop("rollout_model", {})}
    limits = {"max_prompt_tokens": max_prompt_tokens, "max_response_tokens": max_response_tokens}
    config = Config.model_validate(
        {
            "run_dir": str(tmp_path),
            "model": {"tiny": {}, "max_model_len": 8192, **limits},
            "explorer": {"max_timeout": 50.0, "max_retry_times": 0, "rollout_model": rollout, **explorer},
        }
    )
    async with tiny_engine(generator) as engine:
        runner = WorkflowRunner(config, engine)
        try:
            yield runner
        finally:
            await runner.close()
