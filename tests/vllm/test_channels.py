"""vLLM takes weights by the other channels too, and pulls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.sync.weights import manifest_of
from trinity_mq.engines.host.admin_client import ReceiveFailed
from trinity_mq.engines.torch.weights import named_weights
from trinity_mq.sync.channels.base import Channel
from trinity_mq.sync.channels.checkpoint.channel import CheckpointChannel
from trinity_mq.sync.channels.memory.channel import MemoryChannel

from .conftest import CANARY, Engine, new_weights, reference


@pytest.mark.parametrize("method", ["memory", "checkpoint"])
async def test_weights_that_are_fetched_replace_all(waiting: Engine, tmp_path: Path, method: str) -> None:
    channel: Channel = (
        MemoryChannel("127.0.0.1", 2**16, 30.0) if method == "memory" else CheckpointChannel(str(tmp_path), 2**16, 30.0)
    )
    for step in (1, 2):
        model, version = new_weights(waiting.started.folder, 100 + step), (8, step)
        tensors = list(named_weights(model).items())
        entries = manifest_of(tensors)
        where = await channel.offer(version, tensors, entries)
        await waiting.host.pause()
        canary = torch.tensor((await waiting.host.receive(waiting.spec(model, version, where)))["logprobs"])
        await waiting.host.commit(version, step)
        await channel.committed(version, tensors, entries)
        torch.testing.assert_close(canary, reference(model, CANARY[:1], CANARY[1:]), atol=1e-4, rtol=0)
        found = await channel.catch_up_source()
        assert found is not None
        await waiting.host.pause()
        pulled = torch.tensor((await waiting.host.receive(waiting.spec(model, version, found[1])))["logprobs"])
        await waiting.host.commit(version, step)
        torch.testing.assert_close(pulled, canary)
        assert waiting.host.snapshot.version == version
    await channel.close()


async def test_damaged_weights_leave_the_old_ones_serving(waiting: Engine) -> None:
    channel, model = MemoryChannel("127.0.0.1", 2**16, 30.0), new_weights(waiting.started.folder, 110)
    await waiting.sync(model, (9, 1))
    other = new_weights(waiting.started.folder, 111)
    where = await channel.offer((9, 2), list(named_weights(other).items()), manifest_of(named_weights(other).items()))
    channel._offered.flats[-1][0] += 1  # type: ignore[union-attr]
    await waiting.host.pause()
    with pytest.raises(ReceiveFailed, match="checksum") as failed:
        await waiting.host.receive(waiting.spec(other, (9, 2), where))
    assert not failed.value.touched
    await waiting.host.resume()
    [choice] = (await waiting.complete(prompt=[3, 7, 2, 9], max_tokens=8))["choices"]
    assert choice["weight_versions"] == [[0, 9, 1]]
    await channel.close()
