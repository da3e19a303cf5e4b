"""The pods of deploy/kubernetes/overlays/laptop as processes: command lines, variables, files, volumes and addresses
that the manifests give each of them are enough for a run, and probes and autoscaler are told what they ask for.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from tests.unit.deploy.test_kubernetes import Manifest, container, copied, kustomize, of_kind, ours, pod, settings
from tests.unit.observability.test_exporter import Series, series
from tests.waiting import until
from trinity_agents.trainer.history import lineage

ROOT = Path(__file__).parents[2]
BATCHES = 12
START, END = 200.0, 300.0
"""Seconds until the run is at work, and until it is over."""

pytestmark = [
    pytest.mark.extended,
    pytest.mark.e2e,
    pytest.mark.broker,
    pytest.mark.any_broker,
    pytest.mark.timeout(600),
]


@dataclass
class Pod:
    """A container that runs as a process, on an address of its own of the loopback network."""

    name: str
    address: str
    folder: Path
    arguments: list[str]
    process: asyncio.subprocess.Process | None = None

    @property
    def health(self) -> Path:
        """As the image's TRINITY_MQ_HEALTH_FILE."""
        return self.folder / "tmp" / "trinity-mq-health"

    async def start(self, variables: dict[str, str]) -> None:
        path = os.pathsep.join([str(ROOT), str(ROOT / "agents")])
        environ = {**os.environ, "PYTHONPATH": path, **variables, "TRINITY_MQ_HEALTH_FILE": str(self.health)}
        command = (sys.executable, "-m", "trinity_mq.cli.main", *self.arguments)
        with (self.folder / "out").open("wb") as out:
            self.process = await asyncio.create_subprocess_exec(
                *command, cwd=self.folder, env=environ, stdin=asyncio.subprocess.DEVNULL,
                stdout=out, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip

    def output(self) -> str:
        return (self.folder / "out").read_text()

    async def is_ready(self) -> bool:
        """What the readiness probe is told."""
        assert self.process is not None
        assert self.process.returncode is None, f"{self.name}: {self.output()}"
        command = (sys.executable, "-m", "trinity_mq.cli.main", "health", "--file", str(self.health))
        asked = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.DEVNULL)
        return await asked.wait() == 0


class Cluster:
    """The deployments of an overlay, on one machine.

    Args:
        manifests: What it builds.
        folder: Of volumes and of what containers write.
        run: The run's name on the broker.
        broker: The broker's URL.
    """

    def __init__(self, manifests: list[Manifest], folder: Path, run: str, broker: str) -> None:
        self._folder = folder
        folder.mkdir()
        [text] = [one["data"]["run.yaml"] for one in of_kind(manifests, "ConfigMap") if "run.yaml" in one["data"]]
        config = yaml.safe_load(text)
        config["buffer"]["total_steps"] = BATCHES
        config["explorer"]["eval_interval"] = BATCHES
        (folder / "run.yaml").write_text(yaml.safe_dump(config))
        (folder / "broker-url").write_text(broker)
        url_file = str(folder / "broker-url")
        self.variables = {**settings(manifests), "RUN": run, "TRINITY_MQ_BROKER_URL_FILE": url_file}
        self.pods = [
            self._pod(workload, number)
            for workload in ours(manifests)
            for number in range(workload["spec"]["replicas"] + (workload["metadata"]["name"] == "runner"))
        ]

    def _pod(self, workload: Manifest, number: int) -> Pod:
        name = f"{workload['metadata']['name']}-{number}"
        folder = self._folder / name
        (folder / "tmp").mkdir(parents=True)
        self._mount(workload, folder)
        address = f"127.0.0.{len(list(self._folder.iterdir())) + 10}"
        told = {**self.variables, "POD_IP": address}
        words = [
            re.sub(r"\$\((\w+)\)", lambda found: told[found[1]], str(word)) for word in container(workload)["args"]
        ]
        places = {
            "/etc/trinity-mq/run.yaml": str(self._folder / "run.yaml"), "{host}": name,
            "--host=0.0.0.0": f"--host={address}",
        }  # fmt: skip
        return Pod(name, address, folder, [places.get(word, word) for word in words])

    def _mount(self, workload: Manifest, folder: Path) -> None:
        """Give the pod the volume of its run folder: that of the claim, else one of its own."""
        [place] = [one["mountPath"] for one in container(workload)["volumeMounts"] if one["name"] == "runs"]
        assert place == "/srv/trinity-mq/runs", "runs/ of the image's working directory"
        [volume] = [one for one in pod(workload)["volumes"] if one["name"] == "runs"]
        if claim := volume.get("persistentVolumeClaim"):
            shared = self._folder / f"claim-{claim['claimName']}"
            shared.mkdir(exist_ok=True)
            (folder / "runs").symlink_to(shared)
        else:
            (folder / "runs").mkdir()

    def of(self, *names: str) -> list[Pod]:
        """The pods of these deployments."""
        return [one for one in self.pods if one.name.rpartition("-")[0] in names]

    @property
    def run_folder(self) -> Path:
        return self._folder / "claim-runs" / self.variables["RUN"]

    async def asked(self, name: str, *command: str) -> str:
        """Return what a command says in a pod, as ``kubectl exec`` starts it."""
        [one] = self.of(name)
        path = os.pathsep.join([str(ROOT), str(ROOT / "agents")])
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "trinity_mq.cli.main", *command, cwd=one.folder,
            env={**os.environ, "PYTHONPATH": path, **self.variables}, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        said, _ = await process.communicate()
        assert process.returncode == 0, said.decode()
        return said.decode()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        try:
            for one in self.pods:
                await one.start(self.variables)
            yield
        finally:
            for one in self.pods:
                if one.process is not None and one.process.returncode is None:
                    one.process.terminate()
                    await one.process.wait()


