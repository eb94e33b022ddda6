#!/bin/sh
# A network of several hosts on one machine, to measure what messages cost where they cross a wire.
#
#   tools/hosts.sh up HOSTS RATE [RANKS]      make HOSTS hosts; each sends and receives RATE at most, e.g. 1gbit or 200mbit
#   tools/hosts.sh run [--round-robin] MPIEXEC-ARGUMENTS
#                                             run a command on them:  tools/hosts.sh run -n 4 python program.py
#   tools/hosts.sh down                       remove them
#
# A host is for RANKS ranks, or for one: the first RANKS ranks are on host 0, the next RANKS on host 1, and so on, and after the last
# host it begins again. With --round-robin rank r is on host r mod HOSTS.
#
# A host has namespaces of its own for network, host name, IPC, process ids and mounts, and a /dev/shm of its own: its ranks can share
# memory with each other, and with no rank of another host. A bridge joins the hosts, and a token bucket (tc tbf) at both ends of each
# link holds it to RATE in either direction: the wire of a switch without contention inside. There is no delay beyond the queue's own,
# so that at 1gbit a short message takes some 20 microseconds, and 250 kB in both directions at once 2.05 ms. `run` starts MPICH's
# mpiexec ($MPIEXEC, or else the first of the path). Between hosts MPI talks over TCP; inside a host over shared memory if RANKS is above
# 1, else over TCP, too.
#
# All hosts share this machine's cores and memory, and have its boot id: what they compute competes, and the kernel's work for TCP with
# it. Figures are fair to communication as long as it, and not the cores, is what ranks wait for; take no more busy ranks than cores
# otherwise.
#
# Needs root and the programs ip and tc (iproute2), unshare and nsenter (util-linux). `up` replaces the last network. For several at a
# time give each a name of up to six letters ($HOSTS_NAME, "sar" by default) and a subnet ($HOSTS_SUBNET, 10.213.77).
set -eu

name=${HOSTS_NAME:-sar}
subnet=${HOSTS_SUBNET:-10.213.77}
bridge=${name}bridge
prefix=${name}host

fail() {
    echo "hosts.sh: $1" >&2
    exit 1
}

usage() {
    sed -n '4,7s/^# \{0,3\}//p' "$0" >&2
    exit 2
}

check_machine() {
    [ "$(id -u)" = 0 ] || fail "making namespaces needs root: run it under sudo"
    for program in ip tc unshare nsenter; do
        command -v $program >/dev/null || fail "$program is missing: install iproute2 and util-linux"
    done
    case $name in
    *[!a-z]* | ???????*) fail "HOSTS_NAME must be of up to six letters from a to z, not '$name'" ;;
    esac
}

check_number() {
    case $2 in
    '' | *[!0-9]*) usage ;;
    esac
    [ "$2" -ge 1 ] && [ "$2" -le 200 ] || fail "$1 must be from 1 to 200, not $2"
}

hosts() {
    ip netns list | sed -n "s/^\($prefix[0-9]*\).*/\1/p" | sort -V
}

down() {
    for host in $(hosts); do
        for pid in $(ip netns pids "$host"); do
            kill -KILL "$pid" 2>/dev/null || true # with the first process of a host end all the others of it
        done
        ip link del "$host" 2>/dev/null || true # which would go with its namespace, but some time after
        ip netns del "$host"
    done
    ip link del $bridge 2>/dev/null || true
}

# shape DEVICE RATE [NAMESPACE OPTIONS]
# What a link sends at once after a pause has to be little: with 64 kB and more at both ends, 250 kB took 0.3 ms instead of 2 ms. And
# the kernel must not hand over more in one piece, or it cuts the piece into packets, which takes the ranks' processor time.
shape() {
    device=$1 rate=$2
    shift 2
    ip "$@" link set "$device" gso_max_size 30000 || fail "this ip cannot limit the size of packets: take iproute2 5.18 or newer"
    tc "$@" qdisc add dev "$device" root tbf rate "$rate" burst 32kb latency 50ms ||
        fail "this kernel cannot shape $device to $rate: a rate is like 1gbit or 200mbit, and sch_tbf has to be there"
}

