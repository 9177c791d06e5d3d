"""What `scripts/soak.py` finds wrong: answers, what is left when nobody asks, memory that grows."""

import argparse
import asyncio

import httpx
import pytest

from scripts import soak

ARGS = argparse.Namespace(
    url="http://127.0.0.1:1", model="demo", pid=None, minutes=0.001, clients=1, questions=3, seed=0
)


@pytest.fixture
def quiet(monkeypatch):
    """Clients that ask nothing, and a server that has nothing left."""

    async def nothing(self, http, until):
        del self, http, until

    async def no_gauges(http):
        del http
        return {"num_requests_running": 0.0}

    monkeypatch.setattr(soak.Traffic, "client", nothing)
    monkeypatch.setattr(soak, "gauges", no_gauges)


def _asked(monkeypatch, *answers: str) -> list[str]:
    """What is wrong with these answers to one and the same question."""
    said = iter(answers)

    async def chat(self, http, messages, **fields):
        del self, http, messages, fields
        return next(said)

    monkeypatch.setattr(soak.Traffic, "chat", chat)
    traffic = soak.Traffic(ARGS)
    traffic.questions = traffic.questions[:1]

    async def ask() -> None:
        async with httpx.AsyncClient() as http:
            for _ in answers:
                await traffic.ask(http)

    asyncio.run(ask())
    return traffic.wrong


def test_a_wrong_answer_is_reported(monkeypatch):
    (wrong,) = _asked(monkeypatch, "I would rather not say.")
    assert "I would rather not say." in wrong


def test_an_answer_that_changes_is_reported(monkeypatch):
    monkeypatch.setattr(soak, "is_right", lambda question, content: True)
    assert _asked(monkeypatch, "Oslo.", "Oslo.") == []
    (wrong,) = _asked(monkeypatch, "Oslo.", "Oslo!")
    assert "was 'Oslo.', now 'Oslo!'" in wrong


@pytest.mark.usefixtures("quiet")
def test_nothing_is_wrong_where_nothing_is_left():
    assert asyncio.run(soak.soak(ARGS)) == []


@pytest.mark.usefixtures("quiet")
def test_what_is_left_when_nobody_asks_is_reported(monkeypatch):
    async def left(http):
        del http
        return {"num_requests_running": 0.0, "kv_cache_pages_used": 3.0}

    monkeypatch.setattr(soak, "gauges", left)
    assert asyncio.run(soak.soak(ARGS)) == ["kv_cache_pages_used is 3 at the end"]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(("last", "num_problems"), [(1.04, 0), (1.06, 1)])
def test_memory_that_grows_after_the_warm_up_is_reported(monkeypatch, last, num_problems):
    sizes, taken = [0.5e9, 1e9, 1e9, 1e9, 1e9, last * 1e9], []

    async def busy(self, http, until):
        del self, http, until
        while len(taken) < len(sizes):
            await asyncio.sleep(0)

    async def hurry(seconds, sleep=asyncio.sleep):
        del seconds
        await sleep(0)

    def resident_bytes(pid):
        del pid
        taken.append(sizes[min(len(taken), len(sizes) - 1)])
        return taken[-1]

    monkeypatch.setattr(soak, "resident_bytes", resident_bytes)
    monkeypatch.setattr(soak.asyncio, "sleep", hurry)
    monkeypatch.setattr(soak.Traffic, "client", busy)
    args = argparse.Namespace(**{**vars(ARGS), "minutes": 1.0})
    problems = asyncio.run(soak.soak(args))
    assert problems == ["the server grew from 1000 to 1060 MB"][:num_problems]
