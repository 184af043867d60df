"""Every value of the chart with another one, and what else must be said for it to have an effect."""

from __future__ import annotations

from typing import Any

from tests.deploy.charts import Values, defaults, leaves, merged

TLS_SECRETS = {kind: f"own-{kind}" for kind in ("control", "gateway", "worker", "operator", "viewer")}
OWN_TLS: Values = {"tls": {"enabled": True, "secrets": TLS_SECRETS}}
CERT_MANAGER: Values = {"tls": {"enabled": True, "certManager": {"enabled": True}}}
OUTSIDE_STORE: Values = {"valkey": {"enabled": False}, "redis": {"url": "redis://store.example:6379/0"}}
SCALED: Values = {"workerDefaults": {"autoscaling": {"enabled": True}}}
GROUPED: Values = {"workerDefaults": {"multiNode": {"size": 4}, "gpu": {"count": 8}}}
GROUPED_WITH_DISKS: Values = merged(GROUPED, {"workerDefaults": {"modelCache": {"persistent": True, "size": "80Gi"}}})
POLICY: Values = {"policy": {"fields": {"batch": {"active": 16}}}}
ALL_MONITORING: Values = {
    "monitoring": {name: {"enabled": True} for name in ("serviceMonitor", "prometheusRule", "dashboards")}
}

ALONGSIDE: dict[str, Values] = {
    "tls.enabled": OWN_TLS,
    "tls.secrets.viewer": merged(OWN_TLS, SCALED),
    "tls.secrets": OWN_TLS,
    "tls.certManager": CERT_MANAGER,
    "tls.certManager.issuerRef.kind": merged(
        CERT_MANAGER, {"tls": {"certManager": {"issuerRef": {"name": "company"}}}}
    ),
    "tls.certManager.issuerRef.group": merged(
        CERT_MANAGER, {"tls": {"certManager": {"issuerRef": {"name": "company"}}}}
    ),
    "valkey.enabled": OUTSIDE_STORE,
    "redis": {"valkey": {"enabled": False}, "redis": {"url": "redis://other.example:6379/0"}},
    "networkPolicy.redisPorts": OUTSIDE_STORE,
    "networkPolicy.keda": SCALED,
    "workerDefaults.gpu.resource": {"workerDefaults": {"gpu": {"count": 1}}},
    "workerDefaults.multiNode": GROUPED,
    "workerDefaults.modelCache.storageClass": {"workerDefaults": {"modelCache": {"persistent": True}}},
    "workerDefaults.autoscaling": SCALED,
    "gateway.autoscaling": {"gateway": {"autoscaling": {"enabled": True}}},
    "gateway.keys.generate": {"gateway": {"settings": {"client_certs": True}}, **OWN_TLS},
    "gateway.service.loadBalancerClass": {"gateway": {"service": {"type": "LoadBalancer"}}},
    "control.access.key": {"control": {"access": {"existingSecret": "access"}}},
    "redis.key": {"valkey": {"enabled": False}, "redis": {"existingSecret": "store"}},
    "redis.passwordKey": merged(OUTSIDE_STORE, {"redis": {"passwordSecret": "store"}}),
    "verbs.token.key": {"verbs": {"token": {"existingSecret": "token"}}},
    "verbs.apiKey.key": {"verbs": {"apiKey": {"existingSecret": "key"}}},
    "monitoring": ALL_MONITORING,
}
"""By path or the beginning of one; the longest counts."""

OTHER: dict[str, Any] = {
    "image.pullPolicy": "Always",
    "image.digest": "sha256:" + "0" * 64,
    "image.repository": "mirror.example/trimtab",
    "workerDefaults.image.digest": "sha256:" + "1" * 64,
    "valkey.image.digest": "sha256:" + "2" * 64,
    "nameOverride": "mesh",
    "fullnameOverride": "mesh",
    "imagePullSecrets": [{"name": "pull"}],
    "gateway.service.type": "LoadBalancer",
    "tls.certManager.issuerRef.name": "company",
    "tls.certManager.issuerRef.kind": "ClusterIssuer",
    "tls.certManager.issuerRef.group": "issuers.example",
    "tls.certManager.duration": "48h",
    "tls.certManager.renewBefore": "24h",
    "tls.certManager.gatewayHosts": ["llm.example"],
    "redis.url": "rediss://store.example:6380/0",
    "redis.existingSecret": "store",
    "policy": {"fields": {"batch": {"active": 16}}},
    "monitoring.serviceMonitor.interval": "30s",
    "monitoring.prometheusRule.runbooks": "https://git.example/trimtab",
    "networkPolicy.redisPorts": [6380],
    "networkPolicy.dnsPorts": [1053],
    "workerDefaults.gpu.resource": "nvidia.com/mig-3g.40gb",
    "workerDefaults.multiNode.size": 2,
    "workerDefaults.resources.limits.cpu": "8",
    "gateway.settings.drain_s": 90,
    "workerDefaults.settings.drain_s": 90,
    "workerDefaults.runtimeClassName": "nvidia",
    "workerDefaults.startupSeconds": 60,
    "pools.default": {"replicas": 3},
}
LISTS: dict[str, Any] = {
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "extraEnv": [{"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://collector.example:4317"}],
    "extraVolumes": [{"name": "more", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "models", "mountPath": "/more"}],
    "topologySpread": ["rack"],
}
PEERS = [{"podSelector": {"matchLabels": {"app": "other"}}}]
EGRESS = [{"ports": [{"protocol": "TCP", "port": 4317}]}]


def other(path: str, value: Any) -> Any:
    """Another value of the same kind, which the schema takes."""
    name = path.rpartition(".")[2]
    if path in OTHER:
        return OTHER[path]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if name in LISTS:
        return LISTS[name]
    if path.startswith("networkPolicy.extraEgress"):
        return EGRESS
    if isinstance(value, list):
        return PEERS
    if name == "affinity":
        return {"podAffinity": {}}
    if isinstance(value, dict):
        return {"more": "said"}
    if name in ("cpu", "memory", "size", "sharedMemory"):
        return "3" if name == "cpu" else "7Gi"
    return "other-one"


def alongside(path: str) -> Values:
    known = [start for start in ALONGSIDE if path == start or path.startswith(start + ".")]
    return ALONGSIDE[max(known, key=len)] if known else {}


def all_flips() -> dict[str, tuple[Values, Values]]:
    """By path: the values without the flip, and with it."""
    result = {}
    for where, value in leaves(defaults()):
        path = ".".join(where)
        before = merged(defaults(), alongside(path))
        here: Any = before
        for key in where[:-1]:
            here = here[key]
        after = merged(before)
        target: Any = after
        for key in where[:-1]:
            target = target[key]
        # What had to be said alongside may be the flip itself.
        target[where[-1]] = other(path, value)
        if target[where[-1]] == here[where[-1]]:
            before = defaults()
        result[path] = (before, after)
    return result
