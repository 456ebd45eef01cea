"""Sends the events of a job as OTLP log records, by OpenTelemetry's own SDK.

The SDK (extra `otlp`) reads its usual variables: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_HEADERS,
OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME (default here: distsim). Records are sent in a thread of its own, so that
no collector delays a job.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from distsim.errors import UsageError

DELAY_MS, FLUSH_MS = 500, 5_000
"""Milliseconds until a record is sent, and for which the end of the job waits for the last ones."""
_LEVELS = {"verdict": ("ERROR", 17), "warning": ("WARN", 13), "straggler": ("WARN", 13)}
"""Severity by event (opentelemetry-proto, logs.proto); that of all others is INFO."""


class OtlpSender:
    """Sends events to the collector that OpenTelemetry's variables name.

    Raises:
        UsageError: OpenTelemetry's SDK or its exporter is not installed.
    """

    def __init__(self) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
            from opentelemetry.sdk._logs import LoggerProvider
            from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        except ImportError as error:
            raise UsageError(
                f"--events otlp needs {error.name or 'opentelemetry'}: pip install opentelemetry-sdk "
                "opentelemetry-exporter-otlp-proto-http"
            ) from None
        resource = Resource.create({"service.name": "distsim"}).merge(OTELResourceDetector().detect())
        self._provider = LoggerProvider(resource=resource)
        self._provider.add_log_record_processor(
            BatchLogRecordProcessor(OTLPLogExporter(), schedule_delay_millis=DELAY_MS)
        )
        self._logger = self._provider.get_logger("distsim")

    def send(self, line: Mapping[str, Any]) -> None:
        """Send one event, a line of `--events`."""
        from opentelemetry._logs import LogRecord, SeverityNumber

        name, number = _LEVELS.get(line["event"], ("INFO", 9))
        diagnosis = line.get("diagnosis") or {}
        attributes = {
            "host.name": line["host"],
            "distsim.kind": diagnosis.get("kind") or line.get("kind"),
            "distsim.ranks": diagnosis.get("culprits"),
            **{f"distsim.{key}": line.get(key) for key in ("job", "program", "cluster", "world_size", "exit_code")},
            "distsim.event": json.dumps(line),
        }
        self._logger.emit(
            LogRecord(
                timestamp=int(line["unix_s"] * 1e9),
                severity_text=name,
                severity_number=SeverityNumber(number),
                body=diagnosis.get("explanation") or line.get("text") or line["event"],
                attributes={key: value for key, value in attributes.items() if value is not None},
                event_name=f"distsim.{line['event']}",
            )
        )

    def close(self) -> None:
        """Send what is left, for a few seconds at most."""
        self._provider.force_flush(FLUSH_MS)
        self._provider.shutdown()
