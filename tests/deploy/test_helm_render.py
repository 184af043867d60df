"""What the chart makes of its values: fit for Kubernetes' schemas, whole in itself, and no laxer than it says."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
from helm_python import Chart, lint

from tests.deploy import charts, flips
from tests.deploy.charts import CHART, RELEASES, SCENARIOS, VERSIONS, Object, Pods, Values, merged, named, of_kind, pods
from trimtab.kit.tls import caller_of, speaks_for

CASES: dict[str, Values] = {
    "default": {},
    **{name: charts.scenario(name) for name in SCENARIOS},
    "certificates by cert-manager": merged(flips.CERT_MANAGER, flips.SCALED, flips.POLICY),
    "certificates of one's own": merged(flips.OWN_TLS, flips.SCALED, flips.POLICY),
    "a store outside": flips.OUTSIDE_STORE,
    "several nodes for an engine": merged(flips.GROUPED, flips.SCALED, flips.CERT_MANAGER),
    "several nodes, each with a disk": flips.GROUPED_WITH_DISKS,
    "observed": merged(flips.ALL_MONITORING, flips.CERT_MANAGER),
    "no network policies": {"networkPolicy": {"enabled": False}},
    "two pools": {"pools": {"slow": {"replicas": 2, "settings": {"model": "/models/slow"}}}},
}
LABEL = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
SERVICE = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


@functools.cache
def rendered(case: str) -> list[Object]:
    return charts.render(CASES[case])


each_case = pytest.mark.parametrize("case", CASES)


@pytest.mark.slow
@each_case
def test_helm_finds_nothing_to_say_against_it(case: str) -> None:
    messages: Any = lint(CHART, values=CASES[case], strict=True)
    assert [m for m in messages.get("messages", []) if m.get("severity", 0) > 1] == [], messages


@pytest.mark.slow
@each_case
@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_field(case: str, version: str) -> None:
    assert [fault for each in rendered(case) if (fault := charts.schema_fault(each, version))] == []


@each_case
@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_field_of_the_pods_in_others_kinds(case: str, version: str) -> None:
    for pod in pods(of_kind(rendered(case), "LeaderWorkerSet")):
        metadata = {"name": "x", "labels": dict(pod.labels)}
        as_pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod.spec}
        assert charts.schema_fault(as_pod, version) is None


def test_a_field_that_kubernetes_does_not_know_would_be_found() -> None:
    service = charts.only(charts.render(), "Service", "control")
    for version in VERSIONS:
        fault = charts.schema_fault({**service, "spec": {**service["spec"], "selectors": {}}}, version)
        assert fault is not None
        assert "selectors" in fault


@pytest.mark.parametrize("release", RELEASES)
def test_any_release_name_that_helm_takes_gives_names_that_kubernetes_takes(release: str) -> None:
    values = merged(flips.GROUPED, flips.CERT_MANAGER, flips.ALL_MONITORING, flips.POLICY, flips.SCALED)
    for each in charts.render(merged(values, {"pools": {"p" * 20: {}}}), release=release, namespace="n" * 63):
        assert SERVICE.fullmatch(named(each)), named(each)
        assert len(named(each)) <= 52, named(each)
        for labels in (each["metadata"]["labels"], *(pod.labels for pod in pods([each]))):
            assert all(isinstance(value, str) and LABEL.fullmatch(value) for value in labels.values()), labels
    assert charts.schema_fault(each, VERSIONS[-1]) is None


def test_two_long_releases_that_begin_alike_have_no_name_in_common() -> None:
    one, two = ({named(each) for each in charts.render(release="x" * 50 + end)} for end in ("1", "2"))
    assert not one & two
    dotted, dashed = ({named(each) for each in charts.render(release=name)} for name in ("a.b", "a-b"))
    assert not dotted & dashed


@each_case
def test_everything_is_in_the_releases_namespace(case: str) -> None:
    assert {each["metadata"]["namespace"] for each in rendered(case)} == {"llm"}


@each_case
def test_no_name_is_given_twice(case: str) -> None:
    names = [(each["kind"], named(each)) for each in rendered(case)]
    assert len(names) == len(set(names))


def everyones(case: str) -> list[Pods]:
    return list(pods(rendered(case)))


@each_case
def test_no_container_may_do_more_than_it_needs(case: str) -> None:
    for pod in everyones(case):
        assert pod.spec["securityContext"]["runAsNonRoot"] is True, pod.owner
        assert pod.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, pod.owner
        assert pod.spec["automountServiceAccountToken"] is False, pod.owner
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod.spec), pod.owner
        assert not [v for v in pod.spec["volumes"] if "hostPath" in v], pod.owner
        for container in pod.containers:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "privileged": False,
                "readOnlyRootFilesystem": True,
                "runAsNonRoot": True,
                "capabilities": {"drop": ["ALL"]},
            }, pod.owner


@each_case
def test_every_container_has_bounds_and_an_image_that_is_named(case: str) -> None:
    for pod in everyones(case):
        for container in pod.containers:
            assert {"cpu", "memory"} <= set(container["resources"]["limits"]), pod.owner
            assert {"cpu", "memory"} <= set(container["resources"]["requests"]), pod.owner
            assert re.fullmatch(r"[a-z0-9./-]+(:[\w.-]+|@sha256:[0-9a-f]{64})", container["image"]), pod.owner
            assert not container["image"].endswith(":latest")


@each_case
def test_whoever_serves_has_all_three_probes_and_the_first_waits_the_longest(case: str) -> None:
    for pod in (pod for pod in everyones(case) if pod.serves):
        for container in pod.containers:
            start, live = container["startupProbe"], container["livenessProbe"]
            assert "readinessProbe" in container, pod.owner
            assert start["periodSeconds"] * start["failureThreshold"] >= 60, pod.owner
            assert live["periodSeconds"] * live["failureThreshold"] >= 60, pod.owner


@each_case
def test_the_grace_period_is_longer_than_the_drain(case: str) -> None:
    found = 0
    for pod in everyones(case):
        for container in pod.containers:
            said = charts.variables(container)
            for section in ("WORKER", "GATEWAY"):
                if drain := said.get(f"TRIMTAB_{section}_DRAIN_S"):
                    pause = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
                    assert pod.spec["terminationGracePeriodSeconds"] >= pause + float(drain) + 15, pod.owner
                    found += 1
    assert found >= 2


@each_case
def test_what_a_container_mounts_is_there_and_what_is_there_is_mounted(case: str) -> None:
    for pod in everyones(case):
        there = {volume["name"] for volume in pod.spec["volumes"]}
        for each in of_kind(rendered(case), "StatefulSet"):
            if pod.owner == f"StatefulSet/{named(each)}":
                there |= {claim["metadata"]["name"] for claim in each["spec"].get("volumeClaimTemplates", [])}
        assert {m["name"] for c in pod.containers for m in c.get("volumeMounts", [])} == there, pod.owner


@each_case
def test_what_a_pod_refers_to_is_in_the_release_or_in_the_values(case: str) -> None:
    objects = rendered(case)
    made = {(each["kind"], named(each)) for each in objects}
    made |= {("Secret", each["spec"]["secretName"]) for each in of_kind(objects, "Certificate")}
    made |= {("Secret", name) for name in flips.TLS_SECRETS.values()}
    for pod in pods(objects):
        wanted = {("ServiceAccount", pod.spec["serviceAccountName"])}
        for volume in pod.spec["volumes"]:
            wanted |= {("Secret", volume["secret"]["secretName"])} if "secret" in volume else set()
            wanted |= {("ConfigMap", volume["configMap"]["name"])} if "configMap" in volume else set()
        for container in pod.containers:
            for each in container.get("env", []):
                if ref := each.get("valueFrom", {}).get("secretKeyRef"):
                    wanted.add(("Secret", ref["name"]))
        assert wanted <= made, pod.owner


def selects(selector: Object, labels: Any) -> bool:
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", selector).items())


@each_case
def test_selectors_find_their_pods_and_services_their_ports(case: str) -> None:
    objects = rendered(case)
    serving = [pod for pod in pods(objects) if pod.serves]
    for each in of_kind(objects, "Service"):
        found = [pod for pod in serving if selects(each["spec"]["selector"], pod.labels)]
        assert len(found) == 1, named(each)
        ports = {port["name"] for container in found[0].containers for port in container["ports"]}
        assert {port["targetPort"] for port in each["spec"]["ports"]} <= ports
    for each in of_kind(objects, "Deployment", "StatefulSet"):
        owners = {pod.owner for pod in pods(objects) if selects(each["spec"]["selector"], pod.labels)}
        assert owners == {f"{each['kind']}/{named(each)}"}
    budgets = of_kind(objects, "PodDisruptionBudget")
    for pod in serving:
        assert len([b for b in budgets if selects(b["spec"]["selector"], pod.labels)]) == 1, pod.owner


@each_case
def test_service_links_are_off_since_they_would_be_taken_for_settings(case: str) -> None:
    assert all(pod.spec["enableServiceLinks"] is False for pod in everyones(case))


@each_case
def test_a_worker_is_not_process_1_which_hears_no_sigterm_while_it_starts(case: str) -> None:
    for pod in everyones(case):
        assert pod.spec.get("shareProcessNamespace", False) == (pod.component in ("worker", "ray")), pod.owner


@each_case
def test_pods_of_a_pool_are_not_made_anew_by_a_new_version_of_the_chart_alone(case: str) -> None:
    for pod in everyones(case):
        if pod.serves:
            assert not {"helm.sh/chart", "app.kubernetes.io/version"} & set(pod.labels), pod.owner


@each_case
def test_the_kubelet_asks_by_grpc_unless_there_is_tls(case: str) -> None:
    tls = CASES[case].get("tls", {}).get("enabled", False)
    for pod in everyones(case):
        if pod.component in ("control", "worker"):
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                asked = pod.containers[0][probe]
                assert ("exec" in asked, "grpc" in asked) == (tls, not tls), pod.owner
        if pod.component == "gateway":
            ready = pod.containers[0]["readinessProbe"]
            assert ready.get("httpGet", {}).get("scheme", "") == ("HTTPS" if tls else "")


def test_a_group_serves_by_its_leader_and_goes_as_a_whole() -> None:
    objects = rendered("several nodes for an engine")
    (group,) = of_kind(objects, "LeaderWorkerSet")
    assert not [each for each in of_kind(objects, "StatefulSet") if "worker" in named(each)]
    template = group["spec"]["leaderWorkerTemplate"]
    assert template["size"] == 4
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert "replicas" not in group["spec"]
    leader, member = pods([group])
    said = charts.variables(leader.containers[0])
    assert said["TRIMTAB_WORKER_DISTRIBUTED_EXECUTOR"] == "ray"
    assert (said["TRIMTAB_WORKER_TENSOR_PARALLEL_SIZE"], said["TRIMTAB_WORKER_PIPELINE_PARALLEL_SIZE"]) == ("8", "4")
    assert leader.containers[0]["command"][-1].endswith("&& exec trimtab-worker")
    assert member.containers[0]["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert "TRIMTAB_WORKER_NODE_ID" not in charts.variables(member.containers[0])
    assert not [volume for volume in member.spec["volumes"] if "secret" in volume]
    (scaled,) = of_kind(objects, "ScaledObject")
    target = scaled["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("LeaderWorkerSet", named(group))


def test_a_pod_of_a_group_claims_a_disk_for_itself_as_a_worker_of_a_set_does() -> None:
    volume = {"workerDefaults": {"modelCache": {"storageClass": "fast"}}}
    grouped = charts.render(merged(flips.GROUPED_WITH_DISKS, volume))
    alone = charts.render(merged(flips.GROUPED_WITH_DISKS, volume, {"workerDefaults": {"multiNode": {"size": 1}}}))
    (wanted,) = charts.only(alone, "StatefulSet", "worker-default")["spec"]["volumeClaimTemplates"]
    assert wanted["spec"]["resources"] == {"requests": {"storage": "80Gi"}}
    assert wanted["spec"]["storageClassName"] == "fast"
    for pod in pods(of_kind(grouped, "LeaderWorkerSet")):
        (models,) = [each for each in pod.spec["volumes"] if each["name"] == wanted["metadata"]["name"]]
        assert models["ephemeral"]["volumeClaimTemplate"]["spec"] == wanted["spec"]
    shared = {"workerDefaults": {"modelCache": {"existingClaim": "models"}}}
    for pod in pods(of_kind(charts.render(merged(flips.GROUPED_WITH_DISKS, shared)), "LeaderWorkerSet")):
        assert {"name": "models", "persistentVolumeClaim": {"claimName": "models"}} in pod.spec["volumes"]


@each_case
def test_who_serves_nobody_holds_up_no_nodes_drain(case: str) -> None:
    budgets = of_kind(rendered(case), "PodDisruptionBudget")
    assert len(budgets) >= 3
    assert {each["spec"]["unhealthyPodEvictionPolicy"] for each in budgets} == {"AlwaysAllow"}


def test_the_notes_say_how_to_reach_the_control_plane_and_what_is_not_guarded() -> None:
    def notes(values: Values) -> str:
        (said,) = [text for name, text in charts.texts(values).items() if name.endswith("NOTES.txt")]
        return said

    plain, secured, outside = notes({}), notes(flips.OWN_TLS), notes(merged(flips.OWN_TLS, flips.OUTSIDE_STORE))
    asked = "kubectl -n llm exec deploy/trimtab-control -- trimtab fleet --check"
    assert ("svc/trimtab-control 7071:7071" in plain, asked in plain) == (True, False)
    assert ("svc/trimtab-control 7071:7071" in secured, asked in secured) == (False, True)
    (control,) = [pod for pod in pods(charts.render(flips.OWN_TLS)) if pod.component == "control"]
    said = charts.variables(control.containers[0])
    assert {said[f"TRIMTAB_TLS_{word}"] for word in ("CA", "CERT", "KEY")} == {
        f"/etc/trimtab/tls/{file}" for file in ("ca.crt", "tls.crt", "tls.key")
    }
    assert "everything speaks plain text" in plain
    assert "the chart's Valkey speaks plain text" in secured
    assert "WARNING" not in outside


def test_a_set_that_something_else_sizes_has_no_size_of_its_own() -> None:
    scaled = charts.render(merged(flips.SCALED, {"gateway": {"autoscaling": {"enabled": True}}}))
    assert "replicas" not in charts.only(scaled, "StatefulSet", "worker-default")["spec"]
    assert "replicas" not in charts.only(scaled, "Deployment", "gateway")["spec"]
    assert charts.only(charts.render(), "StatefulSet", "worker-default")["spec"]["replicas"] == 1


def test_keda_asks_the_control_plane_about_the_pool_and_shows_a_viewers_certificate() -> None:
    objects = rendered("certificates by cert-manager")
    (scaled,) = of_kind(objects, "ScaledObject")
    (trigger,) = scaled["spec"]["triggers"]
    assert trigger["type"] == "external"
    assert trigger["metadata"] == {"scalerAddress": "trimtab-control.llm.svc:7071", "pool": "default"}
    assert (
        charts.only(objects, "StatefulSet", "worker-default")["metadata"]["name"]
        == (scaled["spec"]["scaleTargetRef"]["name"])
    )
    (auth,) = of_kind(objects, "TriggerAuthentication")
    assert trigger["authenticationRef"] == {"name": named(auth)}
    assert {ref["parameter"]: (ref["name"], ref["key"]) for ref in auth["spec"]["secretTargetRef"]} == {
        "caCert": ("trimtab-tls-viewer", "ca.crt"),
        "tlsClientCert": ("trimtab-tls-viewer", "tls.crt"),
        "tlsClientKey": ("trimtab-tls-viewer", "tls.key"),
    }
    server = charts.only(objects, "Certificate", "tls-control")
    assert "trimtab-control.llm.svc" in server["spec"]["dnsNames"]
    plain = of_kind(charts.render(flips.SCALED), "ScaledObject", "TriggerAuthentication")
    assert [each["kind"] for each in plain] == ["ScaledObject"]
    assert "authenticationRef" not in plain[0]["spec"]["triggers"][0]


@pytest.mark.parametrize("kind", ["control", "gateway", "worker", "operator", "viewer"])
def test_cert_manager_is_asked_for_the_names_that_the_mesh_goes_by(kind: str) -> None:
    objects = charts.render(merged(flips.CERT_MANAGER, {"mesh": "prod"}))
    spec = charts.only(objects, "Certificate", f"tls-{kind}")["spec"]
    (uri,) = spec["uris"]
    caller = caller_of({"transport_security_type": [b"ssl"], "peer_uri": [uri.encode()]}, "prod")
    assert caller.kind == kind
    assert caller.known
    if kind in ("gateway", "worker"):
        assert speaks_for(caller, kind, "trimtab-worker-default-0")
    if kind in ("control", "gateway", "worker"):
        assert f"{kind}.prod.trimtab" in spec["dnsNames"]
        assert "server auth" in spec["usages"]
    else:
        assert "dnsNames" not in spec
    assert "client auth" in spec["usages"]


@pytest.mark.parametrize("issuer", ["", "company"])
def test_certificates_come_from_the_issuer_that_is_named_else_from_one_that_is_made(issuer: str) -> None:
    objects = charts.render(merged(flips.CERT_MANAGER, {"tls": {"certManager": {"issuerRef": {"name": issuer}}}}))
    issuers = {named(each) for each in of_kind(objects, "Issuer")}
    leaves = [each for each in of_kind(objects, "Certificate") if not each["spec"].get("isCA")]
    assert {each["spec"]["issuerRef"]["name"] for each in leaves} == {issuer or "trimtab-authority"}
    assert issuers == (set() if issuer else {"trimtab-authority", "trimtab-self-signed"})


def test_tls_without_certificates_is_refused_by_name() -> None:
    with pytest.raises(Exception, match=r"tls\.secrets\.\w+: .* name a Secret"):
        charts.render({"tls": {"enabled": True}})


def test_numa_asks_for_whole_cores_and_gets_a_guaranteed_pod() -> None:
    whole = {"workerDefaults": {"numa": {"exclusive": True}, "gpu": {"count": 2}}}
    (worker,) = [pod for pod in pods(charts.render(whole)) if pod.component == "worker"]
    resources = worker.containers[0]["resources"]
    assert resources["requests"] == resources["limits"] == {"cpu": "4", "memory": "10Gi", "nvidia.com/gpu": 2}
    with pytest.raises(Exception, match="whole number of cores"):
        charts.render(merged(whole, {"workerDefaults": {"resources": {"limits": {"cpu": "3500m"}}}}))


def test_a_packaged_chart_has_rules_and_boards_in_it_and_renders_the_same(tmp_path: Path) -> None:
    archive = Path(Chart.load(CHART).save(tmp_path)).read_bytes()
    packed = Chart.load_archive(archive).render(flips.ALL_MONITORING, name="trimtab", namespace="llm")
    here = charts.texts(flips.ALL_MONITORING)
    assert packed["trimtab/templates/monitoring.yaml"] == here["trimtab/templates/monitoring.yaml"]
    assert packed["trimtab/templates/monitoring.yaml"].count("kind: ConfigMap") == 5
