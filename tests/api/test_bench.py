"""serving.bench against servers whose pace and words are known."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.bench import HEADER, BenchConfig, Level, main, measure, percentile, row
from serving.bench_client import BenchError, Reply
from serving.fake_executor import Fault
from tests.api.served import LIMITS, serve
from tests.k3jax.tokenizer_data import model_ids

END = "<|close|>message<|sep|><|end_of_msg|>"
ANSWER = model_ids(f"Let me see.<|close|>think<|sep|><|open|>response<|sep|>It is Oslo.<|close|>response<|sep|>{END}")
DELAY_S = 0.01


@pytest.fixture(scope="module")
def paced():
    """A server that takes at least DELAY_S for every step."""
    with serve(says=ANSWER, delay_s=DELAY_S) as served:
        yield served


def measured(**settings: Any) -> list[dict[str, Any]]:
    levels: list[Level] = []
    asyncio.run(measure(BenchConfig(**settings), levels.append))
    return [level.figures() for level in levels]


@contextlib.contextmanager
def scripted_stream(*pieces: str | float) -> Iterator[str]:
    """A server that answers every chat with these chunks; a number is a pause in seconds."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._start()
            self.wfile.write(b'{"data": [{"id": "other"}]}')

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self._start()
            for piece in pieces:
                if isinstance(piece, str):
                    self.wfile.write(f"data: {piece}\n\n".encode())
                else:
                    time.sleep(piece)

        def _start(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join(10)


def delta(**fields: Any) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": fields}]})


def test_every_token_of_every_answer_is_counted(paced):
    figures = measured(url=paced.url, concurrency=(1, 3), num_requests=6)
    for level in figures:
        assert level["requests"] == 6
        assert level["errors"] == 0
        assert level["output_tokens"] == 6 * len(ANSWER)
        assert level["output_tokens_per_s"] == pytest.approx(6 * len(ANSWER) / level["wall_s"])


def test_times_are_at_least_what_the_steps_take(paced):
    """No clock error can make a server look faster than its device."""
    [level] = measured(url=paced.url, concurrency=(2,), num_requests=2)
    steps = len(ANSWER)
    assert level["ttft_median_s"] >= DELAY_S
    assert level["tpot_median_s"] >= 0.9 * DELAY_S
    assert level["latency_median_s"] >= steps * DELAY_S
    assert level["wall_s"] >= steps * DELAY_S


def test_a_level_keeps_as_many_requests_running_as_it_says_and_no_more():
    seen: list[int] = []
    with serve(says=ANSWER, delay_s=0.003) as served:
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(0.001):
                stats = served.engine.stats()
                seen.append(stats.num_running + stats.num_waiting)

        watcher = threading.Thread(target=watch)
        watcher.start()
        measured(url=served.url, concurrency=(4,), num_requests=12)
        stop.set()
        watcher.join(10)
    assert max(seen) == 4


def test_answers_end_at_max_tokens_and_ignore_eos_makes_them_go_on(paced):
    [short] = measured(url=paced.url, concurrency=(2,), num_requests=2, max_tokens=3)
    assert short["output_tokens"] == 6
    length = len(ANSWER) + 4
    [long] = measured(url=paced.url, concurrency=(2,), num_requests=2, max_tokens=length, ignore_eos=True)
    assert long["output_tokens"] == 2 * length


def test_time_to_first_token_does_not_end_at_a_role_without_text():
    usage = json.dumps({"choices": [], "usage": {"completion_tokens": 7}})
    with scripted_stream(delta(role="assistant"), 0.05, delta(content="a"), delta(content="b"), usage, "[DONE]") as url:
        [level] = measured(url=url, concurrency=(1,), num_requests=1)
    assert level["ttft_median_s"] >= 0.05
    assert level["output_tokens"] == 7


def test_a_server_that_sends_no_usage_is_measured_by_its_pieces():
    with scripted_stream(delta(content="a"), delta(reasoning_content="b"), delta(content="c"), "[DONE]") as url:
        [level] = measured(url=url, concurrency=(1,), num_requests=2)
    assert level["output_tokens"] == 6


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ((delta(content="a"),), "ended without [DONE]"),
        (("[DONE]",), "the answer was empty"),
        (("nothing of the kind", "[DONE]"), "not an OpenAI stream: nothing of the kind"),
        (('{"error": {"message": "out of luck"}}',), "out of luck"),
    ],
)
def test_a_broken_stream_is_no_measurement(pieces, message, capsys):
    with scripted_stream(*pieces) as url:
        assert main(["--url", url]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_request_that_fails_is_counted_as_an_error_and_makes_the_exit_status_one(capsys):
    """The warm-up passes; one later step loses its row."""
    with serve(says=ANSWER, faults=[Fault(step=len(ANSWER) + 6, kind="nan")]) as served:
        status = main(["--url", served.url, "--concurrency", "1", "--requests", "3"])
    shown = capsys.readouterr()
    assert status == 1
    assert shown.out.splitlines()[1].split()[1] == "2"
    assert shown.out.splitlines()[1].split()[-1] == "1"
    assert shown.err.startswith("error at concurrency 1: ")


def test_a_level_ends_at_max_seconds_and_counts_what_was_cut_off():
    with scripted_stream(delta(content="a"), 0.4, "[DONE]") as url:
        [level] = measured(url=url, concurrency=(2,), num_requests=50, max_seconds=0.6)
    assert level["requests"] == 2
    assert level["errors"] == 2
    assert level["first_error"] == "unfinished after --max-seconds 0.6"
    assert level["wall_s"] < 2


def test_the_table_and_the_json_file_tell_the_same_figures(paced, tmp_path, capsys):
    path = tmp_path / "figures.json"
    assert main(["--url", paced.url, "--concurrency", "1,2", "--requests", "2", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    assert [level["concurrency"] for level in figures] == [1, 2]
    assert capsys.readouterr().out.splitlines()[:3] == [HEADER, *map(row, figures)]


def test_prompts_come_from_the_file_line_by_line(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("first é\n\n  \nsecond\n")
    seen: list[tuple[int, ...]] = []

    def says(prompt: tuple[int, ...]) -> list[int]:
        if not seen or seen[-1] != prompt:
            seen.append(prompt)
        return ANSWER

    with serve(says=says) as served:
        assert main(["--url", served.url, "--concurrency", "1", "--requests", "3", "--prompts", str(path)]) == 0
        shown = [served.post("/detokenize", {"tokens": list(prompt)}).json()["prompt"] for prompt in seen]
    # The warm-up asks the first one too, and the file begins anew after its last line.
    words = ["first é" if "first é" in text else "second" for text in shown]
    assert words == ["first é", "second", "first é"]


def test_fewer_requests_than_clients_are_noted(paced, capsys):
    assert main(["--url", paced.url, "--concurrency", "3", "--requests", "2"]) == 0
    assert "2 requests never keep 3 clients busy" in capsys.readouterr().out


def test_a_refusal_is_told_in_the_servers_words(capsys):
    with serve(says=ANSWER) as served:
        assert main(["--url", served.url, "--max-tokens", str(LIMITS.max_model_len)]) == 2
    error = capsys.readouterr().err
    assert "HTTP 400" in error and "max_tokens" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "127.0.0.1:8000"], "no HTTP address"),
        (["--url", "http://127.0.0.1:1"], "http://127.0.0.1:1 does not answer"),
        (["--url", "http://127.0.0.1:99999999"], "no HTTP address"),
        (["--concurrency", "0,4"], "--concurrency="),
        (["--requests", "0"], "--requests=0"),
        (["--max-seconds", "-1"], "--max-seconds=-1.0"),
        (["--prompts", "/nowhere/prompts.txt"], "/nowhere/prompts.txt"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_two(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_machine_without_httpx_is_told_what_to_install():
    program = (
        "import importlib.util as u, sys; find = u.find_spec; "
        "u.find_spec = lambda name, *rest: None if name == 'httpx' else find(name, *rest); "
        "from serving.bench import main; sys.exit(main([]))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert result.stderr == "error: serving.bench needs httpx. Install it: pip install httpx\n"


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_percentiles_agree_with_numpy(values, share):
    assert percentile(values, share) == pytest.approx(np.percentile(values, 100 * share), rel=1e-9, abs=1e-9)


def test_a_level_without_any_answer_has_no_figures_but_still_a_row():
    level = Level(concurrency=2, errors=["refused"], wall_s=1.0).figures()
    assert level["output_tokens_per_s"] is None
    assert level["ttft_median_s"] is None
    assert row(level).split() == ["2", "0", "-", "-", "-", "-", "-", "-", "-", "1"]


def test_time_per_token_leaves_the_first_token_out():
    reply = Reply(num_tokens=5, arrivals_s=(1.0, 1.5, 3.0), latency_s=3.25)
    assert reply.seconds_per_token == 0.5
    assert list(reply.gaps_s) == [0.5, 1.5]
    assert Reply(num_tokens=1, arrivals_s=(1.0,), latency_s=1.0).seconds_per_token is None


def test_a_configuration_without_prompts_is_refused():
    with pytest.raises(BenchError, match="one prompt a line"):
        BenchConfig(prompts=())
