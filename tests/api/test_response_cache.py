"""The response cache of a server."""

from coop_plan.api.jobs.request_handler import Reply
from coop_plan.api.service import response_cache
from coop_plan.api.service.response_cache import ResponseCache, cache_key

FOUND = Reply(key="k", found=True, seals=[b"s"])


def test_only_answers_with_seals_are_cached_within_a_size(monkeypatch):
    monkeypatch.setattr(response_cache, "MAX_BYTES", 250)
    cache = ResponseCache()
    for reply in (Reply(key="k"), Reply(key="k", found=True), Reply(key="k", seals=[b"s"])):
        cache.put(b"none", reply, b"x")
    cache.put(b"", FOUND, b"x")
    assert cache.get(b"none") is cache.get(b"") is None
    for key in (b"1", b"2", b"2"):
        cache.put(key, FOUND, b"x" * 100)
    assert cache.get(b"1") == (FOUND, b"x" * 100)
    cache.put(b"3", FOUND, b"x" * 100)
    assert [cache.get(key) is None for key in (b"1", b"2", b"3")] == [False, True, False]
    cache.put(b"4", FOUND, b"x" * 1000)
    assert [cache.get(key) is None for key in (b"1", b"3", b"4")] == [True, True, False]


def test_requests_have_different_keys_and_large_ones_none():
    assert len({cache_key("", b"a"), cache_key("gzip", b"a"), cache_key("", b"b")}) == 3
    assert cache_key("", b"x" * response_cache.MAX_REQUEST_BYTES)
    assert cache_key("", b"x" * (response_cache.MAX_REQUEST_BYTES + 1)) == b""
