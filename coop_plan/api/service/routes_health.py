"""`GET /livez`, `GET /readyz` and `GET /metrics`."""

from typing import Literal

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import BaseModel

from coop_plan.api.service.auth import ADMIN
from coop_plan.api.service.metrics import MEDIA_TYPE
from coop_plan.api.service.plan_service import Service
from coop_plan.api.service.problems import COMMON, described

router = APIRouter(tags=["health"], responses=described("forbidden"))


class Health(BaseModel):
    """The answer of a probe."""

    status: Literal["ok"] = "ok"


@router.get("/healthz", include_in_schema=False)
@router.get("/livez", summary="Liveness probe")
async def livez() -> Health:
    """The server runs."""
    return Health()


@router.get("/readyz", summary="Readiness probe", responses=described("busy"))
async def readyz(service: Service) -> Health:
    """The store and the broker can be reached."""
    await service.check()
    return Health()


@router.get(
    "/metrics",
    summary="Get metrics for Prometheus",
    dependencies=[ADMIN],
    response_class=Response,
    responses={
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
        **described(*COMMON),
    },
)
async def get_metrics(service: Service) -> Response:
    """Counters and histograms of this server."""
    return Response(service.metrics.text(), media_type=MEDIA_TYPE)
