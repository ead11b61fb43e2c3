"""The jobs of a cluster, in Redis: who works on what, who waits for it, how it is getting on."""

from collections.abc import Iterator
from typing import Any

import msgspec

from coop_plan.api.jobs.request_handler import Figures, Reply
from coop_plan.api.cluster import lua_scripts
from coop_plan.api.jobs.worker_process import Work
from coop_plan.planner.plan_cache.record import sign_bytes, verified_bytes
from coop_plan.planner.plan_cache.redis_store import connect
from coop_plan.schemas import InvalidInputError

PREFIX = "coop-plan:"

LEASE_SECONDS = 10.0
"""A worker that has not been heard of for so long is dead: another takes its job."""

INTEREST_SECONDS = 15.0
"""A server that has not been heard of for so long waits no more. Its clients ask elsewhere."""

RESEND_SECONDS = 5.0
"""A job that no worker has taken up by then is sent again, then after twice the time and so on."""

KEPT_SECONDS = 3600.0
"""How long a job that is over can be asked for."""

RECORD_SECONDS = 120.0
"""How long its answer lies there, for those who wait: then it is in the store alone."""

DELIVERIES = 3
"""Workers that one job may cost."""

ABANDONED = Reply(problem="cancelled", detail="nobody waits for the plan any more")
CANCELLED = Reply(problem="cancelled", detail="the solve was cancelled")
POISON = Reply(
    problem="too-much-work", detail=f"the processes that planned it ended, {DELIVERIES} times"
)


class Claim(msgspec.Struct, frozen=True):
    """A job that one has taken up: its token, and the request."""

    job_id: str
    token: int
    work: Work
    body: bytes


class View(msgspec.Struct, frozen=True):
    """A job as it is; `publish` says that nobody may know of it."""

    key: str
    state: str
    version: int
    message: str
    figures: Figures
    problem: Reply | None
    elapsed_seconds: float
    publish: bool


class Board:
    """
    The job table at a Redis address. Answers are sealed with `secret`.

    Every method raises `redis.RedisError` where Redis cannot be asked; each can be repeated.
    """

    def __init__(self, address: str, secret: bytes, prefix: str = PREFIX) -> None:
        self.redis = connect(address)
        self._secret, self._prefix = secret, prefix
        self._scripts: dict[str, Any] = {}

    def ping(self) -> None:
        """Raise where Redis cannot be asked."""
        self.redis.ping()

    def begin(self, job_id: str, who: str, work: Work, body: bytes, most: int) -> str:
        """
        Join a job or make it: "joined", "new" or, where `most` wait already, "full".

        What was "new" is to be sent.
        """
        # The request is sent only where nobody has sent it.
        found = self._run(lua_scripts.BEGIN, job_id, who, b"", most, b"")
        if found == b"absent":
            found = self._run(lua_scripts.BEGIN, job_id, who, body, most, msgspec.json.encode(work))
        return bytes(found).decode()

    def look(self, job_id: str, who: str = "") -> View | None:
        """
        How a job is getting on; the server `who` goes on waiting for it.

        A job whose worker is dead is queued again; the view says so by `publish`.
        """
        work, state, version, message, figures, problem, age, publish, took = self._run(
            lua_scripts.LOOK, job_id, who
        )
        if not state:
            return None
        text = state.decode()
        active = text in ("queued", "running")
        return View(
            key=msgspec.json.decode(work, type=Work).key,
            state=text,
            version=int(version),
            message=message.decode(),
            figures=msgspec.json.decode(figures or b"{}", type=Figures),
            problem=msgspec.json.decode(problem, type=Reply) if problem else None,
            elapsed_seconds=float(age if active else took) / 1000,
            publish=bool(publish),
        )

    def record(self, job_id: str) -> bytes:
        """The answer of a job that is done; nothing where it is not at hand or not of ours."""
        data: Any = self.redis.get(f"{self._prefix}job:{job_id}:record")
        try:
            return bytes(verified_bytes(data, job_id, self._secret)) if data else b""
        except InvalidInputError:
            return b""

    def want(self, job_id: str) -> bool:
        """Let a job go on though nobody waits; whether it is there."""
        return bool(self._run(lua_scripts.WANT, job_id))

    def leave(self, job_id: str, who: str) -> None:
        """A server waits no longer; a job that nobody wants is cancelled."""
        self._run(lua_scripts.LEAVE, job_id, who, msgspec.json.encode(ABANDONED))

    def cancel(self, job_id: str) -> None:
        """End a job; its worker hears of it when it renews its lease."""
        self._run(lua_scripts.CANCEL, job_id, msgspec.json.encode(CANCELLED))

    def claim(self, job_id: str) -> Claim | None:
        """Take a job up; None where there is nothing to do, or another works on it."""
        problems = msgspec.json.encode(ABANDONED), msgspec.json.encode(POISON)
        claimed = self._run(lua_scripts.CLAIM, job_id, *problems)
        if not claimed:
            return None
        token, work, body = claimed
        return Claim(job_id, int(token), msgspec.json.decode(work, type=Work), body)

    def renew(self, claim: Claim, message: str, figures: Figures) -> bool:
        """Hold a job for longer, with news of it; False where it is nobody's or another's now."""
        news = message, msgspec.json.encode(figures), msgspec.json.encode(ABANDONED)
        return bool(self._run(lua_scripts.RENEW, claim.job_id, claim.token, *news))

    def finish(self, claim: Claim, problem: Reply | None, record: bytes = b"") -> bool:
        """End a job with its answer; False where another has taken it over: it is not changed."""
        said = b"" if problem is None else msgspec.json.encode(problem)
        answer = sign_bytes(record, claim.job_id, self._secret) if record else b""
        return bool(self._run(lua_scripts.FINISH, claim.job_id, claim.token, said, answer))

    def hand_back(self, claim: Claim, *, counts: bool) -> bool:
        """
        Queue a job again, which is to be sent then; False where another has taken it over.

        `counts` says whether this was one of the deliveries that a job has.
        """
        return bool(self._run(lua_scripts.HAND_BACK, claim.job_id, claim.token, 0 if counts else -1))

    def sizes(self) -> tuple[int, int]:
        """Jobs that wait, and jobs that are worked on."""
        return (
            self.redis.zcard(f"{self._prefix}queued"),
            self.redis.zcard(f"{self._prefix}running"),
        )

    def news(self) -> Iterator[str]:
        """The ids of jobs as they change, and an empty one now and then."""
        subscribe: Any = self.redis.pubsub  # has no types
        with subscribe(ignore_subscribe_messages=True) as channel:
            channel.subscribe(f"{self._prefix}news")
            while True:
                message = channel.get_message(timeout=0.5)
                yield "" if message is None else message["data"].decode()

    def close(self) -> None:
        """Let go of the connections."""
        self.redis.close()

    def _run(self, script: str, job_id: str, *arguments: Any) -> Any:
        if script not in self._scripts:
            self._scripts[script] = self.redis.register_script(HEAD + lua_scripts.COMMON + script)
        return self._scripts[script](args=[self._prefix, job_id, *arguments])


HEAD = "".join(
    f"local {name} = {number:.0f}\n"
    for name, number in {
        "LEASE": LEASE_SECONDS * 1000,
        "INTEREST": INTEREST_SECONDS * 1000,
        "RESEND": RESEND_SECONDS * 1000,
        "KEPT": KEPT_SECONDS * 1000,
        "RECORD": RECORD_SECONDS * 1000,
        "DELIVERIES": DELIVERIES,
    }.items()
)
