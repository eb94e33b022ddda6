"""Who shares cores, who may share memory, and how many cores processes of a host may use together."""

from __future__ import annotations

import os
import socket
import sys
from unittest import mock

import pytest

from sparseallreduce.runtime.hosts import (
    Limit,
    Place,
    count_cores,
    cpu_limits,
    label_hosts,
    same_host,
    same_memory,
    this_place,
    usable_cores,
)

BYTES = 256  # of an affinity
ALL = range(16)
BOOT, OTHER_BOOT = "0c49971a-a058-4898-8f0c-7b678db7ccce\n", "2f6bd3f1-60a3-44a9-9b7b-b7a5ac2fd5c2\n"


def mask(*cores):
    return sum(1 << core for core in cores).to_bytes(BYTES, "little")


def place(*cores, limits=()):
    return Place(b"a" * 8, b"m" * 8, mask(*cores), tuple(Limit(*limit) for limit in limits))


def machine(root, boot=BOOT, namespace=1, cgroup="", mounts="", files=()):
    """A file system as a process sees it; ``files`` are the paths of limits below /sys/fs/cgroup, and what they hold."""
    (root / "proc/self/ns").mkdir(parents=True)
    if boot:
        (root / "proc/sys/kernel/random").mkdir(parents=True)
        (root / "proc/sys/kernel/random/boot_id").write_text(boot)
        (root / "proc/self/ns/pid").symlink_to(f"pid:[{namespace}]")
    (root / "proc/self/cgroup").write_text(cgroup)
    (root / "proc/self/mountinfo").write_text("27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n" + mounts)
    (root / "sys/fs/cgroup").mkdir(parents=True)
    for path, text in dict(files).items():
        file = root / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def unified(root, path, files, mounted="/"):
    mounts = f"31 23 0:28 {mounted} /sys/fs/cgroup ro,nosuid shared:9 - cgroup2 cgroup rw,nsdelegate\n"
    return machine(root, cgroup=f"0::{path}\n", mounts=mounts, files=files)


def separate(root, path, files, mounted="/"):
    """Version 1: a tree a controller, of which that of processor time counts."""
    mounts = (
        "40 31 0:38 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
        f"41 31 0:39 {mounted} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
        "42 31 0:40 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    )
    cgroup = f"9:name=systemd:/user\n5:cpuset:/\n4:cpu,cpuacct:{path}\n0::/user\n"
    return machine(root, cgroup=cgroup, mounts=mounts, files={f"cpu,cpuacct/{name}": text for name, text in files.items()})


def millicores(root):
    return [limit.millicores for limit in cpu_limits(root)]


def test_the_boot_id_tells_who_shares_cores_and_the_namespace_of_process_ids_who_may_share_memory(tmp_path):
    rooms = [(BOOT, 1), (BOOT, 2), (OTHER_BOOT, 1), (BOOT, 1)]
    places = [this_place(machine(tmp_path / str(rank), boot, namespace)) for rank, (boot, namespace) in enumerate(rooms)]

    assert [same_host(places, rank) for rank in range(4)] == [[0, 1, 3], [0, 1, 3], [2], [0, 1, 3]]
    assert [same_memory(places, rank) for rank in range(4)] == [[0, 3], [1], [2], [0, 3]]


def test_containers_of_one_name_on_different_machines_are_on_different_hosts(tmp_path):
    with mock.patch.object(socket, "gethostname", return_value="worker"):
        places = [this_place(machine(tmp_path / boot.strip(), boot)) for boot in (BOOT, OTHER_BOOT)]
    assert same_host(places, 0) == same_memory(places, 0) == [0]


def test_several_names_of_one_machine_are_one_host(tmp_path):
    root, places = machine(tmp_path), []
    for name in ("one", "other"):
        with mock.patch.object(socket, "gethostname", return_value=name):
            places.append(this_place(root))
    assert same_host(places, 0) == same_memory(places, 0) == [0, 1]


def test_where_there_is_no_boot_id_the_host_name_stands_for_it(tmp_path):
    root, places = machine(tmp_path, boot=None), []
    for name in ("one", "other", "one"):
        with mock.patch.object(socket, "gethostname", return_value=name):
            places.append(this_place(root))
    assert same_host(places, 0) == same_memory(places, 0) == [0, 2]


def test_a_record_tells_the_others_where_a_process_runs():
    for limits in ((), [(11, 1500)], [(level, 5000 - level) for level in range(1, 5)]):
        told = place(0, 5, 2047, limits=limits)
        assert Place.unpack(told.pack()) == told
        assert len(told.pack()) == len(place().pack())
    deep = place(0, limits=[(level, 9000 - level) for level in range(1, 9)])
    assert Place.unpack(deep.pack()).limits == deep.limits[-4:]


def test_hosts_of_one_name_are_numbered():
    places = [Place(b"", memory, b"") for memory in (b"1", b"2", b"1", b"3", b"2")]
    assert label_hosts(["a", "a", "b", "c", "a"], places) == ["a", "a (2)", "a", "c", "a (2)"]


def test_ranks_use_what_any_of_them_may_use():
    assert count_cores([place(0), place(3), place(3)]) == 2
    assert count_cores([place(0, 1), place(1, 2), place(2000)]) == 4


def test_where_nothing_is_told_it_is_all_of_the_host():
    with mock.patch.object(os, "cpu_count", return_value=12):
        assert count_cores([place(), place()]) == 12
        with mock.patch.object(os, "sched_getaffinity", return_value={8 * BYTES, 8 * BYTES + 1}, create=True):
            assert count_cores([this_place()._replace(limits=())]) == 12


def test_a_system_that_does_not_tell_is_asked_for_nothing():
    with mock.patch.object(os, "sched_getaffinity", create=True):
        del os.sched_getaffinity
        assert this_place().affinity == mask()


@pytest.mark.skipif(sys.platform != "linux", reason="no affinity")
def test_a_process_may_be_bound():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert this_place().affinity == mask(min(before))
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert this_place().affinity == mask(*before)
    assert 1 <= usable_cores() <= len(before)


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 16), ("100000 100000", 1), ("150000 100000", 2), ("1000 1000000", 1), ("9000000 100000", 16)]
)
def test_a_limit_of_processor_time_counts_as_so_many_cores_rounded_up(tmp_path, quota, cores):
    root = unified(tmp_path, "/", {"cpu.max": quota + "\n"})
    assert count_cores([place(*ALL)._replace(limits=cpu_limits(root))]) == cores


