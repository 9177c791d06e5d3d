"""A conversion that is killed, stopped or fails half way can go on, and nothing half-written is taken for whole."""

import os
import signal
import subprocess
import sys
import threading

import pytest

import k3jax
from k3jax import convert
from k3jax.loading import Progress
from scripts import convert_checkpoint
from scripts.convert.conversion import stopping
from tests.conftest import REPOSITORY
from tests.conversion.conversion_data import contents, leftovers, mini, shard
from tests.conversion.kill_repeatedly import KILLS, OPTIONS, num_records

BOTH = pytest.mark.parametrize("convert_to", [convert.to_orbax, convert.to_hf])


def stop_after(fraction: float) -> convert.Watch:
    """A watch that stops the conversion when that much was read."""
    stop = threading.Event()

    def progress(state: Progress) -> None:
        if state.fraction >= fraction:
            stop.set()

    return convert.Watch(progress=progress, stop=stop)


@pytest.mark.parametrize(("command", "num_shards", "seed"), [("to-orbax", 3, 11), ("to-hf", 100, 12)])
def test_a_conversion_killed_at_ten_random_points_ends_with_the_same_bytes(tmp_path, command, num_shards, seed):
    source, target = mini(tmp_path / "source", num_shards=num_shards), tmp_path / "out"
    script = [sys.executable, REPOSITORY / "tests/conversion/kill_repeatedly.py", command, source, target, str(seed)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(script, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    records = [int(line) for line in result.stdout.split()]
    assert len(records) == KILLS and records == sorted(records) and records[-1] > 2, "units were done twice or never"
    partial = tmp_path / "out.partial"
    with pytest.raises(k3jax.LoadError, match="unfinished conversion; run its command again"):
        k3jax.load(partial)
    assert any("unfinished conversion" in difference for difference in convert.verify(partial))

    resumed = []
    run = {"to-orbax": convert.to_orbax, "to-hf": convert.to_hf}[command]
    run(source, target, OPTIONS, convert.Watch(announce=resumed.append))
    assert resumed[0].resumed_bytes > 0
    assert leftovers(target) == ["out"]
    assert convert.verify(source, target) == []
    if command == "to-hf":
        assert contents(target) == contents(source)
    else:
        convert.to_hf(target, tmp_path / "back")
        assert contents(tmp_path / "back") == contents(source)
        assert not list(target.rglob("*orbax-checkpoint-tmp*"))


@BOTH
def test_a_stopped_conversion_goes_on_where_it_stopped(tmp_path, convert_to):
    source, target = mini(tmp_path / "source"), tmp_path / "out"
    with pytest.raises(convert.InterruptedConversion):
        convert_to(source, target, OPTIONS, stop_after(0.7))
    assert leftovers(target) == ["out.partial", "out.partial.journal"]
    done = num_records(tmp_path / "out.partial.journal")
    assert done > 0
    seen = []
    convert_to(source, target, OPTIONS, convert.Watch(progress=seen.append))
    assert 0 < seen[0].bytes_read < seen[0].bytes_total == seen[-1].bytes_read
    assert leftovers(target) == ["out"] and convert.verify(source, target) == []


def test_a_journal_line_that_was_cut_off_counts_for_nothing(tmp_path):
    source, target, journal = mini(tmp_path / "source"), tmp_path / "out", tmp_path / "out.partial.journal"
    with pytest.raises(convert.InterruptedConversion):
        convert.to_orbax(source, target, OPTIONS, stop_after(0.5))
    journal.write_bytes(journal.read_bytes()[:-7])
    convert.to_orbax(source, target, OPTIONS)
    assert convert.verify(source, target) == []


@BOTH
def test_another_source_does_not_go_on_with_the_first_ones_work(tmp_path, convert_to):
    source, target = mini(tmp_path / "source"), tmp_path / "out"
    with pytest.raises(convert.InterruptedConversion):
        convert_to(source, target, OPTIONS, stop_after(0.1))
    before = contents(tmp_path / "out.partial")
    os.utime(shard(source, 1), ns=(1, 1))  # as if it had been written anew
    with pytest.raises(convert.ConversionError, match="Remove it and out.partial.journal to start again"):
        convert_to(source, target, OPTIONS)
    other = convert.to_hf if convert_to is convert.to_orbax else convert.to_orbax
    with pytest.raises(convert.ConversionError, match="unfinished conversion of"):
        other(source, target, OPTIONS)
    assert contents(tmp_path / "out.partial") == before


def test_two_processes_do_not_convert_into_one_target(tmp_path):
    source, target = mini(tmp_path / "source"), tmp_path / "out"
    seen = []

    def announce(need: convert.Need) -> None:
        with pytest.raises(convert.ConversionError, match="another process is converting") as error:
            convert.to_orbax(source, target)
        seen.append(error)

    convert.to_orbax(source, target, watch=convert.Watch(announce=announce))
    assert seen and convert.verify(source, target) == []


@BOTH
def test_a_unit_damaged_between_two_runs_is_not_taken_for_whole(tmp_path, convert_to):
    source, target = mini(tmp_path / "source"), tmp_path / "out"
    with pytest.raises(convert.InterruptedConversion):
        convert_to(source, target, OPTIONS, stop_after(0.7))
    files = sorted((tmp_path / "out.partial").rglob("c.0*" if convert_to is convert.to_orbax else "*.safetensors"))
    files[0].write_bytes(b"")
    with pytest.raises(convert.ConversionError, match="is not what was written into it"):
        convert_to(source, target, OPTIONS)
    assert not target.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_to_stop(number):
    before = signal.getsignal(number)
    with stopping() as stop:
        os.kill(os.getpid(), number)
        assert stop.wait(5)
    assert signal.getsignal(number) is before


def test_the_command_says_how_to_go_on_and_does(tmp_path, capsys, monkeypatch):
    source, target = mini(tmp_path / "source"), tmp_path / "out"
    real = convert.Watch.__init__
    arguments = ["to-orbax", str(source), str(target)]

    def interrupting(self, **fields):
        def announce(need: convert.Need) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

        real(self, **{**fields, "announce": announce})

    with monkeypatch.context() as patch:
        patch.setattr(convert.Watch, "__init__", interrupting)
        assert convert_checkpoint.main(arguments) == 130
    assert f"run the same command again to go on with {target}.partial" in capsys.readouterr().err
    assert convert_checkpoint.main(arguments) == 0
    captured = capsys.readouterr()
    assert "needs at most" in captured.err and "100 %" in captured.err and f"{target} is complete" in captured.out
    assert convert.verify(source, target) == []