up() {
    count=$1 rate=$2 ranks=$3
    check_number HOSTS "$count"
    check_number RANKS "$ranks"
    down
    ip link add $bridge type bridge || fail "this kernel makes no bridge: it needs the module bridge, and the right to add devices"
    trap 'down' EXIT
    ip addr add $subnet.254/24 dev $bridge
    ip link set $bridge up alias "ranks $ranks" # which `run` reads
    number=0
    while [ $number -lt "$count" ]; do
        host=$prefix$number
        ip netns add $host || fail "this machine makes no network namespace: a container needs the capability SYS_ADMIN"
        ip link add $host type veth peer name eth0 netns $host
        ip link set $host master $bridge
        ip link set $host up
        ip -n $host addr add $subnet.$((number + 1))/24 dev eth0
        ip -n $host link set eth0 up
        ip -n $host link set lo up
        shape $host "$rate"
        shape eth0 "$rate" -n $host
        boot $host
        number=$((number + 1))
    done
    trap - EXIT
    echo "$count hosts at $rate: $subnet.1 to $subnet.$count"
}

# boot HOST
# Start the first process of a host, which keeps its namespaces until `down` ends it.
boot() {
    setsid nsenter --net="/run/netns/$1" unshare --uts --ipc --pid --mount --propagation slave --fork --mount-proc \
        "$(realpath "$0")" init "$1" </dev/null >/dev/null 2>&1 &
    until [ -n "$(first_process "$1")" ]; do
        kill -0 $! 2>/dev/null || fail "this machine makes no namespaces for IPC, process ids and mounts: a container needs SYS_ADMIN"
        sleep 0.02
    done
}

# The first process of a host, by its id outside, once the host is ready.
first_process() {
    for pid in $(ip netns pids "$1"); do
        case $(sed -n 's/^\(Name\|NSpid\):.*\t//p' "/proc/$pid/status" 2>/dev/null | paste -sd' ') in
        'sleep 1')
            echo "$pid"
            break
            ;;
        esac
    done
}

# What the first process of a host does before it sleeps. /sys has to be that of the network inside, with the control groups of before.
init() {
    hostname "$1"
    mount -t tmpfs shm /dev/shm
    mkdir /dev/shm/cgroup
    [ ! -d /sys/fs/cgroup ] || mount --rbind /sys/fs/cgroup /dev/shm/cgroup
    mount -t sysfs sysfs /sys
    [ ! -d /sys/fs/cgroup ] || mount --rbind /dev/shm/cgroup /sys/fs/cgroup
    umount -l /dev/shm/cgroup 2>/dev/null || true
    rmdir /dev/shm/cgroup
    exec sleep infinity
}

# MPICH calls this as it would call ssh, with options, a host and the words of a command.
agent() {
    while :; do
        case $1 in
        -*) shift ;;
        *) break ;;
        esac
    done
    host=$prefix$((${1##*.} - 1))
    shift
    exec nsenter --target "$(first_process "$host")" --net --uts --ipc --pid --mount sh -c 'eval "exec $*"' sh "$@"
}

run() {
    [ -n "$(hosts)" ] || fail "there are no hosts: make them with '$0 up 4 1gbit'"
    ranks=$(sed -n 's/^ranks //p' "/sys/class/net/$bridge/ifalias")
    block=:$ranks
    if [ "${1:-}" = --round-robin ]; then
        block=
        shift
    fi
    [ $# -gt 0 ] || usage
    [ "$ranks" -gt 1 ] || export MPIR_CVAR_NOLOCAL=1
    addresses=$(hosts | sed "s/$prefix//" | while read -r number; do echo "$subnet.$((number + 1))$block"; done | paste -sd,)
    UCX_TLS=tcp,self UCX_NET_DEVICES=eth0 exec "${MPIEXEC:-mpiexec}" \
        -launcher ssh -launcher-exec "$(realpath "$0")" -iface $bridge -hosts "$addresses" "$@"
}

case ${1:-} in
up)
    [ $# = 3 ] || [ $# = 4 ] || usage
    check_machine
    up "$2" "$3" "${4:-1}"
    ;;
down)
    check_machine
    down
    ;;
run)
    check_machine
    shift
    run "$@"
    ;;
init)
    [ $$ = 1 ] || usage # elsewhere than in a host it would change this machine
    init "$2"
    ;;
'' | -h | --help | help) usage ;;
-* | $subnet.*) agent "$@" ;;
*) usage ;;
esac