def test_the_least_limit_on_the_way_up_counts(tmp_path):
    files = {"cpu.max": "max 100000", "pod/cpu.max": "200000 100000", "pod/a/cpu.max": "400000 100000", "pod/a/b/cpu.max": "50000 100000"}
    root = unified(tmp_path, "/pod/a/b", files | {"pod/other/cpu.max": "1000 100000"})
    limits = cpu_limits(root)
    assert millicores(root) == [2000, 500]
    assert limits[0].cgroup == (root / "sys/fs/cgroup/pod").stat().st_ino
    assert this_place(root).limits == limits


def test_limits_of_version_1(tmp_path):
    files = {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000", "a/cpu.cfs_quota_us": "150000\n", "a/cpu.cfs_period_us": "100000\n"}
    assert millicores(separate(tmp_path / "limited", "/a", files)) == [1500]
    assert millicores(separate(tmp_path / "free", "/", files)) == []


def test_a_container_sees_its_own_part_of_the_tree_alone(tmp_path):
    """With a namespace of cgroups the path begins there; without, the path is the host's, of which a part is mounted."""
    files = {"cpu.cfs_quota_us": "100000", "cpu.cfs_period_us": "100000"}
    files |= {"job/cpu.cfs_quota_us": "50000", "job/cpu.cfs_period_us": "100000"}
    assert millicores(separate(tmp_path / "mounted", "/docker/1f/job", files, mounted="/docker/1f")) == [1000, 500]
    assert millicores(separate(tmp_path / "elsewhere", "/", files, mounted="/docker/1f")) == [1000]
    assert millicores(unified(tmp_path / "namespace", "/", {"cpu.max": "100000 100000"}, mounted="/")) == [1000]
    assert millicores(unified(tmp_path / "outside", "/../2e", {"cpu.max": "100000 100000"}, mounted="/")) == [1000]


@pytest.mark.parametrize("text", ["", "max", "100000", "a b", "100000 0", "1 2 3"])
def test_what_is_no_limit_limits_nothing(tmp_path, text):
    assert millicores(unified(tmp_path, "/a", {"a/cpu.max": text})) == []


def test_names_of_other_mounts_do_not_matter(tmp_path):
    root = unified(tmp_path, "/a", {"a/cpu.max": "100000 100000"})
    mounts = root / "proc/self/mountinfo"
    odd = b"50 27 0:9 / /mnt/\xff\xc3 rw - fuse \xe9 rw\n51 27 0:9 / /mnt/a\xe2\x80\xa8b\x0bc rw - nfs d rw\n52 27\nx - cgroup2\n\n"
    mounts.write_bytes(odd + mounts.read_bytes())
    with (root / "proc/self/cgroup").open("ab") as file:
        file.write(b"3:memory:/\xff\nodd\n")
    assert millicores(root) == [1000]


def test_a_system_without_cgroups_limits_nothing(tmp_path):
    assert cpu_limits(tmp_path) == ()
    assert cpu_limits(machine(tmp_path)) == ()


def test_ranks_of_one_cgroup_share_its_limit_and_those_of_different_ones_add_up():
    one, other, half = [(7, 1000)], [(8, 1000)], [(9, 500)]
    assert count_cores([place(*ALL, limits=one), place(*ALL, limits=one)]) == 1
    assert count_cores([place(*ALL, limits=one), place(*ALL, limits=other)]) == 2
    assert count_cores([place(*ALL, limits=one), place(*ALL, limits=half), place(*ALL, limits=half)]) == 2
    assert count_cores([place(*ALL, limits=half), place(*ALL, limits=[(6, 500)])]) == 1


def test_limits_add_up_to_no_more_than_the_cores_nor_than_the_limit_around_them():
    assert count_cores([place(0, 1, limits=[(7, 2000)]), place(0, 1, limits=[(8, 2000)])]) == 2
    pod = (5, 3000)
    assert count_cores([place(*ALL, limits=[pod, (7, 2000)]), place(*ALL, limits=[pod, (8, 2000)])]) == 3
    assert count_cores([place(*ALL, limits=[pod, (7, 2000)]), place(*ALL, limits=[pod])]) == 3


def test_who_has_no_limit_uses_what_it_may_run_on():
    assert count_cores([place(*ALL, limits=[(7, 1000)]), place(0)]) == 2
    assert count_cores([place(*ALL, limits=[(7, 1000)]), place(*ALL)]) == 16
