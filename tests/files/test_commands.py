"""Commands name the file that they cannot read or write, in one line."""

import pytest
from click_runner import CliRunner
from strange import put

from sparseallreduce.cli import main

TEXT = "1 1:1\n-1 2:1\n1 3:1\n"

REPORTS = {
    "deep": b"[" * 100_000,
    "many digits": b'{"schema": 1, "command": "train", "epochs": ' + b"1" * 5000 + b"}",
    "a large number": b'{"schema": 1, "command": "train", "epochs": [{"epoch": ' + b"1" * 400 + b', "loss": 1}]}',
    "words": b'{"schema": 1, "command": "train", "epochs": ["epoch"]}',
    "numbers": b'{"schema": 1, "command": "train", "epochs": 3}',
    "a list as results": b'{"schema": 1, "command": "bench", "results": {"algorithms": 1, "dense": 2}}',
}


@pytest.mark.parametrize("what", ["pipe", "folder", "device", "loop", *REPORTS])
def test_a_report_that_cannot_be_drawn_is_named_in_one_line(tmp_path, what):
    pytest.importorskip("matplotlib")
    put(tmp_path / "report.json", what, REPORTS.get(what, b""))
    result = CliRunner().invoke(main, ["plot", str(tmp_path / "report.json"), str(tmp_path / "out.png")])
    assert result.exit_code == 1 and result.stderr.count("\n") == 1 and str(tmp_path / "report.json") in result.stderr, result.output
    assert not (tmp_path / "out.png").exists()


def test_a_report_that_is_damaged_is_named_among_others(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "rows.svm").write_text(TEXT)
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    CliRunner().invoke(main, ["train", str(tmp_path / "rows.svm"), "--epochs", "1", "--json", str(good)])
    bad.write_bytes(REPORTS["words"])
    result = CliRunner().invoke(main, ["plot", str(good), str(bad), str(tmp_path / "out.png")])
    assert f"{bad}: the report is damaged" in result.stderr and str(good) not in result.stderr


OUTPUTS = {
    "predict": ["predict", "{model}", "{data}", "--out"],
    "train": ["train", "{data}", "--epochs", "1", "--model-out"],
    "report": ["train", "{data}", "--epochs", "1", "--json"],
    "simulate": ["simulate", "--ranks", "2", "--size", "100", "--density", "0.1", "--json"],
    "plot": ["plot", "{report}"],
    "generate": ["generate", "uniform", "--samples", "10", "--features", "10"],
    "convert": ["convert", "{text}"],
}


@pytest.mark.parametrize("command", OUTPUTS)
@pytest.mark.parametrize("out", ["full", "link", "loop", "closed", "absent"])
def test_a_file_that_cannot_be_written_is_named(tmp_path, command, out):
    if command == "plot":
        pytest.importorskip("matplotlib")
    text, model, report = (tmp_path / name for name in ("rows.svm", "model.npz", "report.json"))
    text.write_text(TEXT)
    made = CliRunner().invoke(main, ["train", str(text), "--epochs", "1", "--model-out", str(model), "--json", str(report)])
    assert made.exit_code == 0, made.output
    (tmp_path / "link").symlink_to("/dev/full")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "closed").mkdir()
    path = {"full": "/dev/full", "closed": tmp_path / "closed", "absent": tmp_path / "absent" / "out"}.get(out, tmp_path / out)
    places = {"model": model, "data": text, "text": text, "report": report}
    result = CliRunner().invoke(main, [each.format(**places) for each in OUTPUTS[command]] + [str(path)])
    errors = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert result.exit_code == (2 if out == "closed" else 1), result.output
    assert len(errors) == 1 and (str(path) in errors[0] or (out == "link" and "/dev/full" in errors[0])), result.stderr
    assert not list(tmp_path.glob(".*")), "a part was left"
