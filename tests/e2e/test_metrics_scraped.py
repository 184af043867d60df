"""Every metric, label and word that boards and rules go by is there in a mesh that serves: scraped from its processes, as Prometheus would."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import aclosing
from typing import TypeVar

import httpx
import pytest
from prometheus_client import parser as plain
from prometheus_client.openmetrics import parser as openmetrics

from tests.docs.expressions import ROOT, board_expressions, grouped_by, rules, selectors
from tests.e2e.mesh import APPLIED, Mesh, environment, up
from trimtab.client import Client
from trimtab.errors import QueueFull
from trimtab.messages import Delta, Request, Sampling, Workload

pytestmark = pytest.mark.slow

T = TypeVar("T")
BY_PROMETHEUS = {"up": {"job"}, "ALERTS": {"alertname", "alertstate", "product"}}
"""Series that it makes itself, and their labels."""
BY_SCRAPING = {"mesh", "pool", "instance", "job"}
"""Labels that it puts on all that it reads: deploy/prometheus/scrape.yml."""
NEEDS_A_FAULT = {
    "trimtab_gateway_breaker_trips_total": "a worker that fails or hangs",
    "trimtab_gateway_denied_total": "a gateway that wants keys, and a caller without one",
    "trimtab_gateway_resumes_total": "a worker that dies under its streams",
    "trimtab_control_breaker_trips_total": "a gateway that opened a breaker",
    "trimtab_control_denied_total": "an access file, and a caller who is not in it",
    "trimtab_control_decisions_total": "a mesh that gives a controller cause",
    "trimtab_control_adjustments": "the same",
    "trimtab_control_alerts": "the same",
    "trimtab_control_desired_workers": "a policy that lets a pool grow, and a controller that has decided how far",
}
"""Declared from the start, and without a sample in a mesh that is well; and what it takes."""
NEEDS_TWO = {"trimtab_gateway_processes_up": "a gateway of more than one process"}
"""Not declared where there is one of each; tests/gateway/test_processes.py scrapes it where there are two."""
WORDS_OF_FAULTS = {("outcome", "engine_fault")}
PROMETHEUS = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"}
HOT, COLD = "hello", "a trim tab turns the rudder " * 2000


class Scraped:
    """All that the mesh's processes expose: names as they are declared, and what is known of each label."""

    def __init__(self, answers: Iterable[httpx.Response]) -> None:
        self.names: set[str] = set()
        self.words: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self.sampled: set[str] = set()
        for answer in answers:
            new = answer.headers["content-type"].startswith("application/openmetrics-text")
            for family in (openmetrics if new else plain).text_string_to_metric_families(answer.text):
                ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
                self.names |= {family.name + end for end in ends}
                for sample in family.samples:
                    self.sampled.add(sample.name)
                    for label, word in sample.labels.items():
                        self.words[sample.name][label].add(word)


def expressions() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "deploy" / "grafana").glob("*.json")):
        yield from board_expressions(json.loads(path.read_text()))
    for rule in rules():
        yield rule.get("alert") or rule["record"], rule["expr"]


async def traffic(gateway: str) -> None:
    """Both workloads, short prompts and long ones, some side by side; all of them end well."""
    async with Client(gateway) as client:
        requests = [
            Request("", "simulated", prompt, Sampling(max_tokens=8), workload, session_id="talk")
            for workload in Workload
            for prompt in (HOT, HOT, COLD)
        ]
        answers = await asyncio.gather(*(client.complete(r, timeout_s=60) for r in requests))
        assert [finish.usage.completion_tokens for _, finish in answers] == [8] * len(requests)


async def while_it_streams(gateway: str, then: Callable[[], T]) -> T:
    """What there is to see only while something runs."""
    async with Client(gateway) as client:
        request = Request("", "simulated", HOT, Sampling(max_tokens=50_000, ignore_eos=True), Workload.BATCH)
        async with aclosing(client.generate(request, timeout_s=60)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    return await asyncio.to_thread(then)
    raise AssertionError("no token came")


async def refused(gateway: str) -> None:
    async with Client(gateway) as client:
        with pytest.raises(QueueFull):
            await client.complete(Request("", "simulated", HOT, Sampling(max_tokens=8), Workload.BATCH), timeout_s=60)


def scrape(mesh: Mesh, http: str) -> list[httpx.Response]:
    """The gateway's, the control plane's, the worker's; asked for as Prometheus asks, which is answered in another format than a browser is."""
    urls = [http, f"http://{mesh.env['TRIMTAB_CONTROL_METRICS']}", f"http://{mesh.env['TRIMTAB_WORKER_METRICS']}"]
    return [httpx.get(f"{url}/metrics", headers=PROMETHEUS, timeout=30).raise_for_status() for url in urls]


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    env = environment(tmp_path_factory.mktemp("state"))
    with up(env, "--no-prompt") as mesh:
        ready = mesh.until("ready")
        mesh.joined("w0")
        asyncio.run(traffic(ready["gateway"]))
        running = asyncio.run(while_it_streams(ready["gateway"], lambda: scrape(mesh, ready["http"])))
        shed = mesh.verb("policy", "set", "admission.shed=batch", "--reason", "to see it", *APPLIED)
        assert shed.returncode == 0, shed.stderr
        asyncio.run(refused(ready["gateway"]))
        yield Scraped([*running, *scrape(mesh, ready["http"])])


@pytest.mark.slow
def test_every_name_in_boards_and_rules_is_there(scraped: Scraped) -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    missing = {
        s.name: where
        for where, expr in expressions()
        for s in selectors(expr)
        if s.name not in scraped.names | recorded | set(BY_PROMETHEUS)
    }
    assert missing == {}


def test_every_name_has_samples_but_where_it_takes_a_fault(scraped: Scraped) -> None:
    named = {s.name for _, expr in expressions() for s in selectors(expr)} & scraped.names
    assert len(named) > 40, "the expressions were read"
    assert named - scraped.sampled - set(NEEDS_A_FAULT) == set()


def test_every_label_that_is_matched_or_kept_is_there(scraped: Scraped) -> None:
    missing = []
    for where, expr in expressions():
        found = [s for s in selectors(expr) if s.name in scraped.sampled]
        for s in found:
            words = scraped.words[s.name]
            for label, operator, word in s.matchers:
                if label in BY_SCRAPING:
                    continue
                if label not in words:
                    missing.append((where, s.name, label))
                elif operator == "=" and word not in words[label] and (label, word) not in WORDS_OF_FAULTS:
                    missing.append((where, s.name, f"{label}={word}"))
        if found and len(found) == len(selectors(expr)):
            known = set().union(*(scraped.words[s.name] for s in found)) | BY_SCRAPING
            missing += [(where, "", label) for label in grouped_by(expr) - known]
    assert missing == []


@pytest.mark.slow
def test_the_document_of_metrics_names_them_as_they_are(scraped: Scraped) -> None:
    text = (ROOT / "docs" / "observability.md").read_text()
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    named = {s.name for line in text.splitlines() if line.startswith("| `") for s in selectors(line.split("`")[1])}
    assert len(named) > 40
    assert named - scraped.names - recorded - set(NEEDS_TWO) == set()
