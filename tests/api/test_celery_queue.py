"""Settings of Celery: limits above those of a solve, and no task delivered twice by mistake."""

import pytest

from coop_plan.api.cluster.celery_queue import SOLVE, CeleryQueue, make_app
from coop_plan.api.jobs.process_pool import GRACE_SECONDS
from tests.redis_server import needs_redis, redis_server


@pytest.mark.parametrize("seconds", [1.0, 600.0, 1e6])
def test_limits_meet_only_a_worker_that_hangs(seconds):
    conf = make_app("redis://127.0.0.1:1/0", seconds).conf
    visible = conf.broker_transport_options["visibility_timeout"]
    assert seconds + GRACE_SECONDS < conf.task_soft_time_limit < conf.task_time_limit
    # It may be behind another one in a worker, and both may take all the time there is.
    assert visible > 2 * conf.task_time_limit
    assert conf.worker_prefetch_multiplier == 1
    assert conf.task_acks_late
    assert conf.task_reject_on_worker_lost


def test_no_code_comes_by_message_and_no_result_goes_back():
    conf = make_app("redis://127.0.0.1:1/0", 1.0).conf
    assert conf.accept_content == ["json"]
    assert conf.task_serializer == "json"
    assert conf.result_backend is None
    assert conf.task_ignore_result
    assert not conf.worker_enable_remote_control


@needs_redis
def test_a_message_names_a_job_and_nothing_else(tmp_path):
    with redis_server(tmp_path) as server:
        messages, app = CeleryQueue(server.address, 1.0), make_app(server.address, 1.0)
        messages.send("the job")
        with app.connection_for_read() as connection:
            message = connection.SimpleQueue("coop-plan").get(timeout=30)
            message.ack()
        assert message.headers["task"] == SOLVE
        assert message.payload[:2] == [["the job"], {}]
        assert message.content_type == "application/json"
        server.process.kill()
        with pytest.raises(OSError, match="refused"):
            messages.send("another")
        messages.close()
        app.close()


def test_any_failure_to_send_is_a_broker_that_does_not_answer(monkeypatch):
    """Kombu's errors have many types; a thread may find what another's failure has closed."""
    messages = CeleryQueue("redis://127.0.0.1:1/0", 1.0)

    def fail(*_, **__):
        raise AttributeError("'NoneType' object has no attribute 'client'")

    monkeypatch.setattr(messages._app, "send_task", fail)
    with pytest.raises(OSError, match="NoneType"):
        messages.send("the job")
    messages.close()
