#!/bin/busybox sh
# What a DHCP lease means for the tiny guest: address, MTU, routes, resolver. Run by udhcpc, which
# passes the lease in the environment.

export PATH=/usr/sbin:/usr/bin:/sbin:/bin
RESOLVER=/run/chv/resolv.$interface

routes() {
    read -r index <"/sys/class/net/$interface/ifindex"
    metric=$((100 + index))
    ip route flush dev "$interface" metric $metric 2>/dev/null
    if [ -n "$staticroutes" ]; then # RFC 3442: they replace the router option
        set -- $staticroutes
        while [ $# -ge 2 ]; do
            ip route add "$1" via "$2" dev "$interface" metric $metric onlink
            shift 2
        done
    elif [ -n "$router" ]; then
        ip route add default via "${router%% *}" dev "$interface" metric $metric onlink
    fi
}

resolver() {
    : >"$RESOLVER"
    [ -n "$search$domain" ] && echo "search ${search:-$domain}" >>"$RESOLVER"
    for server in $dns; do echo "nameserver $server" >>"$RESOLVER"; done
    cat /run/chv/resolv.* >/etc/resolv.conf.new
    mv /etc/resolv.conf.new /etc/resolv.conf
}

case "$1" in
deconfig)
    ip -4 addr flush dev "$interface"
    rm -f "$RESOLVER"
    ;;
bound | renew)
    [ -z "$mtu" ] || ip link set dev "$interface" mtu "$mtu"
    if ! ip -4 -o addr show dev "$interface" | grep -qF " $ip/$mask "; then
        ip -4 addr flush dev "$interface"
        ip addr add "$ip/$mask" dev "$interface"
        echo "chv-guest: net $interface $ip/$mask" >/dev/console
    fi
    routes
    resolver
    ;;
esac
