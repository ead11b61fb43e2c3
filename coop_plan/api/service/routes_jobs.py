"""`GET /jobs/{id}`, its events, and `DELETE /jobs/{id}`."""

from collections.abc import AsyncIterable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request
from fastapi.sse import EventSourceResponse

from coop_plan.api.jobs.jobs import Job, JobDocument
from coop_plan.api.service.auth import CANCELLER, READER
from coop_plan.api.service.headers import LastEventId
from coop_plan.api.service.plan_service import Service
from coop_plan.api.service.problems import COMMON, described

router = APIRouter(prefix="/jobs", tags=["jobs"], responses=described("not-found", *COMMON))


async def find_job(service: Service, job_id: Annotated[str, Path(pattern="^[0-9a-f]{32}$")]) -> Job:
    """The job of a path; raises `ProblemError` if there is none."""
    return await service.jobs.get(job_id)


FoundJob = Annotated[Job, Depends(find_job)]


@router.get("/{job_id}", dependencies=[READER], response_model_exclude_unset=True)
async def get_job(job: FoundJob) -> JobDocument:
    """The state of a job."""
    return job.document()


@router.delete("/{job_id}", dependencies=[CANCELLER], response_model_exclude_unset=True)
async def delete_job(service: Service, job: FoundJob) -> JobDocument:
    """Cancel a job for all its clients."""
    await service.jobs.cancel(job)
    return job.document()


@router.get("/{job_id}/events", dependencies=[READER], response_class=EventSourceResponse)
async def get_events(
    request: Request, service: Service, job: FoundJob, last_event_id: LastEventId = -1
) -> AsyncIterable[JobDocument]:
    """The state of a job at each change, until it is finished."""
    events: AsyncIterable[Any] = service.jobs.events(job, last_event_id)
    if not request.scope.get("head"):
        async for event in events:
            yield event
