"""The plan service as a dependency of routes."""

from typing import Annotated

from fastapi import Depends, Request

from coop_plan.api.service.plan_service import PlanService
from coop_plan.api.service.problems import ProblemError


async def plan_service(request: Request) -> PlanService:
    """The service of the app; raises `ProblemError` before the app's lifespan began."""
    service: PlanService | None = getattr(request.app.state, "service", None)
    if service is None:
        raise ProblemError("busy", "the server is starting", retry_after=1)
    return service


Service = Annotated[PlanService, Depends(plan_service)]
