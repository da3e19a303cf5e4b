"""The Kubernetes manifests as they are shipped: kubectl builds every overlay, Kubernetes' own schemas take all of it,
and it fits the commands, the settings, the broker's names and the connections of the agents. No cluster is asked.
"""

from __future__ import annotations

import base64
import importlib.util
import itertools
import json
import re
import shutil
import stat
import subprocess
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.unit.observability.test_exporter import names, scraped, seen
from trinity_mq.bus import Topology
from trinity_mq.bus.addresses import Addresses
from trinity_mq.cli import main as cli
from trinity_mq.cli.exporter import PORT as EXPORTER_PORT
from trinity_mq.config import BrokerConfig, Config, load_config
from trinity_mq.config.modes.gateway import GatewayConfig
from trinity_mq.launch.nodes import NodeLayout, node_processes
from trinity_mq.runtime.serve import INTERVAL, LONGEST_DRAIN

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
FOLDER = DEPLOY / "kubernetes"
OVERLAYS = sorted(path.parent.name for path in FOLDER.glob("overlays/*/kustomization.yaml"))
VERSION = "1.37.0"
"""Of the schemas."""
OLDEST = (5, 0)
"""Kustomize that knows all that is used: kubectl 1.27."""
CUSTOM = {
    "ScaledObject", "TriggerAuthentication", "ServiceMonitor", "PodMonitor", "PrometheusRule", "RabbitmqCluster",
}  # fmt: skip
"""Kinds of operators, whose schemas Kubernetes does not have."""
DRAIN_MARGIN = 15.0
"""Seconds that a draining runner may take beyond ``runner.drain_timeout``."""
AMQP, AMQPS, MANAGEMENT, BROKER_METRICS = 5672, 5671, 15672, 15692
ENGINE = 40000
"""A port that stands for those that engines and weight transfers choose."""

Manifest = dict[str, Any]


def kubectl() -> str:
    """Return kubectl, or skip where there is none that builds the overlays."""
    command = shutil.which("kubectl")
    if command is None:
        pytest.skip("kubectl is not installed: any of version 1.27 or newer builds the overlays, without a cluster")
    done = subprocess.run([command, "version", "--client", "-o", "json"], capture_output=True, text=True, check=True)
    if tuple(map(int, re.findall(r"\d+", json.loads(done.stdout).get("kustomizeVersion", "v0.0"))[:2])) < OLDEST:
        pytest.skip("kubectl is too old: 1.27 or newer is wanted")
    return command


def kustomize(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([kubectl(), "kustomize", str(folder)], capture_output=True, text=True, check=False)


def built(folder: Path) -> list[Manifest]:
    done = kustomize(folder)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return list(yaml.safe_load_all(done.stdout))


def copied(folder: Path) -> Path:
    """Return a copy of deploy/kubernetes below ``folder``, with secrets of its own."""
    for name in ("kubernetes", "grafana"):
        shutil.copytree(
            DEPLOY / name, folder / "deploy" / name, ignore=shutil.ignore_patterns("broker-*", "*-url", "*-key")
        )
    made = folder / "deploy" / "kubernetes"
    subprocess.run([made / "make-secrets"], check=True, capture_output=True)
    return made


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(tmp_path_factory.mktemp("kubernetes"))


@pytest.fixture(scope="module")
def overlays(copy: Path) -> dict[str, list[Manifest]]:
    """What each overlay builds."""
    return {name: built(copy / "overlays" / name) for name in OVERLAYS}


@pytest.fixture(params=OVERLAYS)
def manifests(request: pytest.FixtureRequest, overlays: dict[str, list[Manifest]]) -> list[Manifest]:
    return overlays[request.param]


# -- looking things up


def of_kind(manifests: Sequence[Manifest], *kinds: str) -> list[Manifest]:
    return [one for one in manifests if one["kind"] in kinds]


def named(manifests: Sequence[Manifest], kind: str, name: str) -> Manifest:
    [found] = [one for one in of_kind(manifests, kind) if one["metadata"]["name"] == name]
    return found


def workloads(manifests: Sequence[Manifest]) -> list[Manifest]:
    return of_kind(manifests, "Deployment", "StatefulSet")


def pod(workload: Manifest) -> Manifest:
    spec: Manifest = workload["spec"]["template"]["spec"]
    return spec


def container(workload: Manifest) -> Manifest:
    [found] = pod(workload)["containers"]
    return dict(found)


def ours(manifests: Sequence[Manifest]) -> list[Manifest]:
    """The deployments of our image: all but a broker."""
    return [one for one in workloads(manifests) if container(one)["name"] == "agent"]


def settings(manifests: Sequence[Manifest]) -> Mapping[str, str]:
    [found] = [one["data"] for one in of_kind(manifests, "ConfigMap") if one["metadata"]["name"].startswith("settings")]
    return dict(found)


def words(manifests: Sequence[Manifest], workload: Manifest, folder: Path) -> list[str]:
    """The command line of a container, with variables filled in and the mounted configuration in ``folder``."""
    [run] = [one["data"]["run.yaml"] for one in of_kind(manifests, "ConfigMap") if "run.yaml" in one["data"]]
    path = folder / "run.yaml"
    path.write_text(run)
    variables = {**settings(manifests), "POD_IP": "10.1.2.3", "POD_NAME": "$(POD_NAME)"}
    arguments = container(workload)["args"]
    told = [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], str(word)) for word in arguments]
    return [str(path) if word == "/etc/trinity-mq/run.yaml" else word for word in told]


