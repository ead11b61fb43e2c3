"""Answers that a server keeps at hand."""

from coop_plan.api.jobs.request_handler import Reply
from coop_plan.api.service import response_cache
from coop_plan.api.service.response_cache import AtHand, name_of

FOUND = Reply(key="k", found=True, seals=[b"s"])


def test_only_what_the_store_has_sealed_is_kept_and_of_that_so_many_bytes(monkeypatch):
    monkeypatch.setattr(response_cache, "KEPT_BYTES", 250)
    kept = AtHand()
    for reply in (Reply(key="k"), Reply(key="k", found=True), Reply(key="k", seals=[b"s"])):
        kept.keep(b"none", reply, b"x")
    kept.keep(b"", FOUND, b"x")
    assert kept.get(b"none") is kept.get(b"") is None
    for name in (b"1", b"2", b"2"):
        kept.keep(name, FOUND, b"x" * 100)
    assert kept.get(b"1") == (FOUND, b"x" * 100)
    kept.keep(b"3", FOUND, b"x" * 100)
    assert [kept.get(name) is None for name in (b"1", b"2", b"3")] == [False, True, False]
    kept.keep(b"4", FOUND, b"x" * 1000)
    assert [kept.get(name) is None for name in (b"1", b"3", b"4")] == [True, True, False]


def test_questions_have_names_of_their_own_and_large_ones_none():
    assert len({name_of("", b"a"), name_of("gzip", b"a"), name_of("", b"b")}) == 3
    assert name_of("", b"x" * response_cache.QUESTION_BYTES)
    assert name_of("", b"x" * (response_cache.QUESTION_BYTES + 1)) == b""
