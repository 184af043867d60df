"""What the chart takes for values: each has an effect, each wrong one is refused, and the settings among them are the processes' own."""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import re
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import HelmError

from controlplane import spec_file
from controlplane.settings import ControlSettings
from services.gateway import key_file
from services.gateway.settings import GatewaySettings
from services.worker.settings import WorkerSettings
from tests.certificates import Authority
from tests.deploy import charts, flips
from tests.deploy.charts import CHART, SCENARIOS, VERSIONS, Values, merged, of_kind, pods
from trimtab.kit.config import _unwrap, load
from trimtab_cli.config import OTHER_VARIABLES

SECTIONS: dict[str, type] = {"control": ControlSettings, "gateway": GatewaySettings, "worker": WorkerSettings}
TLS = {"tls_ca", "tls_cert", "tls_key", "insecure", "parent_pid", "mesh", "listen"}
FROM_THE_CLUSTER = {
    "control": TLS | {"metrics", "redis", "redis_password", "replica_id", "advertise", "access"},
    "gateway": TLS | {"node_id", "http", "metrics", "control", "keys", "process", "siblings"},
    "worker": TLS | {"node_id", "pool", "metrics", "control", "advertise"},
}
"""Settings that are no values: the chart knows them."""
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
FLIPS = flips.all_flips()
DRAWN = re.compile(r"(?m)^(  (?:api-key|password|keys\.yaml|key|other-one): ).*$")
JSON_TYPES = {int: {"integer"}, float: {"number"}, str: {"string", "object", None}, bool: {"boolean"}, tuple: {"array"}}
"""None: an enumeration of words. An object is given to the process as JSON."""


@functools.cache
def rendered(values: str) -> dict[str, str]:
    """What is rendered by values in JSON, but for what is drawn at random."""
    return {name: DRAWN.sub(r"\1drawn", text) for name, text in charts.texts(json.loads(values)).items()}


@pytest.mark.slow
@pytest.mark.parametrize("path", FLIPS)
def test_every_value_has_an_effect_that_kubernetes_takes(path: str) -> None:
    before, after = (rendered(json.dumps(values)) for values in FLIPS[path])
    assert before != after
    changed = [text for name, text in after.items() if text != before.get(name) and name.endswith(".yaml")]
    faults = [charts.schema_fault(each, VERSIONS[-1]) for text in changed for each in charts.parsed(text)]
    assert [fault for fault in faults if fault] == []


