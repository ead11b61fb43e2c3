"""Schemathesis over the whole OpenAPI description: no 5xx, nothing that it does not document."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from coop_plan.api.service.app import ServiceSettings, create_app
from coop_plan.api.service.headers import WAIT_SECONDS
from coop_plan.api.service.tokens import add
from tests.api.server import serving

ACCEPTED = ["2xx", 401, 403, 404, 409, 413, 422, 503, 504]
"""Statuses of what the description allows: no schema says which tensors an op may name (422), what
a server has stored (404), what it can plan (409, 504) or the sizes that it takes (413, 503)."""

CONFIG = schemathesis.Config.from_dict(
    {"checks": {"positive_data_acceptance": {"expected-statuses": ACCEPTED}}}
)

EXAMPLES = 25
"""Of each operation and kind (what the description allows, and what it does not)."""

DESCRIPTION = schemathesis.openapi.from_dict(
    create_app(ServiceSettings(store="nowhere", secret=b"")).openapi(), config=CONFIG
)
OPERATIONS = {found.ok().label: found.ok() for found in DESCRIPTION.get_all_operations()}
WITH_INPUT = ["POST /plan", "PUT /graphs/{digest}", "GET /plans/{key}"]
"""Operations that take more than a text in their path, which can be wrong."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    options = ["--store", str(folder / "plans"), "--max-ops", "100", "--max-time-limit", "5"]
    options += ["--tokens", str(folder / "tokens.json")]
    token = add(folder / "tokens.json", "tester", ["admin"])
    with serving(folder, *options, "--solvers", "1") as client:
        yield str(client.base_url).rstrip("/"), {"Authorization": f"Bearer {token}"}


def test_the_description_has_all_addresses():
    assert len(OPERATIONS) >= 10
    assert set(WITH_INPUT) < OPERATIONS.keys()


@pytest.mark.parametrize(
    ("label", "mode"),
    [(label, GenerationMode.POSITIVE) for label in OPERATIONS]
    + [(label, GenerationMode.NEGATIVE) for label in WITH_INPUT],
)
def test_every_answer_is_documented_and_none_is_the_servers_fault(server, label, mode):
    url, headers = server

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
        # An answer may take as long as the server waits for a plan, and longer on a busy machine.
        answer = case.call(base_url=url, timeout=6 * WAIT_SECONDS, headers=headers)
        case.validate_response(answer)

    ask()
