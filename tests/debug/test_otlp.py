"""Events of a job as OTLP log records, by OpenTelemetry's own SDK, at a collector of the test's."""

from __future__ import annotations

import gzip
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.report.news import Events
from distsim.errors import UsageError
from tests.debug.builders import all_reduce, fail, play
from tests.debug.faults import odd

REPORT = {"exit_code": 1, "job": "j1", "world_size": 4}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, bytes]]]:
    """What an HTTP server at OTEL_EXPORTER_OTLP_ENDPOINT receives: path and body."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    received: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, gzip.decompress(body) if self.headers.get("Content-Encoding") else body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield received
    server.shutdown()
    thread.join()
    server.server_close()


def records(received: list[tuple[str, bytes]]) -> list[Any]:
    """The log records of all requests."""
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

    every = []
    for path, body in received:
        assert path == "/v1/logs"
        request = ExportLogsServiceRequest()
        request.ParseFromString(body)
        for resource in request.resource_logs:
            names = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
            assert names["service.name"] == "distsim"
            every += [record for scope in resource.scope_logs for record in scope.log_records]
    return every


def test_a_verdict_and_the_end_are_log_records(collector: list[tuple[str, bytes]]) -> None:
    """With the explanation as body, severity ERROR, the ranks and the kind; the whole line is an attribute."""
    diagnoses = diagnose(play(4, odd([all_reduce(10)], [fail("ValueError: boom", 33)])))
    events = Events("otlp", "")
    events.diagnosed(diagnoses, REPORT)
    events.finished(REPORT)
    verdict, end = records(collector)
    assert (verdict.event_name, verdict.severity_text, end.event_name) == (
        "distsim.verdict",
        "ERROR",
        "distsim.finished",
    )
    assert verdict.body.string_value == diagnoses[0].explanation
    values = {pair.key: pair.value for pair in verdict.attributes}
    assert values["distsim.kind"].string_value == "rank_raised"
    assert [value.int_value for value in values["distsim.ranks"].array_value.values] == [1]
    assert values["distsim.job"].string_value == "j1"
    line = json.loads(values["distsim.event"].string_value)
    assert (line["schema"], line["diagnosis"]["kind"]) == ("distsim.events/1", "rank_raised")


def test_without_the_sdk_a_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job goes on, and has no events."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http._log_exporter", None)
    lines: list[str] = []
    events = Events("otlp", "", lines.append)
    events.finished(REPORT)
    (line,) = lines
    assert line.startswith("--events otlp needs ")
    assert line.endswith("pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http")
    assert UsageError.__name__ not in line
