"""The engine ``transformers``: a model of Hugging Face transformers in this process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from trinity_mq.engines.protocol import Engine, EngineJob
from trinity_mq.engines.server.http_server import HttpServer


class TransformersEngine(Engine):
    """Samples with torch alone."""

    @contextlib.asynccontextmanager
    async def serve(self, job: EngineJob) -> AsyncIterator[HttpServer]:
        """Yield the server of the policy or of an auxiliary model."""
        from trinity_mq.engines.torch.generator import TextGenerator, auxiliary_generator, refuse_transfer

        folder = job.folder()
        if job.auxiliary is None:
            yield job.server(TextGenerator.build(job.model, folder, num_threads=job.num_threads), folder, job.receiver)
            return
        generator = auxiliary_generator(job.auxiliary.name, job.model, folder, num_threads=job.num_threads)
        server = job.server(generator, folder, refuse_transfer)
        server.state.serve_fixed_weights()
        yield server
