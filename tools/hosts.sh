#!/bin/sh
# A network of several hosts on one machine, to measure what messages cost where they cross a wire.
#
#   tools/hosts.sh up HOSTS RATE              make HOSTS hosts; each sends and receives RATE at most, e.g. 1gbit or 200mbit
#   tools/hosts.sh run MPIEXEC-ARGUMENTS      run a command on them, in turn:  tools/hosts.sh run -n 4 python program.py
#   tools/hosts.sh down                       remove them
#
# A host is a network namespace with an own host name. A bridge joins them, and a token bucket (tc tbf) at both ends of each link
# holds it to RATE in either direction: the wire of a switch without contention inside. There is no delay beyond the queue's own, so
# that at 1gbit a short message takes some 20 microseconds, and 250 kB in both directions at once 2.05 ms. `run` starts MPICH's
# mpiexec ($MPIEXEC, or else the first of the path) with one rank a host in turn (rank r on host r mod HOSTS), and lets ranks talk
# over TCP alone, even on the same host.
#
# All hosts share this machine's cores and memory: what they compute competes, and the kernel's work for TCP with it. Figures are
# fair to communication as long as it, and not the cores, is what ranks wait for; take no more busy ranks than cores otherwise.
#
# Needs root and the programs ip and tc (iproute2) and unshare (util-linux). One network at a time: `up` replaces the last one.
set -eu

bridge=sarbridge
prefix=sarhost
subnet=10.213.77

fail() {
    echo "hosts.sh: $1" >&2
    exit 1
}

usage() {
    sed -n '4,6s/^# *//p' "$0" >&2
    exit 2
}

check_machine() {
    [ "$(id -u)" = 0 ] || fail "making network namespaces needs root: run it under sudo"
    for program in ip tc unshare; do
        command -v $program >/dev/null || fail "$program is missing: install iproute2 and util-linux"
    done
}

hosts() {
    ip netns list | sed -n "s/^\($prefix[0-9]*\).*/\1/p" | sort -V
}

down() {
    for host in $(hosts); do
        for pid in $(ip netns pids "$host"); do
            kill "$pid" 2>/dev/null || true
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
    count=$1 rate=$2
    case $count in
    '' | *[!0-9]*) usage ;;
    esac
    [ "$count" -ge 1 ] && [ "$count" -le 200 ] || fail "HOSTS must be from 1 to 200, not $count"
    down
    ip link add $bridge type bridge || fail "this kernel makes no bridge: it needs the module bridge, and the right to add devices"
    trap 'down' EXIT
    ip addr add $subnet.254/24 dev $bridge
    ip link set $bridge up
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
        number=$((number + 1))
    done
    trap - EXIT
    echo "$count hosts at $rate: $subnet.1 to $subnet.$count"
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
    exec ip netns exec "$host" unshare --uts sh -c 'hostname "$1"; shift; eval "exec $*"' sh "$host" "$@"
}

run() {
    [ -n "$(hosts)" ] || fail "there are no hosts: make them with '$0 up 4 1gbit'"
    addresses=$(hosts | sed "s/$prefix//" | while read -r number; do echo "$subnet.$((number + 1))"; done | paste -sd,)
    [ $# -gt 0 ] || usage
    UCX_TLS=tcp,self UCX_NET_DEVICES=eth0 MPIR_CVAR_NOLOCAL=1 exec "${MPIEXEC:-mpiexec}" \
        -launcher ssh -launcher-exec "$(realpath "$0")" -iface $bridge -hosts "$addresses" "$@"
}

case ${1:-} in
up)
    [ $# = 3 ] || usage
    check_machine
    up "$2" "$3"
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
'' | -h | --help | help) usage ;;
-* | $subnet.*) agent "$@" ;;
*) usage ;;
esac
