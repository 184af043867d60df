"""A process's Prometheus endpoint. Always in the plain text format: in OpenMetrics, which newer scrapers ask for first, the client library
writes a colon in a name as an underscore, and `vllm:num_requests_running` would not be found by those who look for it.
"""

from __future__ import annotations

import threading
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """A scrape each few seconds is no news."""


def serve_metrics(address: str, registry: CollectorRegistry) -> WSGIServer:
    """Serves /metrics (and any other path) on "host:port" from a thread of its own; `server_port` says which, `shutdown` ends it. OSError
    when the address is taken."""
    host, port = address.rsplit(":", 1)

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            start_response("405 Method Not Allowed", [("Allow", "GET, HEAD")])
            return [b""]
        text = generate_latest(registry)
        start_response("200 OK", [("Content-Type", CONTENT_TYPE_PLAIN_0_0_4), ("Content-Length", str(len(text)))])
        return [text if environ["REQUEST_METHOD"] == "GET" else b""]

    server = make_server(host, int(port), app, _Server, handler_class=_Silent)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server
