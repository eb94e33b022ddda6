"""The measurements of ``bench`` with streams, or gradients and residuals, of the device."""

import json

import device_arrays as xp
import gpu
import numpy as np
import pytest
from simulated import stand_in

import sparseallreduce as sar
from sparseallreduce.cli import lossy_steps
from sparseallreduce.cli.bench import Setting, measure


@pytest.mark.parametrize("non_blocking", [False, True])
def test_streams_are_made_on_the_device_and_results_are_right(monkeypatch, non_blocking):
    seen = []
    name = "iallreduce" if non_blocking else "allreduce"
    right = getattr(sar, name)
    monkeypatch.setattr(sar, name, lambda stream, *rest, **options: seen.append(stream.on_device) or right(stream, *rest, **options))
    setting = Setting(50, 0.2, "float32", "sum", 2, 2, 0, non_blocking, False)

    measured = measure(setting, ["auto", "dense"], sar.SERIAL, xp=xp)

    assert seen == [True] * 12
    assert [measured[name].faults for name in ("auto", "dense")] == [[], []]
    assert measured["dense"].density == 0.2


@stand_in
@pytest.mark.parametrize("non_blocking", [False, True])
def test_gradients_and_residuals_lie_on_the_device_and_nothing_is_lost(monkeypatch, non_blocking):
    seen, finished = [], []
    monkeypatch.setattr(xp.cuda.Device, "synchronize", lambda self: finished.append(1))
    right = lossy_steps._timed_step
    monkeypatch.setattr(lossy_steps, "_timed_step", lambda feedback, *rest: seen.append(type(feedback.residual)) or right(feedback, *rest))
    setting = lossy_steps.LossySetting(60, 0.1, "float32", 2, 2, 0, non_blocking)

    copies, dense, measured = lossy_steps.measure(setting, ["topka", "oktopk"], sar.SERIAL, xp=xp)
    _, _, of_host = lossy_steps.measure(setting, ["topka", "oktopk"], sar.SERIAL)

    assert seen == 8 * [xp.ndarray] + 8 * [np.ndarray] and len(copies) == len(dense) == 4
    assert len(finished) == 4 + 8  # copies and steps
    for name, each in measured.items():
        assert each.faults == [] and each.contributed == of_host[name].contributed > 0, name
        assert (each.bytes_sent == of_host[name].bytes_sent).all(), name


@stand_in
def test_the_figures_of_a_gpu_can_all_be_measured(tmp_path, capsys):
    path = tmp_path / "out.json"
    assert gpu.main(["--simulated", "--power", "6", "--density", "0.1", "--repeats", "1", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["simulated"]
    rows = {row["what"]: row for row in report["rows"]}
    assert set(rows) >= {"copy", "exact k-th magnitude", "merge of 2 streams", "scatter, by sectors touched", "gaps, read"}
    assert {name for name in rows if name.startswith("2 ranks")} == {
        *(f"2 ranks: OkTopk step{part}" for part in ("", ", kernels", ", copies", ", messages")),
        "2 ranks: exact sum, auto",
        "2 ranks: dense Allreduce by the host",
    }
    assert all(row["seconds"] > 0 for row in rows.values())
    assert (rows["copy"]["size"], rows["copy"]["k"], rows["copy"]["copies"], rows["copy"]["bytes"]) == (64, 6, 1.0, 512)
    shown, told = capsys.readouterr()
    assert "GB/s" in shown and told == "numba's simulator: times say nothing of any GPU\n"
