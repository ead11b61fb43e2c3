"""`GET /`: the page of the service, which needs nothing that is not in it but `POST /plan`."""

import functools

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

from coop_plan.web import page, security_policy

ENTRY = "service.js"


def install(app: FastAPI) -> None:
    """Add the page."""

    @app.get("/", include_in_schema=False)
    async def get_page() -> HTMLResponse:
        text, policy = _page()
        return HTMLResponse(text, headers={"Content-Security-Policy": policy})


@functools.cache
def _page() -> tuple[str, str]:
    """The page, and the policy under which its own script runs and no other."""
    return page(ENTRY, "coop-plan", {}), security_policy(ENTRY)