async def scraped(http: aiohttp.ClientSession, exporter: Pod) -> Series:
    async with http.get(f"http://{exporter.address}:9464/metrics") as answer:
        assert answer.status == 200
        return series(await answer.text())


async def test_what_the_manifests_start_trains_the_run(tmp_path: Path, broker_url: str, unique_run: str) -> None:
    copy = copied(tmp_path)
    done = kustomize(copy / "overlays" / "laptop")
    assert done.returncode == 0, done.stderr
    cluster = Cluster(list(yaml.safe_load_all(done.stdout)), tmp_path / "pods", unique_run, broker_url)
    agents = cluster.of("explorer", "trainer", "runner", "operator", "engines")
    assert len(agents) == 6
    [exporter] = cluster.of("exporter")
    seen: Series = {}
    wanted: list[float] = []
    async with cluster.running(), aiohttp.ClientSession() as http:
        for one in agents:
            await until(one.is_ready, START)

        async def at_work() -> bool:
            seen.update(await scraped(http, exporter))
            # between two batches, and where this asks often, the latest scrapes may all have seen an idle moment
            wanted.append(seen.get(("tmq_wanted_runners", ""), 0))
            return seen.get(("tmq_batches_consumed_total", ""), 0) >= 2 and max(wanted) >= 1

        await until(at_work, START)
        assert "engines-0-engine" in await cluster.asked("exporter", "status", unique_run)
        async with asyncio.timeout(END):
            ends: dict[str, Any] = {one.name: await one.process.wait() for one in agents if one.process is not None}
        assert ends == dict.fromkeys(ends, 0), "\n".join(one.output() for one in agents)
        seen.update(await scraped(http, exporter))
        # Kubernetes starts what has ended again: it finds that the run is over
        for one in cluster.of("explorer", "trainer", "operator"):
            await one.start(cluster.variables)
            assert one.process is not None
            async with asyncio.timeout(START):
                assert await one.process.wait() == 0, one.output()
    history = lineage(cluster.run_folder / "history", 1, BATCHES)
    assert [entry["outcome"] for entry in history] == ["trained"] * BATCHES
    assert (cluster.run_folder / "final" / "config.json").exists()
    tokens = {name for (family, name), value in seen.items() if family == "tmq_engine_tokens_total" and value > 0}
    assert tokens == {"explorer-0-engine", "engines-0-engine"}, "runners reach the engines of both pods"
    done_by = {name for (family, name), value in seen.items() if family == "tmq_slices_done_total" and value > 0}
    assert done_by == {"runner-0", "runner-1"}
