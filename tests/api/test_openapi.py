"""Schemathesis over the whole OpenAPI description: no 5xx, nothing that it does not document."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from coop_plan.api.service.app import ServiceSettings, create_app
from tests.api.server import serving

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]

EXAMPLES = 25
"""Of each operation and kind (what the description allows, and what it does not)."""

DESCRIPTION = schemathesis.openapi.from_dict(
    create_app(ServiceSettings(store="nowhere", secret=b"")).openapi()
)
OPERATIONS = {found.ok().label: found.ok() for found in DESCRIPTION.get_all_operations()}
WITH_INPUT = ["POST /plan", "PUT /graphs/{digest}", "GET /plans/{key}"]
"""Operations that take more than a text in their path, which can be wrong."""


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    options = ["--store", str(folder / "plans"), "--max-ops", "100", "--max-time-limit", "5"]
    with serving(folder, *options, "--solvers", "1") as client:
        yield str(client.base_url).rstrip("/")


def test_the_description_has_all_addresses():
    assert len(OPERATIONS) >= 10
    assert set(WITH_INPUT) < OPERATIONS.keys()


@pytest.mark.parametrize(
    ("label", "mode"),
    [(label, GenerationMode.POSITIVE) for label in OPERATIONS]
    + [(label, GenerationMode.NEGATIVE) for label in WITH_INPUT],
)
def test_every_answer_is_documented_and_none_is_the_servers_fault(url, label, mode):
    @given(case=OPERATIONS[label].as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def ask(case):
        case.validate_response(case.call(base_url=url), checks=CHECKS)

    ask()