def configuration(manifests: Sequence[Manifest], workload: Manifest, folder: Path) -> Config:
    given = cli.argument_parser().parse_args(words(manifests, workload, folder))
    return load_config(given.target, given.overrides)


def matches(selector: Manifest, labels: Mapping[str, str]) -> bool:
    expressions = selector.get("matchExpressions", [])
    assert {one["operator"] for one in expressions} <= {"In"}
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        labels.get(one["key"]) in one["values"] for one in expressions
    )


def labels(workload: Manifest) -> Mapping[str, str]:
    return dict(workload["spec"]["template"]["metadata"]["labels"])


# -- what Kubernetes says


def test_kubernetes_own_schemas_take_all_of_it(overlays: dict[str, list[Manifest]], copy: Path) -> None:
    every = {json.dumps(one, sort_keys=True) for built in overlays.values() for one in built}
    every |= {json.dumps(one, sort_keys=True) for one in built(copy / "rabbitmq")}
    kinds = set()
    for manifest in map(json.loads, sorted(every)):
        if manifest["kind"] in CUSTOM:
            kinds.add(manifest["kind"])
        else:
            kubernetes_validate.validate(manifest, VERSION, strict=True)
    assert kinds == CUSTOM
    runner = json.loads(json.dumps(named(overlays["laptop"], "Deployment", "runner")))
    container(runner)["livenessProbe"]["exec"]["comand"] = []
    with pytest.raises(kubernetes_validate.ValidationError, match="comand"):
        kubernetes_validate.validate(runner, VERSION, strict=True)


def test_pods_are_what_the_restricted_standard_allows_in_the_overlays_namespace(manifests: list[Manifest]) -> None:
    [namespace] = of_kind(manifests, "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    names = {one["metadata"]["namespace"] for one in manifests if one is not namespace}
    assert names == {namespace["metadata"]["name"]} == {"trinity-mq"}
    for workload in workloads(manifests):
        of_pod, of_container = pod(workload)["securityContext"], container(workload)["securityContext"]
        assert of_pod["runAsNonRoot"]
        assert of_pod["seccompProfile"] == {"type": "RuntimeDefault"}
        assert of_container["allowPrivilegeEscalation"] is False
        assert of_container["capabilities"] == {"drop": ["ALL"]}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod(workload))
        assert all(not {"hostPath"} & set(volume) for volume in pod(workload).get("volumes", []))
        assert pod(workload)["automountServiceAccountToken"] is False
    for workload in ours(manifests):
        assert container(workload)["securityContext"]["readOnlyRootFilesystem"]
        user = re.search(r"useradd --uid (\d+)", (DEPLOY / "Dockerfile").read_text())
        assert user is not None
        assert str(pod(workload)["securityContext"]["runAsUser"]) == user[1]


