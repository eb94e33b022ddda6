"""What a rank prints before it aborts is read by the launcher first."""

import os
import select
import subprocess
import sys
import time

CHILD = """
import sys
from pathlib import Path
from sparseallreduce.runtime.output import flush_to_launcher
print("why", file=sys.stderr, end="")
flush_to_launcher(patience=float(sys.argv[2]), afterwards=0)
Path(sys.argv[1]).touch()
"""


def child(mark, patience, stderr):
    command = [sys.executable, "-c", CHILD, str(mark), str(patience)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr)


def test_a_rank_goes_on_once_its_output_has_been_read(tmp_path):
    mark = tmp_path / "mark"
    reading, writing = os.pipe()
    process = child(mark, 60, writing)
    os.close(writing)
    select.select([reading], [], [])
    time.sleep(0.3)
    assert not mark.exists()
    assert os.read(reading, 100) == b"why"
    assert process.wait() == 0 and mark.exists()
    os.close(reading)


def test_a_launcher_that_does_not_read_is_not_waited_for_without_end(tmp_path):
    mark = tmp_path / "mark"
    reading, writing = os.pipe()
    process = child(mark, 0.1, writing)
    assert process.wait() == 0 and mark.exists()
    os.close(reading)
    os.close(writing)


def test_output_that_is_no_pipe_is_not_waited_for(tmp_path):
    with (tmp_path / "file").open("wb") as file:
        process = child(tmp_path / "mark", 600, file)
    assert process.wait() == 0 and (tmp_path / "file").read_bytes() == b"why"
