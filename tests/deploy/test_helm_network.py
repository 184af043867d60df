"""Who may reach whom, by the chart's NetworkPolicies: everything is shut, and what the mesh needs is open."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy import charts, flips
from tests.deploy.charts import Object, Pods, Values, merged, of_kind, pods
from tests.deploy.test_helm_render import CASES

Peer = dict[str, Any]
PROMETHEUS = {"namespace": {"kubernetes.io/metadata.name": "monitoring"}, "labels": {"app": "prometheus"}}
KEDA = {"namespace": {"kubernetes.io/metadata.name": "keda"}, "labels": {"app": "keda-operator"}}
STRANGER = {"namespace": {"kubernetes.io/metadata.name": "elsewhere"}, "labels": {"app": "stranger"}}
NEIGHBOUR = {"namespace": {"kubernetes.io/metadata.name": "llm"}, "labels": {"app": "client"}}
INTERNET: Peer = {"namespace": {}, "labels": {}}


def as_peer(pod: Pods) -> Peer:
    labels = dict(pod.labels)
    if pod.owner.startswith("LeaderWorkerSet"):
        labels["leaderworkerset.sigs.k8s.io/name"] = pod.owner.partition("/")[2]
    return {"namespace": {"kubernetes.io/metadata.name": "llm"}, "labels": labels}


def matches(selector: Object, labels: Any) -> bool:
    exist = [e["key"] for e in selector.get("matchExpressions", []) if e["operator"] == "Exists"]
    assert len(exist) == len(selector.get("matchExpressions", []))
    return all(labels.get(k) == v for k, v in selector.get("matchLabels", {}).items()) and set(exist) <= set(labels)


def is_peer(rule: Object, who: Peer) -> bool:
    if who is INTERNET:
        return False
    if "namespaceSelector" in rule:
        inside = matches(rule["namespaceSelector"], who["namespace"])
    else:
        inside = who["namespace"]["kubernetes.io/metadata.name"] == "llm"
    return inside and matches(rule.get("podSelector", {}), who["labels"])


def lets(rule: Object, direction: str, who: Peer, port: int) -> bool:
    peers = rule.get("from" if direction == "ingress" else "to")
    ports = [each["port"] for each in rule.get("ports", []) if each.get("protocol", "TCP") == "TCP"]
    return (peers is None or any(is_peer(each, who) for each in peers)) and ("ports" not in rule or port in ports)


def may(objects: list[Object], direction: str, whose: Peer, who: Peer, port: int) -> bool:
    """Whether the policies over `whose` let it be called by `who`, or call them."""
    over = [
        each["spec"]
        for each in of_kind(objects, "NetworkPolicy")
        if is_peer({"podSelector": each["spec"]["podSelector"]}, whose)
        and direction.capitalize() in each["spec"]["policyTypes"]
    ]
    return not over or any(lets(rule, direction, who, port) for spec in over for rule in spec.get(direction, []))


def reaches(objects: list[Object], caller: Peer, called: Peer, port: int) -> bool:
    ours = {"app.kubernetes.io/name"} <= set(caller["labels"])
    out = may(objects, "egress", caller, called, port) if ours else True
    return out and (called is INTERNET or may(objects, "ingress", called, caller, port))


OPEN = {
    ("gateway", "control", 7071),
    ("worker", "control", 7071),
    ("control", "control", 7071),
    ("verbs", "control", 7071),
    ("gateway", "worker", 7100),
    ("verbs", "gateway", 7070),
    ("control", "valkey", 6379),
}
"""Between the parts of a mesh, by default. The port 7080 is for clients, who are in the same namespace here."""
PORTS = (6379, 7070, 7071, 7072, 7080, 7081, 7100, 7200, 22, 443)


def test_the_parts_of_a_mesh_reach_what_they_need_and_nothing_else() -> None:
    objects = charts.render(merged(flips.POLICY, {"networkPolicy": {"clients": []}}))
    parts = {pod.component: as_peer(pod) for pod in pods(objects)}
    assert set(parts) == {"control", "gateway", "worker", "valkey", "verbs"}
    found = {(a, b, p) for a in parts for b in parts for p in PORTS if reaches(objects, parts[a], parts[b], p)}
    assert found == OPEN


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case != "no network policies"])
def test_strangers_reach_nothing_and_the_mesh_reaches_no_stranger(case: str) -> None:
    objects = charts.render(CASES[case])
    for pod in pods(objects):
        for port in PORTS:
            assert not reaches(objects, STRANGER, as_peer(pod), port), (pod.owner, port)
            fetches = pod.component in ("worker", "ray") and port == 443
            stores = case == "a store outside" and pod.component == "control" and port == 6379
            assert reaches(objects, as_peer(pod), INTERNET, port) == (fetches or stores), (pod.owner, port)


def test_prometheus_reaches_the_metrics_and_keda_the_scaler_where_there_is_one() -> None:
    plain, scaled = charts.render(), charts.render(flips.SCALED)
    for objects, scales in ((plain, False), (scaled, True)):
        for pod in pods(objects):
            seen = {port for port in PORTS if reaches(objects, PROMETHEUS, as_peer(pod), port)}
            assert seen == {"control": {7072}, "gateway": {7081}, "worker": {7200}}.get(pod.component, set())
            asked = {port for port in PORTS if reaches(objects, KEDA, as_peer(pod), port)}
            assert asked == ({7071} if scales and pod.component == "control" else set())


def test_clients_reach_the_gateways_alone_and_only_those_that_the_values_name() -> None:
    for objects, port_open in ((charts.render(), True), (charts.render({"networkPolicy": {"clients": []}}), False)):
        for pod in pods(objects):
            seen = {port for port in PORTS if reaches(objects, NEIGHBOUR, as_peer(pod), port)}
            assert seen == ({7070, 7080} if port_open and pod.component == "gateway" else set()), pod.owner


def test_models_are_fetched_only_while_the_values_say_so() -> None:
    objects = charts.render({"networkPolicy": {"modelDownload": False}})
    assert not [pod for pod in pods(objects) if reaches(objects, as_peer(pod), INTERNET, 443)]


STORES = {
    "redis://h": {6379},
    "redis://:p%40%2Fw@h:6380/0?x=/:7000": {6380},
    "rediss://h:6380": {6380},
    "rediss://[fd00::1]/0": {6379},
    "redis+sentinel://a:26379,b:26380,c/primary/0": {26379, 26380},
    "rediss+sentinel://u:p@a/primary": {26379},
}
"""By URL, where it says that a store outside is; the port of the primary that sentinels name is for the list in the values."""
ASKED = (6379, 6380, 7000, 26379, 26380)


def outward(values: Values) -> set[int]:
    """Of ASKED and the usual ones for the web, at which a control plane reaches the world."""
    objects = charts.render(values)
    (control,) = [as_peer(pod) for pod in pods(objects) if pod.component == "control"]
    return {port for port in (*ASKED, 80, 443, 8443) if reaches(objects, control, INTERNET, port)}


@pytest.mark.slow
@pytest.mark.parametrize("url", STORES)
def test_control_planes_reach_the_store_where_its_url_says(url: str) -> None:
    values = merged(flips.OUTSIDE_STORE, {"redis": {"url": url}})
    assert outward(values) == {6379} | STORES[url]
    assert outward(merged(values, {"networkPolicy": {"redisPorts": [7000]}})) == {7000} | STORES[url]
    assert outward(merged(values, {"networkPolicy": {"redisPorts": []}})) == set()


def test_a_url_in_a_secret_says_no_port_so_the_values_do() -> None:
    hidden = merged(flips.OUTSIDE_STORE, {"redis": {"url": "redis://h:7000", "existingSecret": "store"}})
    assert outward(hidden) == {6379}
    assert outward(merged(hidden, {"networkPolicy": {"redisPorts": [6380]}})) == {6380}
    assert outward({"redis": {"url": "redis://h:7000"}}) == set()


@pytest.mark.parametrize(
    ("address", "port"),
    [
        ("https://hooks.example/x:80?a=b", 443),
        ("http://hooks.example", 80),
        ("HTTPS://user@hooks.example:8443/x", 8443),
    ],
)
def test_control_planes_reach_where_alerts_are_posted(address: str, port: int) -> None:
    assert outward({"control": {"settings": {"alert_webhook": address}}}) == {port}
    assert outward({}) == set()


@pytest.mark.parametrize("ports", [[53, 5353], [1053]])
def test_name_servers_are_reached_at_their_own_ports_too(ports: list[int]) -> None:
    said = {} if ports == [53, 5353] else {"networkPolicy": {"dnsPorts": ports}}
    wanted = [{"protocol": protocol, "port": port} for port in ports for protocol in ("UDP", "TCP")]
    for values in (flips.POLICY, flips.GROUPED):
        policies = of_kind(charts.render(merged(values, said)), "NetworkPolicy")
        asks = {charts.named(each) for each in policies if {"ports": wanted} in each["spec"].get("egress", [])}
        assert asks == {charts.named(each) for each in policies} - {"trimtab-deny", "trimtab-valkey"}


def test_the_pods_of_an_engine_that_spans_nodes_reach_each_other_at_any_port() -> None:
    objects = charts.render(flips.GROUPED)
    leader, member = (as_peer(pod) for pod in pods(of_kind(objects, "LeaderWorkerSet")))
    for port in (6379, 6380, 29500, 52365):
        assert reaches(objects, leader, member, port)
        assert reaches(objects, member, leader, port)
    (gateway,) = [as_peer(pod) for pod in pods(objects) if pod.component == "gateway"]
    assert reaches(objects, gateway, leader, 7100)
    assert not reaches(objects, gateway, member, 7100)
    assert not reaches(objects, gateway, leader, 6379)