# -- what it refers to


def test_everything_that_is_named_is_there(manifests: list[Manifest]) -> None:
    secrets = {one["metadata"]["name"]: set(one["data"]) for one in of_kind(manifests, "Secret")}
    maps = {one["metadata"]["name"]: set(one["data"]) for one in of_kind(manifests, "ConfigMap")}
    claims = {one["metadata"]["name"] for one in of_kind(manifests, "PersistentVolumeClaim")}
    for workload in workloads(manifests):
        templates = {one["metadata"]["name"] for one in workload["spec"].get("volumeClaimTemplates", [])}
        volumes = {one["name"]: one for one in pod(workload).get("volumes", [])}
        for volume in volumes.values():
            if secret := volume.get("secret"):
                assert {item["key"] for item in secret.get("items", [])} <= secrets[secret["secretName"]]
            if "configMap" in volume:
                assert volume["configMap"]["name"] in maps
            if claim := volume.get("persistentVolumeClaim"):
                assert claim["claimName"] in claims
        mounted = {mount["name"] for mount in container(workload)["volumeMounts"]}
        assert mounted == set(volumes) | templates, "each volume is mounted, each mount has its volume"
        for source in container(workload).get("envFrom", []):
            assert source["configMapRef"]["name"] in maps
        for variable in container(workload)["env"]:
            if key := variable.get("valueFrom", {}).get("secretKeyRef"):
                assert key["key"] in secrets[key["name"]]
    for authentication in of_kind(manifests, "TriggerAuthentication"):
        for target in authentication["spec"]["secretTargetRef"]:
            assert target["key"] in secrets[target["name"]]


def test_selectors_select_what_they_are_for(manifests: list[Manifest]) -> None:
    for workload in workloads(manifests):
        others = [one for one in workloads(manifests) if matches(workload["spec"]["selector"], labels(one))]
        assert others == [workload]
    for service in of_kind(manifests, "Service"):
        selector = {"matchLabels": service["spec"]["selector"]}
        [workload] = [one for one in workloads(manifests) if matches(selector, labels(one))]
        ports = {port["name"]: port["containerPort"] for port in container(workload)["ports"]}
        assert all(port["port"] == ports[port["targetPort"]] for port in service["spec"]["ports"])
        assert workload["metadata"]["name"] == service["metadata"]["name"]
    for monitor in of_kind(manifests, "ServiceMonitor"):
        selector, services = monitor["spec"]["selector"], of_kind(manifests, "Service")
        [service] = [one for one in services if matches(selector, one["metadata"].get("labels", {}))]
        ports = {one["name"] for one in service["spec"]["ports"]}
        assert {one["port"] for one in monitor["spec"]["endpoints"]} == ports


def test_what_there_are_many_of_has_a_disruption_budget_and_what_there_is_one_of_has_none(
    manifests: list[Manifest],
) -> None:
    found = {}
    for budget in of_kind(manifests, "PodDisruptionBudget"):
        [workload] = [one for one in workloads(manifests) if matches(budget["spec"]["selector"], labels(one))]
        found[workload["metadata"]["name"]] = budget["spec"]["maxUnavailable"]
    assert found == {"runner": "30%", "operator": 1, "engines": 1, "gateway": 1}
    for name in ("explorer", "trainer", "exporter"):
        workload = named(manifests, "Deployment", name)
        assert workload["spec"]["replicas"] == 1
        assert workload["spec"]["strategy"] == {"type": "Recreate"}


# -- what it starts


