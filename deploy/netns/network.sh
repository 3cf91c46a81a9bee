#!/usr/bin/env bash
# Several "machines" on one: network namespaces with addresses of their own, joined by a bridge.
#
#   network.sh up 3          namespaces octavo-0 to octavo-2 with 10.77.0.1 to 10.77.0.3; this host is 10.77.0.254
#   network.sh exec 1 CMD    run CMD on machine 1
#   network.sh cut 2         machine 2 is alone: no packet reaches it, none leaves it
#   network.sh join 2        as before
#   network.sh down          end every process on them and take everything away
#
# Needs root and iproute2. Touches nothing but interfaces and namespaces whose names begin with octavo-.
set -euo pipefail

NET=10.77.0
BRIDGE=octavo-br

die() {
    echo "network.sh: $*" >&2
    exit 1
}

check() {
    [[ $EUID -eq 0 ]] || die "must be root: network namespaces and bridges are the kernel's"
    command -v ip >/dev/null || die "the command ip is missing (Debian: apt-get install iproute2)"
    ip netns add octavo-probe 2>/dev/null || die "this kernel or container allows no network namespaces (CAP_SYS_ADMIN is needed)"
    ip netns del octavo-probe
}

machines() {
    ip netns list | awk '/^octavo-[0-9]/ {print $1}'
}

up() {
    check
    [[ -z "$(machines)" ]] || die "machines are there already; network.sh down takes them away"
    ip link add $BRIDGE type bridge || die "this kernel has no bridges"
    ip addr add $NET.254/24 dev $BRIDGE
    ip link set $BRIDGE up
    for ((i = 0; i < $1; i++)); do
        ip netns add "octavo-$i"
        ip link add "octavo-v$i" type veth peer name eth0 netns "octavo-$i"
        ip link set "octavo-v$i" master $BRIDGE up
        ip -n "octavo-$i" addr add "$NET.$((i + 1))/24" dev eth0
        ip -n "octavo-$i" link set eth0 up
        ip -n "octavo-$i" link set lo up
    done
}

down() {
    for machine in $(machines); do
        # Everything in it was started there.
        ip netns pids "$machine" | xargs -r kill -9
        ip netns del "$machine"
    done
    for link in $(ip -o link | awk -F': ' '/ octavo-v/ {sub(/@.*/, "", $2); print $2}'); do
        ip link del "$link"
    done
    ip link del $BRIDGE 2>/dev/null || true
}

case "${1:-}" in
up) up "${2:?how many machines?}" ;;
down) down ;;
cut) ip link set "octavo-v${2:?which machine?}" down ;;
join) ip link set "octavo-v${2:?which machine?}" up ;;
exec)
    machine=${2:?which machine?}
    shift 2
    exec ip netns exec "octavo-$machine" "$@"
    ;;
*) die "up N, down, cut K, join K or exec K COMMAND" ;;
esac