WRONG: dict[str, Values] = {
    "a key that is not known": {"gatway": {}},
    "a key that is not known, deeper": {"gateway": {"replica": 3}},
    "a setting that there is not": {"workerDefaults": {"settings": {"max_seqs": 3}}},
    "a setting that is the chart's": {"workerDefaults": {"settings": {"node_id": "w0"}}},
    "a setting of another process": {"gateway": {"settings": {"max_num_seqs": 3}}},
    "a setting of the wrong type": {"workerDefaults": {"settings": {"max_num_seqs": "many"}}},
    "a word that is none of those": {"gateway": {"settings": {"default_workload": "urgent"}}},
    "no drain to measure the grace period by": {"workerDefaults": {"settings": {"drain_s": None}}},
    "a pool's unknown key": {"pools": {"default": {"gpus": 2}}},
    "a pool's unknown setting": {"pools": {"default": {"settings": {"modell": "x"}}}},
    "a pool with a name that is no label": {"pools": {"Fast_GPU": {}}},
    "a pool with a name that is too long": {"pools": {"p" * 21: {}}},
    "no pool at all": {"pools": {"default": None}},
    "root": {"podSecurity": {"runAsUser": 0}},
    "no control plane": {"control": {"replicas": 0}},
    "a count that is none": {"control": {"replicas": "two"}},
    "resources without bounds": {"gateway": {"resources": {"limits": None}}},
    "a bound without memory": {"control": {"resources": {"limits": {"memory": None}}}},
    "a pool without bounds": {"pools": {"default": {"resources": {"limits": None}}}},
    "a pool that takes the drain away": {"pools": {"default": {"settings": {"drain_s": None}}}},
    "an amount that is none": {"workerDefaults": {"sharedMemory": "lots"}},
    "a setting in disguise": {"gateway": {"extraEnv": [{"name": "TRIMTAB_GATEWAY_LISTEN", "value": "x"}]}},
    "a digest that is none": {"image": {"digest": "latest"}},
    "a kind of service that there is not": {"gateway": {"service": {"type": "ExternalName"}}},
    "a store of another make": {"valkey": {"enabled": False}, "redis": {"url": "postgres://db"}},
    "a name server at no port": {"networkPolicy": {"dnsPorts": ["dns"]}},
    "a mesh whose name is no DNS label": {"mesh": "My_Mesh"},
    "an interval without a unit": {"monitoring": {"serviceMonitor": {"interval": "10"}}},
    "a policy with an unknown part": {"policy": {"feilds": {}}},
    "the name that metrics have for those without": {"gateway": {"keys": {"tenant": "other"}}},
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_values_are_refused(what: str) -> None:
    with pytest.raises(HelmError):
        charts.texts(WRONG[what])


def test_a_key_that_the_schema_has_is_a_key_of_the_values_file_and_the_other_way_round() -> None:
    def check(schema: Any, said: Any, path: str) -> None:
        if "$ref" in schema:
            schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
        schema = next((check_in(part) for part in schema.get("allOf", []) if "$ref" in part), schema)
        if path in ("", "workerDefaults") or (
            isinstance(said, dict) and said and "properties" in schema and not path.endswith("settings")
        ):
            known = set(schema["properties"]) - ({"global"} if not path else set())
            assert known == set(said) or path.endswith(("requests", "limits")), path
            for key in known:
                check(schema["properties"][key], said[key], f"{path}.{key}".lstrip("."))

    def check_in(part: Any) -> Any:
        return SCHEMA["definitions"][part["$ref"].rpartition("/")[2]]

    check(SCHEMA, {k: v for k, v in charts.defaults().items() if k != "policy"} | {"policy": {}}, "")


def test_no_object_of_the_schema_takes_keys_that_it_does_not_name() -> None:
    def closed(schema: Any, path: str) -> None:
        if "properties" in schema and "allOf" not in path:
            assert "additionalProperties" in schema, path
        for key, inner in schema.items():
            if isinstance(inner, dict):
                closed(inner, f"{path}/{key}")

    closed({key: value for key, value in SCHEMA.items() if key != "required"}, "")


@pytest.mark.parametrize("section", SECTIONS)
def test_the_schema_knows_the_settings_of_each_process_by_name_and_type(section: str) -> None:
    known = SCHEMA["definitions"][f"{section}Settings"]["properties"]
    hints = typing.get_type_hints(SECTIONS[section])
    names = {f.name for f in dataclasses.fields(SECTIONS[section])}
    assert set(known) == names - FROM_THE_CLUSTER[section]
    assert names >= FROM_THE_CLUSTER[section]
    for name, schema in known.items():
        kind, _ = _unwrap(hints[name])
        kind = typing.get_origin(kind) or kind
        assert schema.get("type") in JSON_TYPES[kind] | ({"integer"} if kind is float else set()), name


SETTINGS_CASES: dict[str, Values] = {
    "default": {},
    **{name: charts.scenario(name) for name in SCENARIOS},
    "tls": flips.OWN_TLS,
    "a group": flips.GROUPED,
    "odd values": {
        "gateway": {"settings": {"max_body_bytes": 12_582_912, "workers": ["w.example:7100"], "batch_deadline_s": 1e6}},
        "workerDefaults": {
            "settings": {
                "labels": ["gpu=h200", "rack=7"],
                "chat_args": ["enable_thinking=false"],
                "engine_args": {"enable_prefix_caching": True, "seed": 7, "revision": 'a"b'},
                "compiled": True,
            }
        },
        "control": {"settings": {"alert_webhook": "https://hooks.example/x?a=1&b=2", "forget_s": 0.5}},
    },
}


def files(objects: list[charts.Object], where: Path) -> dict[str, Path]:
    """What pods find under /etc/trimtab: certificates of a real authority, and what the release's Secrets and ConfigMaps hold."""
    where.mkdir(exist_ok=True)
    authority = Authority(where)
    result = {}
    for kind in SECTIONS:
        tls = authority.issue(kind, "*")
        result |= {f"{kind} ca.crt": tls.ca, f"{kind} tls.crt": tls.cert, f"{kind} tls.key": tls.key}
    for secret in of_kind(objects, "Secret"):
        if "keys.yaml" in secret["data"]:
            (where / "keys.yaml").write_bytes(base64.b64decode(secret["data"]["keys.yaml"]))
    return result


@pytest.mark.parametrize("case", SETTINGS_CASES)
def test_every_variable_of_ours_is_a_setting_of_that_process_with_a_value_that_it_takes(
    case: str, tmp_path: Path
) -> None:
    objects = charts.render(SETTINGS_CASES[case])
    there = files(objects, tmp_path)
    found = {}
    for pod in pods(objects):
        for container in pod.containers:
            said = {k: v for k, v in charts.variables(container).items() if k.startswith("TRIMTAB_")}
            if pod.component not in SECTIONS:
                assert set(said) <= set(OTHER_VARIABLES), pod.owner
                continue
            others = {name for name in said if not name.startswith(f"TRIMTAB_{pod.component.upper()}_")}
            assert others <= set(OTHER_VARIABLES), pod.owner
            env = {}
            for name, value in said.items():
                value = value.replace("$(POD_IP)", "10.0.0.7").replace("$(POD_NAME)", "w-0")
                value = value.replace("/etc/trimtab/keys", str(tmp_path))
                for file in ("ca.crt", "tls.crt", "tls.key"):
                    if value == f"/etc/trimtab/tls/{file}":
                        value = str(there[f"{pod.component} {file}"])
                env[name] = value
            found[pod.component] = load(SECTIONS[pod.component], pod.component, env=env)
    assert set(found) == set(SECTIONS)
    if case == "odd values":
        gateway, worker, control = found["gateway"], found["worker"], found["control"]
        assert gateway.max_body_bytes == 12_582_912
        assert gateway.workers == ("w.example:7100",)
        assert worker.labels == ("gpu=h200", "rack=7")
        assert json.loads(worker.engine_args) == {"enable_prefix_caching": True, "seed": 7, "revision": 'a"b'}
        assert control.alert_webhook == "https://hooks.example/x?a=1&b=2"
        assert control.forget_s == 0.5


def test_what_workers_listen_on_is_what_gateways_can_dial() -> None:
    for pod in pods(charts.render()):
        said = charts.variables(pod.containers[0])
        if pod.component == "worker":
            assert said["TRIMTAB_WORKER_LISTEN"] == "$(POD_IP):7100"
        if pod.component == "control":
            assert said["TRIMTAB_CONTROL_ADVERTISE"] == "$(POD_IP):7071"


def test_the_generated_key_is_the_one_that_the_key_file_lets_in_and_pods_do_not_get_it() -> None:
    objects = charts.render({"gateway": {"keys": {"tenant": "acme"}}})
    data = {k: base64.b64decode(v).decode() for k, v in charts.only(objects, "Secret", "keys")["data"].items()}
    known = key_file.parse(data["keys.yaml"])
    assert known.by_key[key_file.digest(data["api-key"])].name == "acme"
    assert len(data["api-key"]) >= 43
    (gateway,) = [pod for pod in pods(objects) if pod.component == "gateway"]
    (volume,) = [v for v in gateway.spec["volumes"] if v["name"] == "keys"]
    assert volume["secret"]["items"] == [{"key": "keys.yaml", "path": "keys.yaml"}]


def test_a_gateway_that_anybody_could_use_is_refused() -> None:
    with pytest.raises(HelmError, match=r"gateway\.keys"):
        charts.texts({"gateway": {"keys": {"generate": False}}})


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenarios_policy_is_one_that_the_control_plane_takes(name: str) -> None:
    objects = charts.render(charts.scenario(name))
    said = spec_file.read(charts.only(objects, "ConfigMap", "policy")["data"]["policy.yaml"])
    assert said.expect_version is None
    assert len(said.spec.base) >= 5
    text = (CHART / f"values-{name}.yaml").read_text()
    assert "# Trades: " in text
    assert "never run" in text


def test_the_realtime_scenario_promises_500_ms_and_keeps_15_percent() -> None:
    base = charts.scenario("realtime")["policy"]["fields"]
    assert base["objectives"]["ttft_p99_ms"] == 500
    assert base["memory"]["reserve_high_priority"] == 0.15


def test_a_scenarios_pools_are_in_place_of_the_default_one() -> None:
    for name in SCENARIOS:
        objects = charts.render(charts.scenario(name))
        pools = {pod.labels["trimtab/pool"] for pod in pods(objects) if pod.component == "worker"}
        assert len(pools) == 1
        assert "default" not in pools


def test_rules_and_boards_in_the_chart_are_those_of_the_repository() -> None:
    objects = charts.render(flips.ALL_MONITORING)
    (rule,) = of_kind(objects, "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((charts.ROOT / "deploy/prometheus/trimtab.rules.yml").read_text())
    boards = [each for each in of_kind(objects, "ConfigMap") if "board-" in charts.named(each)]
    shown = {name: text for each in boards for name, text in each["data"].items()}
    assert shown == {path.name: path.read_text() for path in (charts.ROOT / "deploy/grafana").glob("*.json")}
    assert len(shown) == 5
    assert {each["metadata"]["labels"]["grafana_dashboard"] for each in boards} == {"1"}


def test_scrapes_have_the_labels_that_rules_and_boards_go_by() -> None:
    objects = charts.render(merged(flips.ALL_MONITORING, {"mesh": "prod", "pools": {"slow": {}}}))
    found = set()
    for monitor in of_kind(objects, "ServiceMonitor"):
        (endpoint,) = monitor["spec"]["endpoints"]
        labels = {each["targetLabel"]: each["replacement"] for each in endpoint["relabelings"]}
        assert labels["mesh"] == "prod"
        found.add((labels["job"], labels.get("pool")))
        found_by = [
            each
            for each in of_kind(objects, "Service")
            if monitor["spec"]["selector"]["matchLabels"].items() <= each["metadata"]["labels"].items()
            and endpoint["port"] in {port["name"] for port in each["spec"]["ports"]}
        ]
        assert len(found_by) == 1, "a pod that is found by two Services is scraped twice"
    assert found == {
        ("trimtab-gateway", None),
        ("trimtab-control", None),
        ("trimtab-worker", "default"),
        ("trimtab-worker", "slow"),
    }


def test_no_service_that_may_be_a_load_balancer_shows_metrics() -> None:
    """They have tenants' names."""
    objects = charts.render({"gateway": {"service": {"type": "LoadBalancer"}}})
    public = [each for each in of_kind(objects, "Service") if each["spec"].get("type") == "LoadBalancer"]
    assert [{port["name"] for port in each["spec"]["ports"]} for each in public] == [{"grpc", "http"}]
    (gateway,) = [pod for pod in pods(objects) if pod.component == "gateway"]
    assert charts.variables(gateway.containers[0])["TRIMTAB_GATEWAY_METRICS"] == "0.0.0.0:7081"


def test_runbooks_lead_to_where_the_values_say() -> None:
    base = "https://git.example/trimtab/blob/main/"
    values = merged(flips.ALL_MONITORING, {"monitoring": {"prometheusRule": {"runbooks": base}}})
    (rule,) = of_kind(charts.render(values), "PrometheusRule")
    urls = [r["annotations"]["runbook_url"] for group in rule["spec"]["groups"] for r in group["rules"] if "alert" in r]
    assert urls
    assert all(url.startswith(f"{base}docs/operations.md#") for url in urls)


def test_the_values_files_are_tidy() -> None:
    from yamllint import linter
    from yamllint.config import YamlLintConfig

    rules = YamlLintConfig(
        "extends: default\nrules: {document-start: disable, line-length: {max: 160}, braces: disable}"
    )
    for path in [*CHART.glob("values*.yaml"), CHART / "Chart.yaml"]:
        faults = [f"{path.name}:{p.line} {p.desc}" for p in linter.run(path.read_text(), rules)]
        assert faults == []


def test_the_values_that_the_document_shows_are_good_ones_and_make_what_it_names() -> None:
    text = (charts.ROOT / "docs" / "install-kubernetes.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    values = yaml.safe_load(block.replace("sha256:…", "sha256:" + "0" * 64))
    objects = charts.render(values)
    names = {charts.named(each) for each in objects}
    told = set(re.findall(r"statefulset/([\w-]+)", text))
    assert told
    assert told <= names
    assert [fault for each in objects if (fault := charts.schema_fault(each, VERSIONS[-1]))] == []
    (chat,) = [pod for pod in pods(objects) if pod.component == "worker"]
    assert chat.containers[0]["image"] == "registry.example/trimtab:0.1.0-gpu"
    assert {"name": "models", "persistentVolumeClaim": {"claimName": "models"}} in chat.spec["volumes"]
    assert chat.containers[0]["resources"]["limits"] == {"cpu": "16", "memory": "64Gi", "nvidia.com/gpu": 2}
    egress = charts.only(objects, "NetworkPolicy", "control")["spec"]["egress"]
    assert {"ports": [{"protocol": "TCP", "port": 6380}]} in egress
    known = {".".join(path[:n]) for path, _ in charts.leaves(charts.defaults()) for n in range(1, len(path) + 1)}
    known |= {name.removeprefix("workerDefaults.") for name in known}
    known |= {f"workerDefaults.settings.{n}" for n in SCHEMA["definitions"]["workerSettings"]["properties"]}
    for part in ("gateway", "control"):
        known |= {f"{part}.settings.{n}" for n in SCHEMA["definitions"][f"{part}Settings"]["properties"]}
    parts = r"(?:tls|gateway|control|valkey|redis|networkPolicy|monitoring|verbs|multiNode|numa|image)"
    named = set(re.findall(rf"`({parts}\.[\w.]+)`", text)) - {"tls.crt", "tls.key"}
    assert named <= known
    assert len(named) > 15