def test_what_is_started_is_a_command_of_ours_with_settings_that_are_right(
    manifests: list[Manifest], tmp_path: Path
) -> None:
    commands = {}
    for workload in ours(manifests):
        given = cli.argument_parser().parse_args(words(manifests, workload, tmp_path))
        config = configuration(manifests, workload, tmp_path)
        name = workload["metadata"]["name"]
        commands[name] = (given.command, getattr(given, "engines_only", False))
        assert config.name == settings(manifests)["RUN"]
        assert config.broker.url is None, "the address is a secret"
        if name in {"explorer", "engines"}:
            assert config.explorer.rollout_model.host == "10.1.2.3"
        if name == "trainer":
            assert config.synchronizer.host == "10.1.2.3"
        if name in {"runner", "operator", "engines", "gateway"}:
            assert "{host}" in given.id, "each pod under a name of its own"
    assert commands == {
        "explorer": ("explorer", False), "engines": ("explorer", True), "trainer": ("trainer", False),
        "runner": ("runner", False), "operator": ("operator", False), "gateway": ("gateway", False),
        "exporter": ("exporter", False),
    }  # fmt: skip


def test_the_shipped_runs_are_those_of_the_examples_and_the_gateway_listens_where_its_service_looks(
    overlays: dict[str, list[Manifest]], tmp_path: Path
) -> None:
    for overlay, example, replicas in (("laptop", "smoke", 0), ("serve", "serve", 2)):
        maps = of_kind(overlays[overlay], "ConfigMap")
        [run] = [one["data"]["run.yaml"] for one in maps if "run.yaml" in one["data"]]
        wanted = yaml.safe_load((ROOT / "examples" / f"{example}.yaml").read_text())
        assert yaml.safe_load(run) == wanted | ({"mode": "serve"} if example == "serve" else {})
        assert named(overlays[overlay], "Deployment", "gateway")["spec"]["replicas"] == replicas
    manifests = overlays["serve"]
    workload = named(manifests, "Deployment", "gateway")
    config = configuration(manifests, workload, tmp_path)
    [port] = named(manifests, "Service", "gateway")["spec"]["ports"]
    assert config.gateway.port == port["port"] == GatewayConfig().port
    assert config.gateway.public_url == f"http://gateway:{port['port']}"
    given = cli.argument_parser().parse_args(words(manifests, workload, tmp_path))
    assert given.id.endswith("-0"), "the number at the end of its id is added to the port"
    assert config.gateway.key_file is not None
    mounts = {mount["mountPath"]: mount["name"] for mount in container(workload)["volumeMounts"]}
    assert mounts[str(Path(config.gateway.key_file).parent)] == "key"


def test_probes_ask_what_the_agents_tell_and_each_has_time_to_end(manifests: list[Manifest], tmp_path: Path) -> None:
    for workload in ours(manifests):
        found, grace = container(workload), pod(workload)["terminationGracePeriodSeconds"]
        startup, ready, live = (found[f"{name}Probe"] for name in ("startup", "readiness", "liveness"))
        if workload["metadata"]["name"] == "exporter":
            [port] = found["ports"]
            assert port["containerPort"] == EXPORTER_PORT
            assert {one["httpGet"]["path"] for one in (startup, ready, live)} == {"/metrics"}
            assert {one["httpGet"]["port"] for one in (startup, ready, live)} == {port["name"]}
            continue
        if workload["metadata"]["name"] == "trainer":
            assert grace >= LONGEST_DRAIN, "it writes a checkpoint"
        elif workload["metadata"]["name"] != "engines":
            assert grace > configuration(manifests, workload, tmp_path).runner.drain_timeout + DRAIN_MARGIN
        given = [cli.argument_parser().parse_args(one["exec"]["command"][1:]) for one in (startup, ready, live)]
        assert {one.command for one in given} == {"health"}
        assert {one["exec"]["command"][0] for one in (startup, ready, live)} == {"trinity-mq"}
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 15 * 60, "a model from a cold disk"
        assert given[1].max_age > 2 * INTERVAL
        assert given[2].max_age >= 10 * INTERVAL, "a loop that is held up is no reason yet"
    assert re.search(r"TRINITY_MQ_HEALTH_FILE=/tmp/", (DEPLOY / "Dockerfile").read_text()), "which is writable"


