"""How much memory is left, by files like those of Linux in a folder of the test's own."""

import math
import os

import pytest

from sparseallreduce.runtime.limits import memory_left

MACHINE = 64 << 30


@pytest.fixture
def system(tmp_path):
    """Writes files of a system, each with its text, and returns what they leave."""

    def write(files):
        for name, text in {"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable:   {MACHINE >> 10} kB\n", **files}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return memory_left(tmp_path)

    return write


def version_2(folder, most, taken, droppable=0):
    return {
        f"{folder}/memory.max": f"{most}\n",
        f"{folder}/memory.current": f"{taken}\n",
        f"{folder}/memory.stat": f"anon 5\ninactive_file {droppable}\nactive_file 1\nshmem 77\n",
    }


def version_1(folder, most, taken, droppable=0):
    return {
        f"{folder}/memory.limit_in_bytes": f"{most}\n",
        f"{folder}/memory.usage_in_bytes": f"{taken}\n",
        f"{folder}/memory.stat": f"cache 5\ninactive_file 3\ntotal_inactive_file {droppable}\ntotal_active_file 1\n",
    }


def test_without_a_limit_there_is_what_the_machine_has(system):
    assert system({"proc/self/cgroup": "0::/jobs/17\n", **version_2("sys/fs/cgroup/jobs/17", "max", 1000)}) == MACHINE


def test_a_limit_leaves_what_is_not_taken_and_what_can_be_dropped(system):
    assert system({"proc/self/cgroup": "0::/jobs/17\n", **version_2("sys/fs/cgroup/jobs/17", 10_000, 9000, 200)}) == 1201


def test_of_groups_in_groups_the_strictest_counts(system):
    groups = version_2("sys/fs/cgroup/jobs/17", "max", 100) | version_2("sys/fs/cgroup/jobs", 5000, 4000)
    assert system({"proc/self/cgroup": "0::/jobs/17\n", **groups}) == 1001


def test_in_a_container_that_sees_paths_of_the_host_its_own_group_counts(system):
    assert system({"proc/self/cgroup": "0::/docker/abc\n", **version_2("sys/fs/cgroup", 5000, 4500)}) == 501


@pytest.mark.parametrize("path", ["/jobs/17", "/"])
def test_groups_of_version_1(system, path):
    files = version_1(f"sys/fs/cgroup/memory{path}".rstrip("/"), 5000, 4000, 300)
    lines = f"9:name=systemd:/x\n4:cpu,memory:{path}\n0::/y\n"
    assert system({"proc/self/cgroup": lines, **files}) == 1301


def test_where_both_versions_are_mounted(system):
    files = version_2("sys/fs/cgroup/unified/y", 5000, 4000) | version_1("sys/fs/cgroup/memory/x", 5000, 4500)
    assert system({"proc/self/cgroup": "4:memory:/x\n0::/y\n", **files}) == 501


def test_files_that_say_nothing_set_no_limit(tmp_path, system):
    assert memory_left(tmp_path) == math.inf
    assert system({"proc/self/cgroup": "nonsense\n", "proc/meminfo": "MemAvailable:\n"}) == math.inf


def test_this_machine_has_some():
    assert 0 < memory_left() < math.inf or not os.path.exists("/proc/meminfo")
