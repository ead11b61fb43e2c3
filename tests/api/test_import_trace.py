"""Spans by OpenTelemetry's own instrumentation: one trace in the spans, the answer and the log."""

import pytest
from fastapi.testclient import TestClient

from coop_plan.api.service.app import create_app
from coop_plan.api.service.plan_service import ServiceSettings

pytest.importorskip("opentelemetry.instrumentation.fastapi", reason="needs the extra otel")

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def traced(tmp_path):
    """A client of an instrumented service, and what it has exported."""
    from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    app = create_app(
        ServiceSettings(store=str(tmp_path / "plans"), secret=b"s" * 32, improve=False)
    )
    FastAPIInstrumentor.instrument_app(app, tracer_provider=provider, exclude_spans=["receive"])
    with TestClient(app, base_url="http://localhost") as client:
        yield client, exporter


def server_span(exporter):
    [span] = [span for span in exporter.get_finished_spans() if span.kind.name == "SERVER"]
    exporter.clear()
    return span


def test_a_request_is_in_the_trace_of_its_client_and_the_answer_names_its_span(traced):
    client, exporter = traced
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    for method, path, status in (
        ("GET", "/livez", 200),
        ("GET", f"/plans/{'0' * 64}", 404),
        ("POST", "/plan", 415),
    ):
        answer = client.request(method, path, headers=headers)
        span = server_span(exporter)
        assert answer.status_code == status
        assert f"{span.context.trace_id:032x}" == TRACE
        assert f"{span.parent.span_id:016x}" == PARENT
        assert answer.headers["traceparent"] == f"00-{TRACE}-{span.context.span_id:016x}-01"
        assert span.attributes["http.status_code"] == status


def test_a_trace_of_our_own_is_that_of_the_span(traced):
    client, exporter = traced
    answer = client.get("/livez")
    context = server_span(exporter).context
    ours = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    assert answer.headers["traceparent"] == ours
