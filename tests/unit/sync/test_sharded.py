"""Weights sharded by FSDP2 over two trainer ranks: gathered bucket by bucket, and whole at the engine."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

RANK = """
import asyncio, json, os, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

rank, port, folder, *methods = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port, None, False), rank=rank, world_size=2)
torch.manual_seed(5)
model = torch.nn.Sequential(torch.nn.Linear(30, 21), torch.nn.Linear(21, 7, bias=False))
expected = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
mesh = init_device_mesh("cpu", (2,))
for layer in (*model, model):
    fully_shard(layer, mesh=mesh)
tensors = [(name, tensor) for name, tensor in model.named_parameters()]
manifest = [(name, "float32", list(tensor.shape)) for name, tensor in tensors]
assert all(hasattr(tensor, "full_tensor") for _, tensor in tensors)
assert sum(tensor.to_local().numel() for _, tensor in tensors) < sum(tensor.numel() for _, tensor in tensors)

async def lead(method):
    from trinity_mq.config import load_config
    from trinity_mq.sync.channels.factory import open_channel
    from trinity_mq.sync.channels.receiver import WeightReceiver
    sync = {"sync_method": method, "bucket_bytes": 1024}
    channel = open_channel(load_config({"model": {"tiny": {}}, "run_dir": folder, "synchronizer": sync}))
    where = await channel.offer((1, 1), tensors, manifest)
    spec = {**where, "epoch": 1, "attempt": 1, "rank": 1, "world": 2, "seconds": 20.0, "manifest": manifest}
    arrived, _ = await asyncio.gather(WeightReceiver().receive(spec), channel.broadcast(tensors, manifest, 1, 1, 2))
    await channel.close()
    print(json.dumps([sorted(arrived) == sorted(expected)]
                     + [torch.equal(arrived[name], tensor) for name, tensor in expected.items()]), flush=True)

def follow():
    from trinity_mq.sync.channels.buckets import packed, plan
    for flat in packed(plan(manifest, 1024), tensors):
        del flat  # only the gathering is ours

for method in methods:
    asyncio.run(lead(method)) if rank == 0 else follow()
dist.barrier()
os._exit(0)  # gloo's threads may abort a process that takes itself apart
"""


@pytest.mark.timeout(180)  # two processes import FSDP
async def test_shards_arrive_whole_by_broadcast_and_by_files(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    ranks = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", RANK, str(rank), str(store.port), str(tmp_path), "collective", "checkpoint"),
            stdout=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parents[3],
        )
        for rank in range(2)
    ]
    try:
        async with asyncio.timeout(150):
            [said, _] = await asyncio.gather(*(rank.communicate() for rank in ranks))
    finally:
        for rank in ranks:
            if rank.returncode is None:
                rank.kill()
                await rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert [json.loads(line) for line in said[0].splitlines()] == [[True] * 4] * 2
