"""Errors as `application/problem+json` (RFC 9457), each with a stable type."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from coop_plan.planner import InfeasibleBudgetError, TimeLimitError
from coop_plan.schemas import InvalidInputError

PREFIX = "urn:coop-plan:problem:"
MEDIA_TYPE = "application/problem+json"

PROBLEMS = {
    "invalid-input": (422, "The request breaks the contract; `pointer` says where"),
    "budget-infeasible": (409, "The method cannot meet the budget; see `min_feasible_bytes`"),
    "time-limit": (504, "No plan was found within the time limit"),
    "body-too-large": (413, "The body is larger than this server takes"),
    "too-many-ops": (413, "The graph has more ops than this server takes"),
    "not-found": (404, "There is nothing at this address"),
    "method-not-allowed": (405, "The address does not take this method"),
    "internal-error": (500, "The server failed; the request is not at fault"),
}
"""Problem type → (status, title)."""


class ProblemError(Exception):
    """A request ends with a problem of this name."""

    def __init__(self, name: str, detail: str, **members: Any) -> None:
        self.name, self.detail, self.members = name, detail, members
        super().__init__(detail)


def response(name: str, detail: str, **members: Any) -> JSONResponse:
    """The problem document as a response."""
    status, title = PROBLEMS[name]
    document = {"type": PREFIX + name, "title": title, "status": status, "detail": detail}
    return JSONResponse({**document, **members}, status_code=status, media_type=MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Answer every error of the app as a problem."""

    @app.exception_handler(ProblemError)
    async def problem(_: Request, error: ProblemError) -> JSONResponse:
        return response(error.name, error.detail, **error.members)

    @app.exception_handler(InvalidInputError)
    async def invalid(_: Request, error: InvalidInputError) -> JSONResponse:
        return response("invalid-input", error.message, pointer=error.pointer)

    @app.exception_handler(InfeasibleBudgetError)
    async def infeasible(_: Request, error: InfeasibleBudgetError) -> JSONResponse:
        return response(
            "budget-infeasible",
            str(error),
            budget_bytes=error.budget_bytes,
            min_feasible_bytes=error.min_feasible_bytes,
            blocking_op=error.blocking_op,
            blocking_op_name=error.blocking_op_name,
            working_set_bytes=error.working_set_bytes,
        )

    @app.exception_handler(TimeLimitError)
    async def late(_: Request, error: TimeLimitError) -> JSONResponse:
        return response("time-limit", str(error))

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> JSONResponse:
        name = {404: "not-found", 405: "method-not-allowed"}.get(error.status_code)
        if name is None:
            return response("invalid-input", str(error.detail), pointer="")
        return response(name, str(error.detail))

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return response("internal-error", f"{type(error).__name__} while planning")
