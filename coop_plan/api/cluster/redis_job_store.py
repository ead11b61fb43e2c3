"""Job store of a cluster, in Redis: requests, leases, waiting servers and progress of jobs."""

from collections.abc import Iterator
from typing import Any

import msgspec

from coop_plan.api.cluster import lua_scripts
from coop_plan.api.jobs.request_handler import Figures, Reply, State
from coop_plan.api.jobs.worker_process import JobRequest
from coop_plan.planner.plan_cache.record import sign_bytes, verified_bytes
from coop_plan.planner.plan_cache.redis_store import connect
from coop_plan.schemas import InvalidInputError

PREFIX = "coop-plan:"

LEASE_SECONDS = 10.0
"""A lease that is not renewed for so long ends: its worker is taken for dead."""

SUBSCRIPTION_SECONDS = 15.0
"""A server that does not view its job for so long is unsubscribed: its clients ask another one."""

RESEND_SECONDS = 5.0
"""A queued job is sent again after so long, then after twice the time, and so on."""

FINISHED_SECONDS = 3600.0
"""Time for which a finished job can be viewed."""

RECORD_SECONDS = 120.0
"""Time for which the answer stays here for waiting servers; the plan store has it, too."""

DELIVERIES = 3
"""Workers that one job may crash before it fails."""

ENDS = {
    b"unwatched": Reply(problem="cancelled", detail="the last client left"),
    b"cancelled": Reply(problem="cancelled", detail="the solve was cancelled"),
    b"crashed": Reply(
        problem="too-much-work", detail=f"the job's process ended {DELIVERIES} times without a plan"
    ),
}
"""Problems that need no signature: a client of Redis can end a job anyway."""


class Lease(msgspec.Struct, frozen=True):
    """A job that a worker holds: its request, and the fencing token of the lease."""

    job_id: str
    token: int
    request: JobRequest
    body: bytes


class JobView(msgspec.Struct, frozen=True):
    """State of a job; `resend` says that its id must be sent to the workers again."""

    plan: str
    state: State
    version: int
    message: str
    figures: Figures
    problem: Reply | None
    elapsed_seconds: float
    resend: bool


