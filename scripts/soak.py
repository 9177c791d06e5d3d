"""Random traffic with cancels against a running server: `python scripts/soak.py --url http://127.0.0.1:8000`.

Clients ask known questions, go on in conversations, send prompts that share a start, and hang up at random moments. At
the end nothing may be left: no request, no page, no slot; the server's memory must not have grown after the first
third, when caches are full; and every known question that was answered to the end must have been answered rightly, and
as the first time.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import pathlib
import random
import sys
import time
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.demo.questions import Question, is_right, question_from_json  # noqa: E402
from serving.option_types import OneLineParser, real, whole  # noqa: E402

QUESTIONS = ROOT / "demo" / "questions.jsonl"
GROWTH = 1.05  # of the server's memory after the warm-up


class Traffic:
    """What the clients share: the known answers and the counts."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.random = random.Random(args.seed)
        chosen = self.random.sample(known_questions(), args.questions)
        self.known = {question.question: question for question in chosen}
        self.questions = list(self.known)
        self.answers: dict[str, str] = {}
        self.counts: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []

    async def client(self, http: httpx.AsyncClient, until: float) -> None:
        """One client after another until the time is up."""
        kinds = (self.ask, self.converse, self.complete, self.cancel)
        while time.monotonic() < until:
            kind = self.random.choice(kinds)
            await kind(http)
            self.counts[kind.__name__] += 1

    async def chat(self, http: httpx.AsyncClient, messages: list[dict[str, str]], **fields: Any) -> str:
        body = {"model": self.args.model, "messages": messages, "thinking": False, "temperature": 0.0, **fields}
        answer = await http.post("/v1/chat/completions", json=body)
        answer.raise_for_status()
        return answer.json()["choices"][0]["message"]["content"] or ""

    async def ask(self, http: httpx.AsyncClient) -> None:
        """A known question; its answer must be right, and stay what it was."""
        question = self.random.choice(self.questions)
        messages = [{"role": "user", "content": question}]
        content = await self.chat(http, messages, max_tokens=120, thinking=True)
        if question not in self.answers and not is_right(self.known[question], content):
            self.wrong.append(f"{question} is answered {content!r}")
        if self.answers.setdefault(question, content) != content:
            self.wrong.append(f"{question} was {self.answers[question]!r}, now {content!r}")

    async def converse(self, http: httpx.AsyncClient) -> None:
        """A few turns over one history."""
        messages: list[dict[str, str]] = []
        for _ in range(self.random.randint(2, 4)):
            messages.append({"role": "user", "content": self.random.choice(self.questions)})
            messages.append({"role": "assistant", "content": await self.chat(http, messages, max_tokens=40)})

    async def complete(self, http: httpx.AsyncClient) -> None:
        """Token ids that share a start, sampled, with penalties now and then."""
        prefix = self.random.randrange(4)
        ids = [10 + (prefix * 37 + 11 * i) % 3000 for i in range(200)]
        ids += [self.random.randrange(10, 3000) for _ in range(self.random.randint(1, 150))]
        body = {
            "model": self.args.model,
            "prompt": ids,
            "max_tokens": self.random.randint(1, 40),
            "temperature": 1.0,
            "presence_penalty": self.random.choice((0.0, 0.5)),
            "return_token_ids": True,
        }
        (await http.post("/v1/completions", json=body)).raise_for_status()

    async def cancel(self, http: httpx.AsyncClient) -> None:
        """Hang up, before the first token or in the middle of the stream."""
        body = {
            "model": self.args.model,
            "messages": [{"role": "user", "content": self.random.choice(self.questions) * self.random.randint(1, 6)}],
            "max_tokens": 100,
            "stream": True,
        }
        patience = self.random.uniform(0.0, 2.0)
        try:
            async with asyncio.timeout(patience), http.stream("POST", "/v1/chat/completions", json=body) as answer:
                async for _ in answer.aiter_lines():
                    pass
        except TimeoutError:
            self.counts["cancelled"] += 1


async def soak(args: argparse.Namespace) -> list[str]:
    """Run; returns what is wrong."""
    traffic = Traffic(args)
    started = time.monotonic()
    until = started + 60 * args.minutes
    memory: list[int] = []
    if args.pid is None:
        print("the server's memory is not watched: give --pid")
    async with httpx.AsyncClient(base_url=args.url, timeout=600, trust_env=False) as http:
        clients = [asyncio.create_task(traffic.client(http, until)) for _ in range(args.clients)]
        while time.monotonic() < until and not any(task.done() for task in clients):
            await asyncio.sleep(min(15.0, max(0.0, until - time.monotonic())))
            memory.append(resident_bytes(args.pid))
            print(f"{time.monotonic() - started:.0f} s: {dict(traffic.counts)}, {memory[-1] / 1e6:.0f} MB", flush=True)
        await asyncio.gather(*clients)
        await asyncio.sleep(2)
        left = await gauges(http)
    problems = [f"{name} is {value:g} at the end" for name, value in left.items() if value]
    problems += traffic.wrong
    if memory and (first := memory[len(memory) // 3]) and memory[-1] > GROWTH * first:
        problems.append(f"the server grew from {first / 1e6:.0f} to {memory[-1] / 1e6:.0f} MB")
    print(json.dumps({"counts": traffic.counts, "known_questions": len(traffic.answers), "problems": problems}))
    return problems


async def refusal(args: argparse.Namespace) -> str | None:
    """What is wrong with the server that is named, if anything."""
    if args.pid is not None and not pathlib.Path(f"/proc/{args.pid}").exists():
        return f"argument --pid: {args.pid} is no running process. Give the server's, or leave it out."
    try:
        async with httpx.AsyncClient(base_url=args.url, timeout=30, trust_env=False) as http:
            served = [model["id"] for model in (await http.get("/v1/models")).raise_for_status().json()["data"]]
            await gauges(http)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        return f"argument --url: no server answers at {args.url!r} ({why}). Start it or correct the address."
    if args.model not in served:
        return f"argument --model: {args.model!r} is not served. Name {' or '.join(served)}."
    return None


async def gauges(http: httpx.AsyncClient) -> dict[str, float]:
    """What must be zero when nobody asks."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_pages_used", "state_slots_used")
    families = text_string_to_metric_families((await http.get("/metrics")).text)
    samples = {sample.name: sample.value for family in families for sample in family.samples}
    return {name: samples[f"k3jax_{name}"] for name in names}


def known_questions() -> list[Question]:
    """Those whose answers the demo model has learnt."""
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()
    return [question for line in lines if (question := question_from_json(json.loads(line))).split == "train"]


def resident_bytes(pid: int | None) -> int:
    """Memory of the server, 0 when its process is not known."""
    if pid is None:
        return 0
    for line in pathlib.Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return 1024 * int(line.split()[1])
    return 0


def main() -> int:
    """1 when something was wrong."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="demo", help="served name (default: demo)")
    parser.add_argument("--pid", type=whole(1), help="the server's process, to watch its memory")
    parser.add_argument("--minutes", type=real(above=0), default=30.0, help="default: 30")
    parser.add_argument("--clients", type=whole(1), default=6, help="default: 6")
    most = len(known_questions())
    parser.add_argument("--questions", type=whole(1, most), default=40, help="known questions to ask (default: 40)")
    parser.add_argument("--seed", type=whole(0), default=0)
    args = parser.parse_args()
    if why := asyncio.run(refusal(args)):
        parser.error(why)
    return 1 if asyncio.run(soak(args)) else 0


if __name__ == "__main__":
    sys.exit(main())
