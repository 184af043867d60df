"""A process's metrics as scrapers get them, whatever they ask for."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily

from trimtab.kit.process import free_port
from trimtab.kit.scrape import serve_metrics

OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


class Stock:
    def collect(self):
        yield GaugeMetricFamily("vllm:num_requests_running", "as stock pickers read it", value=3)


@pytest.fixture
def address():
    registry = CollectorRegistry()
    registry.register(Stock())
    address = f"127.0.0.1:{free_port()}"
    server = serve_metrics(address, registry)
    yield address
    server.shutdown()
    server.server_close()


@pytest.mark.slow
@pytest.mark.parametrize("accept", ["", OPENMETRICS, "text/plain"])
def test_a_name_keeps_its_colon_whatever_format_is_asked_for(address, accept):
    request = urllib.request.Request(f"http://{address}/metrics", headers={"Accept": accept} if accept else {})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert b"\nvllm:num_requests_running 3.0\n" in answer.read()


def test_what_is_no_scrape_is_refused(address):
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"http://{address}/metrics", data=b"x", timeout=10)
    assert caught.value.code == 405


def test_a_taken_port_is_an_error(address):
    with pytest.raises(OSError):
        serve_metrics(address, CollectorRegistry())
