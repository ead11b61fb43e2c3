"""
`GET /docs`: the service's addresses, to read and to try.

Swagger UI draws `/openapi.json`. Its files come from the package `fastapi-offline`, which carries
them, and are served from here: a page that a network would have to complete is none where
planning servers stand.
"""

import base64
import functools
import hashlib
from importlib import resources

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response

KINDS = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
"""The files that the page needs, and what they are."""

ADDRESSES = frozenset({"/docs", *(f"/docs/{name}" for name in KINDS)})

_SCRIPT = """
SwaggerUIBundle({ url: "/openapi.json", dom_id: "#docs", deepLinking: true, validatorUrl: null });
"""
_PAGE = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/docs/swagger-ui.css">
<title>coop-plan: addresses</title>
</head>
<body>
<main id="docs"></main>
<script src="/docs/swagger-ui-bundle.js"></script>
<script>{_SCRIPT}</script>
</body>
</html>
"""
_HASH = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
_POLICY = (
    f"default-src 'none'; script-src 'self' 'sha256-{_HASH}'; style-src 'self' 'unsafe-inline';"
    " connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'"
)
"""Swagger UI writes styles into elements; scripts are its own file and the line above alone."""


def install(app: FastAPI) -> None:
    """Add the page and its files."""

    @app.get("/docs", include_in_schema=False)
    async def get_docs() -> HTMLResponse:
        return HTMLResponse(_PAGE, headers={"Content-Security-Policy": _POLICY})

    for name in KINDS:
        add = app.get(f"/docs/{name}", include_in_schema=False)
        add(functools.partial(_get_file, name))


async def _get_file(name: str) -> Response:
    headers = {"Cache-Control": "public, max-age=86400"}
    return Response(_file(name), media_type=KINDS[name], headers=headers)


@functools.cache
def _file(name: str) -> bytes:
    return (resources.files("fastapi_offline") / "static" / name).read_bytes()
