"""The server as a process: start-up, exit codes, signals."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.api.served import strict_events
from tests.server.real_server import ServerProcess, launched

REPOSITORY = Path(__file__).parents[2]


@contextlib.contextmanager
def running(*flags: str, build: str = "ok") -> Iterator[ServerProcess]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("K3JAX_")}
    fake = ("--load-format", "fake", "--port", "0")
    with launched("tests.api.run_fake", *fake, *flags, environment=environment | {"TEST_BUILD": build}) as server:
        yield server


def run_to_exit(*flags: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "serving.run", *flags]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    return result.returncode, result.stderr


def test_http_answers_while_the_engine_is_built():
    with running(build="slow") as server, httpx.Client(base_url=server.url(), timeout=10) as http:
        assert http.get("/health").status_code == 200
        ready = http.get("/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "starting")
        assert ready.json()["reason"] == "building"
        refused = http.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "starting")
        assert int(refused.headers["Retry-After"]) > 0
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_status() == 0


def test_the_log_tells_configuration_url_and_a_request_to_copy():
    with running("--served-model-name", "kay", "--api-key", "secret") as server:
        server.wait_for("Ready. Try:")
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_status() == 0
    log = "".join(server.lines)
    assert "served_model_name=kay" in log
    assert "num_pages=" in log
    assert re.search(r"In effect: .*\bmax_num_seqs=\d+", log)
    assert "curl http://127.0.0.1:" in log
    assert "from openai import OpenAI" in log
    assert "secret" not in log


def test_a_build_that_fails_is_one_line_and_exit_2():
    with running(build="fail") as server:
        assert server.exit_status() == 2
    errors = [line for line in server.lines if " ERROR " in line]
    assert len(errors) == 1
    assert "model-00002-of-00002.safetensors is missing. Copy it." in errors[0]
    assert "Traceback" not in "".join(server.lines)


def test_running_requests_finish_after_sigterm_and_new_ones_get_503():
    with running() as server, httpx.Client(base_url=server.url(), timeout=20) as http:
        server.wait_for("Ready")
        body = {"prompt": "x", "stream": True, "max_tokens": 200, "ignore_eos": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            pieces = response.iter_raw()
            received = next(pieces)
            server.process.send_signal(signal.SIGTERM)
            server.wait_for("Shutting down")
            refused = httpx.post(server.url() + "/v1/completions", json={"prompt": "x"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            assert httpx.get(server.url() + "/ready").json()["status"] == "draining"
            received += b"".join(pieces)
        events = strict_events(received)
        assert events[-2]["choices"][0]["finish_reason"] == "length"
        assert server.exit_status() == 0


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_request_that_does_not_finish_in_time_is_reported(is_stream: bool):
    with running("--shutdown-timeout-s", "0.2") as server, httpx.Client(base_url=server.url(), timeout=20) as http:
        server.wait_for("Ready")
        body = {"prompt": "x", "stream": is_stream, "max_tokens": 4000, "ignore_eos": True}
        threading.Timer(0.5, server.process.send_signal, [signal.SIGINT]).start()
        response = http.post("/v1/completions", json=body)
        if is_stream:
            error = strict_events(response.content)[-2]["error"]
        else:
            assert response.status_code == 500
            error = response.json()["error"]
        assert "shutting down" in error["message"]
        assert server.exit_status() == 0
    assert any("1 requests did not finish" in line for line in server.lines)


def test_a_second_signal_does_not_wait():
    with running("--shutdown-timeout-s", "600") as server, httpx.Client(base_url=server.url(), timeout=20) as http:
        server.wait_for("Ready")
        body = {"prompt": "x", "stream": True, "max_tokens": 4000, "ignore_eos": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            pieces = response.iter_raw()
            received = next(pieces)
            server.process.send_signal(signal.SIGINT)
            server.wait_for("Shutting down")
            server.process.send_signal(signal.SIGINT)
            received += b"".join(pieces)
        assert "error" in strict_events(received)[-2]
        assert server.exit_status() == 0


def test_a_port_in_use_is_one_line_and_exit_2():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, stderr = run_to_exit("--load-format", "fake", "--port", str(taken.getsockname()[1]))
    assert status == 2
    assert stderr.count("\n") == 1
    assert "--port" in stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "/no/such/folder"], "--model='/no/such/folder'"),
        (["--model", "tests/data"], "config.json"),
        (["--modle", "demo"], "Did you mean --model?"),
        (["--dcp", "2"], "--dcp=2"),
        (["--port", "eighty"], "--port"),
        (
            ["--draft", "/no/such/folder"],
            "--draft='/no/such/folder' is no folder. Use `none`, or give the folder of a DSpark",
        ),
        (["--draft", "NONE"], "--draft='NONE' is no folder. Write `none` to draft nothing"),
        (
            ["--draft", "demo"],
            "--draft='demo' is no folder of a draft. The demo's own comes with --model demo: leave out",
        ),
        (["--draft", "demo/draft/config.json"], "is a file. Give the folder that it lies in: --draft='demo/draft'."),
        (["--draft", "tests/data"], "--draft='tests/data' has no config.json. Give the folder of a whole DSpark"),
        (["--draft", "x" * 300], " cannot be read: File name too long. Give the folder"),
    ],
)
def test_a_configuration_mistake_is_one_line_and_exit_2(flags: list[str], words: str):
    status, stderr = run_to_exit(*flags)
    assert status == 2
    assert stderr.count("\n") == 1
    assert words in stderr
