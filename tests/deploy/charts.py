"""The chart, rendered: what tests of it share. No cluster is asked; secrets that the chart draws at random are drawn anew each time."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from helm_python import Chart, disable_logging

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "trimtab"
SCENARIOS = ("realtime", "throughput", "longcontext")
VERSIONS = ("1.33", "1.37")
"""Of Kubernetes: the oldest and the newest of which kubernetes-validate has the schemas."""
RELEASES = ("trimtab", "9.lives", "a", "x" * 53, "prod-trimtab.eu-1", "123", "true", "0x1f")
"""Names that Helm takes for a release: the usual one, and such as a Service can't have, or has no room for."""
CUSTOM = ("keda.sh", "monitoring.coreos.com", "cert-manager.io", "leaderworkerset.x-k8s.io")
"""API groups that others' controllers bring: there is no schema of them here."""

Values = dict[str, Any]
Object = dict[str, Any]

disable_logging()
_chart = Chart.load(CHART)


def scenario(name: str) -> Values:
    said: Values = yaml.safe_load((CHART / f"values-{name}.yaml").read_text())
    return said


def defaults() -> Values:
    return copy.deepcopy(_defaults())


@functools.cache
def _defaults() -> Values:
    said: Values = yaml.load((CHART / "values.yaml").read_text(), Loader=yaml.CSafeLoader)
    return said


def merged(*all_values: Mapping[str, Any]) -> Values:
    """As Helm lays values files over each other; null stays, since the chart is what it takes a key from."""
    result: Values = {}
    for values in all_values:
        for key, value in values.items():
            if isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
                result[key] = merged(result[key], value)
            else:
                result[key] = copy.deepcopy(value)
    return result


def texts(values: Values | None = None, *, release: str = "trimtab", namespace: str = "llm") -> dict[str, str]:
    """By template. HelmError where the values are refused."""
    return _chart.render(values or {}, name=release, namespace=namespace)


def render(values: Values | None = None, *, release: str = "trimtab", namespace: str = "llm") -> list[Object]:
    return [
        each
        for name, text in texts(values, release=release, namespace=namespace).items()
        if name.endswith(".yaml")
        for each in parsed(text)
    ]


def parsed(text: str) -> list[Object]:
    """The objects of a template's text."""
    return [each for each in yaml.load_all(text, Loader=yaml.CSafeLoader) if each]


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [each for each in objects if each["kind"] in kinds]


def named(each: Object) -> str:
    name: str = each["metadata"]["name"]
    return name


def only(objects: list[Object], kind: str, part: str) -> Object:
    """The one of that kind whose name ends so."""
    (found,) = [each for each in of_kind(objects, kind) if named(each).endswith(f"-{part}")]
    return found


@dataclass(frozen=True)
class Pods:
    """What makes pods, and their template."""

    owner: str
    component: str
    labels: Mapping[str, str]
    spec: Object

    @property
    def containers(self) -> list[Object]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def serves(self) -> bool:
        """For as long as it may: no job and no test."""
        return bool(self.spec.get("restartPolicy", "Always") == "Always")


def pods(objects: list[Object]) -> Iterator[Pods]:
    for each in objects:
        spec, kind = each.get("spec", {}), each["kind"]
        if kind == "Pod":
            templates = [each]
        elif kind in ("Deployment", "StatefulSet", "Job"):
            templates = [spec["template"]]
        elif kind == "LeaderWorkerSet":
            templates = [spec["leaderWorkerTemplate"][key] for key in ("leaderTemplate", "workerTemplate")]
        else:
            continue
        for template in templates:
            labels = template["metadata"]["labels"]
            yield Pods(f"{kind}/{named(each)}", labels["app.kubernetes.io/component"], labels, template["spec"])


def variables(container: Object) -> dict[str, str]:
    """Those that are said outright."""
    return {each["name"]: each["value"] for each in container.get("env", []) if "value" in each}


_valid: set[tuple[str, str]] = set()


def schema_fault(each: Object, version: str) -> str | None:
    """What Kubernetes' own schema says against an object, unknown fields too. None where there is nothing, or no schema of that kind."""
    if each["apiVersion"].split("/")[0] in CUSTOM:
        return None
    seen = (version, json.dumps(each, sort_keys=True))
    if seen in _valid:
        return None
    try:
        kubernetes_validate.validate(each, version, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as e:
        return f"{each['kind']}/{named(each)}: {e.message}"
    _valid.add(seen)
    return None


def leaves(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value that is no non-empty map, with its path."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def at(path: tuple[str, ...], value: Any) -> Values:
    for key in reversed(path):
        value = {key: value}
    result: Values = value
    return result
