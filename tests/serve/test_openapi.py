"""Whatever the OpenAPI page allows, or nearly allows: the server never makes a mistake of its own."""

import os

import fastapi
import pytest
import schemathesis
import serving
from hypothesis import HealthCheck, settings

from kvkeep.serve.routes import router

EXAMPLES = int(os.environ.get("SERVE_EXAMPLES", "3"))  # of every route
page = fastapi.FastAPI()
page.include_router(router)
schema = schemathesis.openapi.from_dict(page.openapi())


@pytest.fixture(scope="module")
def served():
    with serving.thread(serving.engine(prefix_cache=10**7), max_tokens=8, max_answers=4) as found:
        yield found


@pytest.mark.slow
@schema.parametrize()
@settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
)
def test_no_request_breaks_the_server(case, served):
    if isinstance(case.body, dict) and "model" in case.body:
        case.body["model"] = "tiny"  # others are refused before anything else is looked at
    reply = case.call(base_url=served.url)
    case.validate_response(reply, checks=[schemathesis.checks.not_a_server_error])