class JobStore:
    """The jobs at a Redis address. Answers are signed with `secret`.

    A job that others have changed in Redis is deleted; its servers submit it again. Every method
    raises `redis.RedisError` if Redis does not answer, and may be repeated then.
    """

    def __init__(self, address: str, secret: bytes, prefix: str = PREFIX) -> None:
        self.redis = connect(address)
        self._secret, self._prefix = secret, prefix
        self._scripts: dict[str, Any] = {}

    def submit(
        self,
        job_id: str,
        server: str,
        request: JobRequest,
        body: bytes,
        max_queued: int,
        caller: str = "",
    ) -> str:
        """Subscribe a server to a job, which is created if needed: "joined", "new" or "full".

        The caller must send the id of a "new" job to the workers.
        """
        # The request is sent to Redis only if no server has sent it.
        found = self._run(lua_scripts.SUBMIT, job_id, server, b"", max_queued, b"", caller)
        if found == b"absent":
            text = msgspec.json.encode(request)
            found = self._run(lua_scripts.SUBMIT, job_id, server, body, max_queued, text, caller)
        return bytes(found).decode()

    def view(self, job_id: str, server: str = "") -> JobView | None:
        """State of a job; renews the subscription of `server`, if that is given.

        A job whose lease has ended is queued again, with `resend` in its view.
        """
        parts = self._run(lua_scripts.VIEW, job_id, server)
        try:
            return self._view(job_id, parts) if parts[1] else None
        except (ValueError, msgspec.MsgspecError, InvalidInputError):
            self._run(lua_scripts.FORGET, job_id)
            return None

    def _view(self, job_id: str, parts: list[Any]) -> JobView:
        request, state, version, message, figures, problem, age, resend, took = parts
        known: State = msgspec.convert(state.decode(), State)
        active = known in ("queued", "running")
        return JobView(
            plan=msgspec.json.decode(request, type=JobRequest).plan,
            state=known,
            version=int(version),
            message=message.decode(),
            figures=msgspec.json.decode(figures or b"{}", type=Figures),
            problem=self._problem(job_id, problem) if problem else None,
            elapsed_seconds=float(age if active else took) / 1000,
            resend=bool(resend),
        )

    def _problem(self, job_id: str, data: bytes) -> Reply:
        if data in ENDS:
            return ENDS[data]
        signed = verified_bytes(data, f"{job_id} problem", self._secret)
        return msgspec.json.decode(signed, type=Reply)

    def record(self, job_id: str) -> bytes:
        """The answer of a job that is done; empty if it expired or has a wrong signature."""
        data: Any = self.redis.get(f"{self._prefix}job:{job_id}:record")
        try:
            return bytes(verified_bytes(data, job_id, self._secret)) if data else b""
        except InvalidInputError:
            return b""

    def detach(self, job_id: str) -> bool:
        """Keep the job running without subscribed servers; False if there is no such job."""
        return bool(self._run(lua_scripts.DETACH, job_id))

    def unsubscribe(self, job_id: str, server: str) -> None:
        """Unsubscribe a server; a job without servers is cancelled, unless it is detached."""
        self._run(lua_scripts.UNSUBSCRIBE, job_id, server)

    def cancel(self, job_id: str) -> None:
        """Cancel a job; its worker learns it when it renews the lease."""
        self._run(lua_scripts.CANCEL, job_id)

    def lease(self, job_id: str) -> Lease | None:
        """Lease a queued job; None if there is none, or it is unwatched.

        It is the job that is next by fairness; its message says only that some job is queued.
        """
        leased = self._run(lua_scripts.LEASE, job_id)
        if not leased:
            return None
        leased_id, token, text, body = leased
        try:
            request = msgspec.json.decode(text, type=JobRequest)
        except (ValueError, msgspec.MsgspecError):
            self._run(lua_scripts.FORGET, leased_id.decode())
            return None
        return Lease(leased_id.decode(), int(token), request, body)

    def renew(self, lease: Lease, message: str, figures: Figures) -> bool:
        """Renew a lease and report progress; False if the job is finished or leased by another."""
        arguments = message, msgspec.json.encode(figures)
        return bool(self._run(lua_scripts.RENEW, lease.job_id, lease.token, *arguments))

    def finish(self, lease: Lease, problem: Reply | None, record: bytes = b"") -> bool:
        """Finish a job with its answer; False, without a change, if the lease was lost.

        A job whose graph the store has lost keeps its place in the queue: its clients send the
        graph again.
        """
        text, returns = b"", problem is not None and problem.problem == "unknown-graph"
        if problem is not None:
            data = msgspec.json.encode(problem)
            text = sign_bytes(data, f"{lease.job_id} problem", self._secret)
        answer = sign_bytes(record, lease.job_id, self._secret) if record else b""
        arguments = lease.token, text, answer, int(returns)
        return bool(self._run(lua_scripts.FINISH, lease.job_id, *arguments))

    def release(self, lease: Lease, *, counts: bool) -> bool:
        """Queue a job again; the caller must send its id. False if the lease was lost.

        With `counts` the lease counts as one of the job's `DELIVERIES`.
        """
        return bool(self._run(lua_scripts.RELEASE, lease.job_id, lease.token, 0 if counts else -1))

    def sizes(self) -> tuple[int, int]:
        """Numbers of queued and of running jobs."""
        return (
            self.redis.zcard(f"{self._prefix}queued"),
            self.redis.zcard(f"{self._prefix}running"),
        )

    def changes(self) -> Iterator[str]:
        """Ids of jobs as they change, and an empty one twice a second without a change."""
        subscribe: Any = self.redis.pubsub  # has no types
        with subscribe(ignore_subscribe_messages=True) as channel:
            channel.subscribe(f"{self._prefix}news")
            while True:
                message = channel.get_message(timeout=0.5)
                yield "" if message is None else message["data"].decode()

    def close(self) -> None:
        """Close the connections."""
        self.redis.close()

    def _run(self, script: str, job_id: str, *arguments: Any) -> Any:
        if script not in self._scripts:
            self._scripts[script] = self.redis.register_script(HEAD + lua_scripts.COMMON + script)
        return self._scripts[script](args=(self._prefix, job_id, *arguments))


HEAD = "".join(
    f"local {name} = {number:.0f}\n"
    for name, number in {
        "LEASE": LEASE_SECONDS * 1000,
        "SUBSCRIPTION": SUBSCRIPTION_SECONDS * 1000,
        "RESEND": RESEND_SECONDS * 1000,
        "FINISHED": FINISHED_SECONDS * 1000,
        "RECORD": RECORD_SECONDS * 1000,
        "DELIVERIES": DELIVERIES,
    }.items()
)
