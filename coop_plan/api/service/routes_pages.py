"""Pages of the service: `GET /`, its own page, and `GET /docs`, Swagger UI of `/openapi.json`.

No page needs a network: Swagger UI's files come from the package `fastapi-offline`.
"""

import base64
import functools
import hashlib
from importlib import resources

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, Response

from coop_plan.api.service.sample_graph import sample_graph
from coop_plan.planner.registry import METHODS
from coop_plan.web import page, security_policy

ENTRY = "service.js"

DOCS_FILES = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
"""Files of the page `/docs`, with their media types."""

router = APIRouter(include_in_schema=False)

_SCRIPT = """
SwaggerUIBundle({ url: "/openapi.json", dom_id: "#docs", deepLinking: true, validatorUrl: null });
"""
_DOCS = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/docs/swagger-ui.css">
<title>coop-plan: API</title>
</head>
<body>
<main id="docs"></main>
<script src="/docs/swagger-ui-bundle.js"></script>
<script>{_SCRIPT}</script>
</body>
</html>
"""
_HASH = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
_DOCS_POLICY = (
    f"default-src 'none'; script-src 'self' 'sha256-{_HASH}'; style-src 'self' 'unsafe-inline';"
    " connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'"
)
"""Content-Security-Policy of `/docs`: Swagger UI sets styles of elements."""


@router.get("/")
async def get_page() -> HTMLResponse:
    """The service's page."""
    text, policy = _page()
    return HTMLResponse(text, headers={"Content-Security-Policy": policy})


@router.get("/docs")
async def get_docs() -> HTMLResponse:
    """Swagger UI."""
    return HTMLResponse(_DOCS, headers={"Content-Security-Policy": _DOCS_POLICY})


@functools.cache
def _page() -> tuple[str, str]:
    """The service's page, and the policy that allows its own script only."""
    methods = [{"name": info.name, "summary": info.summary} for info in METHODS.values()]
    data = {"methods": methods, "sample": sample_graph()}
    return page(ENTRY, "coop-plan", data), security_policy(ENTRY)


async def _get_docs_file(name: str) -> Response:
    headers = {"Cache-Control": "public, max-age=86400"}
    return Response(_docs_file(name), media_type=DOCS_FILES[name], headers=headers)


@functools.cache
def _docs_file(name: str) -> bytes:
    return (resources.files("fastapi_offline") / "static" / name).read_bytes()


for _name in DOCS_FILES:
    router.get(f"/docs/{_name}")(functools.partial(_get_docs_file, _name))