def test_preemptible_pods_end_within_the_shortest_notice_and_gpus_are_for_those_who_compute(
    overlays: dict[str, list[Manifest]], tmp_path: Path
) -> None:
    manifests = overlays["spot"]
    for name in ("runner", "engines"):
        workload = named(manifests, "Deployment", name)
        assert pod(workload)["terminationGracePeriodSeconds"] <= 25
        assert pod(workload)["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert len(pod(workload)["tolerations"]) > 2
    config = configuration(manifests, named(manifests, "Deployment", "runner"), tmp_path)
    assert config.runner.drain_timeout + DRAIN_MARGIN < 25
    for name in ("explorer", "trainer", "operator", "gateway", "exporter"):
        assert "nodeAffinity" not in pod(named(manifests, "Deployment", name)).get("affinity", {}), "these stay"
    gpu = [one for one in ours(overlays["gpu"]) if "nvidia.com/gpu" in container(one)["resources"]["limits"]]
    assert {one["metadata"]["name"] for one in gpu} == {"trainer", "explorer", "engines"}, "those who compute"
    assert not any("nvidia.com/gpu" in json.dumps(one) for one in overlays["laptop"])


def test_a_trainer_on_two_machines_meets_where_its_service_and_policy_say(copy: Path, tmp_path: Path) -> None:
    manifests = built(copy / "nodes")
    trainer = named(manifests, "StatefulSet", "trainer")
    assert [one["kind"] for one in workloads(manifests) if labels(one) == labels(trainer)] == ["StatefulSet"]
    service = named(manifests, "Service", trainer["spec"]["serviceName"])
    assert matches({"matchLabels": service["spec"]["selector"]}, labels(trainer))
    for manifest in (trainer, service, named(manifests, "NetworkPolicy", "trainers")):
        kubernetes_validate.validate(manifest, VERSION, strict=True)
    hosts = [f"trainer-{number}.{service['metadata']['name']}" for number in range(trainer["spec"]["replicas"])]
    told = [word.replace("$(POD_NAME)", "trainer-1") for word in words(manifests, trainer, tmp_path) if word]
    given = cli.argument_parser().parse_args(told)
    config = load_config(given.target, given.overrides)
    assert (given.command, given.trainers.split(","), given.host) == ("node", hosts, hosts[1])
    [process] = node_processes(
        config, (given.target, *given.overrides), NodeLayout(trainers=tuple(hosts), port=given.port), given.host
    )
    assert {"--node-rank=1", f"--master-addr={hosts[0]}", f"synchronizer.host={hosts[0]}"} <= set(process.argv)
    policies = of_kind(manifests, "NetworkPolicy")
    pods = [("trinity-mq", labels(trainer))] * 2
    assert all(allowed(policies, *pods, port) for port in (given.port, ENGINE))
    assert {port["port"] for port in service["spec"]["ports"]} == {given.port}
    assert pod(trainer)["terminationGracePeriodSeconds"] > config.supervisor.grace >= LONGEST_DRAIN - 60
    assert container(trainer)["resources"]["limits"]["nvidia.com/gpu"] == "8"
    of_deployment = pod(named(built(copy / "overlays" / "gpu"), "Deployment", "trainer"))
    assert pod(trainer)["securityContext"] == of_deployment["securityContext"]
    assert container(trainer)["image"] == of_deployment["containers"][0]["image"]
    claims = [{name["name"] for name in spec["volumes"]} for spec in (pod(trainer), of_deployment)]
    assert claims[0] == claims[1]


def test_who_writes_into_the_runs_folder_is_put_beside_the_trainer(manifests: list[Manifest]) -> None:
    """All agents append to metrics.jsonl there."""
    trainer = labels(named(manifests, "Deployment", "trainer"))
    for workload in ours(manifests):
        [volume] = [one for one in pod(workload)["volumes"] if one["name"] == "runs"]
        [mount] = [one for one in container(workload)["volumeMounts"] if one["name"] == "runs"]
        writes = "persistentVolumeClaim" in volume and not mount.get("readOnly")
        affinity = pod(workload).get("affinity", {}).get("podAffinity")
        assert (affinity is not None) == (writes and workload["metadata"]["name"] != "trainer")
        if affinity:
            [term] = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
            assert matches(term["podAffinityTerm"]["labelSelector"], trainer)


# -- who may reach whom


Pod = tuple[str, Mapping[str, str]]
"""Name of the namespace, labels."""


def allowed(policies: Sequence[Manifest], source: Pod, target: Pod, port: int) -> bool:
    """Whether a connection passes the policies on both sides, as Kubernetes defines it."""

    def side(direction: str, word: str, own: Pod, peer: Pod) -> bool:
        there = [policy["spec"] for policy in policies if policy["metadata"]["namespace"] == own[0]]
        specs = [spec for spec in there if direction in spec["policyTypes"] and matches(spec["podSelector"], own[1])]
        rules = [rule for spec in specs for rule in spec.get(direction.lower(), [])]
        fitting = [rule for rule in rules if any(peers(one, own[0], peer) for one in rule[word])]
        return not specs or any(opens(one) for rule in fitting for one in rule["ports"])

    def opens(one: Manifest) -> bool:
        return bool(one.get("protocol", "TCP") == "TCP" and one["port"] <= port <= one.get("endPort", one["port"]))

    def peers(one: Manifest, own: str, peer: Pod) -> bool:
        if "ipBlock" in one:
            return False
        namespace = one.get("namespaceSelector")
        fits = peer[0] == own if namespace is None else matches(namespace, {"kubernetes.io/metadata.name": peer[0]})
        return fits and matches(one.get("podSelector", {}), peer[1])

    return side("Egress", "to", source, target) and side("Ingress", "from", target, source)


def test_exactly_the_connections_that_agents_make_are_open(overlays: dict[str, list[Manifest]], copy: Path) -> None:
    manifests = [*overlays["all"], *overlays["laptop"], *built(copy / "rabbitmq")]
    unique = {json.dumps(one, sort_keys=True): one for one in of_kind(manifests, "NetworkPolicy")}
    policies = list(unique.values())
    pods: dict[str, Pod] = {
        one["metadata"]["name"]: (one["metadata"]["namespace"], labels(one)) for one in ours(overlays["all"])
    }
    pods |= {
        "broker": ("rabbitmq", {"app.kubernetes.io/component": "rabbitmq", "app.kubernetes.io/name": "rabbitmq"}),
        "laptop broker": ("trinity-mq", labels(named(overlays["laptop"], "StatefulSet", "rabbitmq"))),
        "cluster operator": ("rabbitmq-system", {}),
        "keda": ("keda", {}),
        "prometheus": ("monitoring", {}),
        "stranger": ("default", {}),
        "agent outside": ("default", {"trinity-mq/uses-gateway": "true"}),
    }
    engines, weights = ("explorer", "engines"), ("trainer", "explorer", "engines")
    agents = (*weights, "runner", "operator", "gateway", "exporter")
    guarded = {*agents, "broker", "laptop broker"}
    expected = {(one, "broker", port) for one in agents for port in (AMQP, AMQPS)}
    expected |= {(one, "laptop broker", AMQP) for one in agents}
    expected |= {(one, other, ENGINE) for one in weights for other in weights}
    expected |= {(one, other, ENGINE) for one in ("runner", "operator", "gateway") for other in engines}
    expected |= {("agent outside", "gateway", GatewayConfig().port)}
    expected |= {(one, "exporter", EXPORTER_PORT) for one in ("keda", "prometheus")}
    expected |= {(one, "broker", MANAGEMENT) for one in ("keda", "cluster operator")}
    expected |= {("prometheus", "broker", BROKER_METRICS)}
    expected |= {("broker", "broker", port) for port in (4369, 25672)}
    ports = {AMQP, AMQPS, MANAGEMENT, BROKER_METRICS, ENGINE, EXPORTER_PORT, GatewayConfig().port, 4369, 25672, 22, 443}
    found = {
        (source, target, port)
        for source, target, port in itertools.product(pods, pods, ports)
        if (source in agents or target in guarded) and allowed(policies, pods[source], pods[target], port)
    }
    assert found == expected
    own = of_kind(overlays["all"], "NetworkPolicy")
    rules = [rule for one in own for way in ("ingress", "egress") for rule in one["spec"].get(way, [])]
    [(low, high)] = {(one["port"], one["endPort"]) for rule in rules for one in rule["ports"] if "endPort" in one}
    assert low <= ENGINE <= high, "ports that engines choose"
    for workload in ours(overlays["all"]):
        [sysctl] = pod(workload)["securityContext"]["sysctls"]
        assert sysctl == {"name": "net.ipv4.ip_local_port_range", "value": f"{low} {high}"}


# -- autoscaling


async def test_scaled_objects_ask_for_names_that_there_are(overlays: dict[str, list[Manifest]], tmp_path: Path) -> None:
    manifests = overlays["keda"]
    config = configuration(manifests, named(manifests, "Deployment", "operator"), tmp_path)
    [trigger] = named(manifests, "ScaledObject", "operator")["spec"]["triggers"]
    assert trigger["metadata"]["queueName"] == Topology.of(config).closed.name == "tmq.smoke.closed"
    assert (trigger["type"], trigger["metadata"]["protocol"]) == ("rabbitmq", "http")
    assert trigger["metadata"]["excludeUnacknowledged"] == "false", "a batch counts until it is processed"
    assert named(manifests, "TriggerAuthentication", trigger["authenticationRef"]["name"])

    [trigger] = named(manifests, "ScaledObject", "runner")["spec"]["triggers"]
    service = named(manifests, "Service", "exporter")["metadata"]
    assert trigger["metadata"]["url"] == f"http://exporter.{service['namespace']}.svc:{EXPORTER_PORT}/metrics"
    assert trigger["metadata"]["valueLocation"] in names(await scraped(seen()))
    assert (trigger["type"], trigger["metadata"]["format"]) == ("metrics-api", "prometheus")
    for name in ("keda", "all"):
        targets = {
            one["spec"]["scaleTargetRef"]["name"]: one["spec"] for one in of_kind(overlays[name], "ScaledObject")
        }
        assert set(targets) == {"runner", "operator"}
        for workload in ours(overlays[name]):
            assert ("replicas" in workload["spec"]) == (workload["metadata"]["name"] not in targets)
        for spec in targets.values():
            assert 1 <= spec["minReplicaCount"] <= spec["fallback"]["replicas"] < spec["maxReplicaCount"]
            behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
            assert behavior["scaleDown"]["stabilizationWindowSeconds"] >= 300


def test_a_run_of_another_name_in_another_namespace(copy: Path, tmp_path: Path) -> None:
    """As docs/kubernetes.md says: an overlay with its name, its namespace and its configuration."""
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    block = re.search(r" *```yaml\n *# overlays/maths/kustomization.yaml\n(.*?)```", text, re.DOTALL)
    assert block is not None
    folder = copy / "overlays" / "maths"
    folder.mkdir()
    (folder / "kustomization.yaml").write_text(textwrap.dedent(block[1]))
    (folder / "run.yaml").write_text((copy / "base" / "run.yaml").read_text() + "seed: 7\n")
    manifests = built(folder)
    shutil.rmtree(folder)
    assert {one["metadata"]["namespace"] for one in manifests if one["kind"] != "Namespace"} == {"maths"}
    assert named(manifests, "Namespace", "maths")
    [queue] = named(manifests, "ScaledObject", "operator")["spec"]["triggers"]
    assert queue["metadata"]["queueName"] == Topology("maths").closed.name
    [figure] = named(manifests, "ScaledObject", "runner")["spec"]["triggers"]
    assert figure["metadata"]["url"].startswith("http://exporter.maths.svc:")
    for workload in ours(manifests):
        config = configuration(manifests, workload, tmp_path)
        assert (config.name, config.seed) == ("maths", 7)


# -- monitoring


def test_alerts_and_dashboard_are_those_of_deploy_grafana(overlays: dict[str, list[Manifest]]) -> None:
    spec = importlib.util.spec_from_file_location("make_rules", FOLDER / "make_rules.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.FILE.read_text() == module.rules(), "run python deploy/kubernetes/make_rules.py"
    [rule] = of_kind(overlays["monitoring"], "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((DEPLOY / "grafana" / "alerts.yml").read_text())
    dashboard = named(overlays["monitoring"], "ConfigMap", "trinity-mq-dashboard")
    assert dashboard["data"]["trinity-mq.json"] == (DEPLOY / "grafana" / "trinity-mq.json").read_text()
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"


# -- the broker


def test_the_cluster_of_brokers_allows_what_the_protocol_needs(copy: Path) -> None:
    manifests = built(copy / "rabbitmq")
    [cluster] = of_kind(manifests, "RabbitmqCluster")
    spec = cluster["spec"]
    lines = [line for line in spec["rabbitmq"]["additionalConfig"].splitlines() if line and not line.startswith("#")]
    told = dict(line.split(" = ") for line in lines)
    limit = BrokerConfig.model_fields["max_message_bytes"].metadata
    assert int(told["max_message_size"]) >= max(one.le for one in limit if hasattr(one, "le"))
    assert int(told["consumer_timeout"]) >= 1000 * BrokerConfig().consumer_timeout
    assert spec["replicas"] == 3
    [budget] = of_kind(manifests, "PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] == 1, "two of three make a majority"
    [policy] = of_kind(manifests, "NetworkPolicy")
    assert policy["spec"]["podSelector"] == budget["spec"]["selector"]


# -- secrets


def test_secrets_are_made_once_and_are_in_no_repository(tmp_path: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", FOLDER / "base" / "secrets"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert listed.stdout.split() in ([], ["deploy/kubernetes/base/secrets/.gitignore"])
    command = [FOLDER / "make-secrets", "broker.example", tmp_path / "secrets"]
    subprocess.run(command, check=True, capture_output=True)
    made = {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}
    subprocess.run(command, check=True, capture_output=True)
    assert made == {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in (tmp_path / "secrets").iterdir())
    addresses = Addresses.of(BrokerConfig(url_file=str(tmp_path / "secrets" / "broker-url")))
    assert addresses is not None
    assert made["broker-url"] == f"amqp://trinity:{made['broker-password']}@broker.example:{AMQP}/trinity"
    assert re.fullmatch(rf"http://keda:[0-9a-f]{{48}}@broker\.example:{MANAGEMENT}/trinity", made["management-url"])
    assert len({made["broker-password"], made["gateway-key"], made["management-url"]}) == 3
    shutil.copytree(DEPLOY, tmp_path / "deploy", ignore=shutil.ignore_patterns("broker-*", "*-url", "*-key", "*.whl"))
    done = kustomize(tmp_path / "deploy" / "kubernetes" / "overlays" / "laptop")
    assert done.returncode != 0
    assert "secrets/broker-url" in done.stderr, "what is not filled in is said by name"


def test_brokers_are_where_the_secrets_say(copy: Path, overlays: dict[str, list[Manifest]]) -> None:
    [secret] = [one for one in of_kind(overlays["all"], "Secret") if one["metadata"]["name"] == "broker"]
    url = base64.b64decode(secret["data"]["broker-url"]).decode()
    [cluster] = of_kind(built(copy / "rabbitmq"), "RabbitmqCluster")
    assert f"@{cluster['metadata']['name']}.{cluster['metadata']['namespace']}.svc:{AMQP}/" in url
    environment = {one["name"]: one for one in container(named(overlays["laptop"], "StatefulSet", "rabbitmq"))["env"]}
    assert url.startswith(f"amqp://{environment['RABBITMQ_DEFAULT_USER']['value']}:")
    assert url.endswith(f"/{environment['RABBITMQ_DEFAULT_VHOST']['value']}")
    assert named(overlays["laptop"], "Service", "rabbitmq")
