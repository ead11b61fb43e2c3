"""Logs as JSON, a line each on stderr: the service's own and those of its libraries."""

from collections.abc import MutableMapping
from typing import Any

import msgspec
import structlog

FIELDS: list[Any] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.stdlib.ExtraAdder(),
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.format_exc_info,
]


def _plain(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Without uvicorn's message for terminals."""
    event.pop("color_message", None)
    return event


def _json(event: MutableMapping[str, Any], **_: Any) -> str:
    return msgspec.json.encode(event, enc_hook=repr).decode()


CONFIG: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "json": {
            "()": structlog.stdlib.ProcessorFormatter,
            "processors": [
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                _plain,
                structlog.processors.JSONRenderer(_json),
            ],
            "foreign_pre_chain": FIELDS,
        }
    },
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json"}},
    "root": {"handlers": ["stderr"], "level": "WARNING"},
    "loggers": {
        "coop_plan": {"level": "INFO"},
        "uvicorn": {"level": "INFO"},
        "uvicorn.access": {"level": "WARNING"},  # every request has a line of its own
    },
}
"""Configuration for `logging.config.dictConfig`; a record's `extra` are fields of its line."""
