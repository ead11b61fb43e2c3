"""Pages of the service: `GET /`, its own page, and `GET /docs`, Swagger UI of `/openapi.json`.

No page needs a network: Swagger UI's files come from the package `fastapi-offline`.
"""

import functools
from importlib import resources

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, Response

from coop_plan.api.service.sample_graph import sample_graph
from coop_plan.planner.registry import METHODS
from coop_plan.web import linked_page, page, security_policy

ENTRY = "service.js"

DOCS_FILES = {
    "swagger-ui-bundle.js": ("fastapi_offline", "static", "text/javascript"),
    "swagger-ui.css": ("fastapi_offline", "static", "text/css"),
    "docs.js": ("coop_plan.web", "", "text/javascript"),
    "docs.css": ("coop_plan.web", "", "text/css"),
}
"""Files of the page `/docs`: their package, folder and media type."""

router = APIRouter(include_in_schema=False)

_DOCS = linked_page(
    "coop-plan: API", '<div id="docs"></div>', [f"/docs/{name}" for name in DOCS_FILES]
)
_DOCS_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self';"
    " img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
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
    data = {"methods": methods, "sample": sample_graph(12)}
    return page(ENTRY, "coop-plan", data), security_policy(ENTRY)


async def _get_docs_file(name: str) -> Response:
    headers = {"Cache-Control": "public, max-age=86400"}
    return Response(_docs_file(name), media_type=DOCS_FILES[name][2], headers=headers)


@functools.cache
def _docs_file(name: str) -> bytes:
    package, folder, _ = DOCS_FILES[name]
    return (resources.files(package) / folder / name).read_bytes()


for _name in DOCS_FILES:
    router.get(f"/docs/{_name}")(functools.partial(_get_docs_file, _name))
