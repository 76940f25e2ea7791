#!/bin/busybox sh
# The first process of the tiny guest, and its only service manager.
#
# Lines that start with "chv-guest:" on the console are for machines: do not reword them.
# Numbers after them are seconds since the kernel started. There is no shell on the console.

export PATH=/usr/sbin:/usr/bin:/sbin:/bin
HOST_KEY=/etc/dropbear/dropbear_ed25519_host_key

say() { echo "chv-guest: $*" >/dev/console; }
now() { read -r NOW _ </proc/uptime; }

mount_basics() {
    mount -t sysfs -o nosuid,nodev,noexec sysfs /sys
    mount -t devtmpfs -o nosuid,mode=0755 devtmpfs /dev
    mkdir -p /dev/pts /dev/shm
    mount -t devpts -o nosuid,noexec,gid=5,mode=620,ptmxmode=666 devpts /dev/pts
    mount -t tmpfs -o nosuid,nodev,mode=0755 tmpfs /run
    mount -t tmpfs -o nosuid,nodev,mode=1777 tmpfs /tmp
    mount -t tmpfs -o nosuid,nodev,mode=1777 tmpfs /dev/shm
    mkdir -p /run/chv
}

load_modules() {
    while read -r module; do
        insmod "/lib/chv/modules/$module" || say "module $module failed"
    done <"/lib/chv/modules.$1"
}

# Disks appear while their driver probes; a guest without any disk has no seed to wait for.
find_seed() {
    tries=0
    while [ $tries -lt 30 ]; do
        SEED=$(findfs LABEL=cidata 2>/dev/null) && return 0
        set -- /sys/block/*
        [ -e "$1" ] || [ $tries -lt 3 ] || return 1
        tries=$((tries + 1))
        sleep 0.1
    done
    return 1
}

apply_seed() {
    find_seed || return 1
    mount -t iso9660 -o ro,nosuid,nodev,noexec "$SEED" /mnt || return 1
    (umask 077 && tar -xpf /mnt/chv-seed.tar -C /)
    applied=$?
    umount /mnt
    return $applied
}

set_hostname() {
    read -r NAME </etc/hostname
    hostname "$NAME"
    echo "127.0.0.1 localhost" >/etc/hosts
    echo "127.0.1.1 $NAME" >>/etc/hosts
}

# /etc/chv/net: lines "MAC ADDRESS/PREFIX GATEWAY DNS[,DNS] SEARCH", with - for what is not given.
static_network() {
    [ -f /etc/chv/net ] || return 1
    while read -r mac address gateway servers search; do
        [ "$mac" = "$2" ] || continue
        ip addr add "$address" dev "$1"
        [ "$gateway" = - ] || ip route add default via "$gateway" dev "$1" onlink
        [ "$search" = - ] || echo "search $search" >>"/run/chv/resolv.$1"
        [ "$servers" = - ] ||
            echo "$servers" | tr ',' '\n' | sed 's/^/nameserver /' >>"/run/chv/resolv.$1"
        cat /run/chv/resolv.* >/etc/resolv.conf 2>/dev/null
        say "net $1 $address"
        return 0
    done </etc/chv/net
    return 1
}

# /etc/chv/net6: lines "MAC ADDRESS/128", as DHCPv6 has them; the routes come by router
# advertisements.
static_network6() {
    [ -f /etc/chv/net6 ] || return 0
    while read -r mac address; do
        [ "$mac" = "$2" ] && ip -6 addr add "$address" dev "$1"
    done </etc/chv/net6
    return 0
}

# $2 is the number of the interface: another one that is plugged in later may have its name.
dhcp_forever() {
    while read -r number <"/sys/class/net/$1/ifindex" && [ "$number" = "$2" ]; do
        udhcpc -f -i "$1" -p "/run/chv/udhcpc.$1" -s /lib/chv/udhcpc.sh -t 5 -T 1 -A 2 \
            -O search -O mtu -O staticroutes -x "hostname:$NAME" >/dev/null 2>&1
        sleep 1
    done
}

# The directory tells others, who may have seen the interface too, that it is taken care of.
bring_up() {
    [ "$1" != lo ] && read -r index <"/sys/class/net/$1/ifindex" || return 0
    mkdir "/run/chv/nic.$index" 2>/dev/null || return 0
    read -r hardware <"/sys/class/net/$1/address"
    ip link set "$1" up
    static_network6 "$1" "$hardware"
    static_network "$1" "$hardware" || dhcp_forever "$1" "$index" &
}

mount_data() {
    DATA=$(findfs LABEL=chv-data 2>/dev/null) || return 0
    if mount -t ext4 -o nosuid,nodev "$DATA" /data; then
        say "data $DATA"
    else
        say "data $DATA failed"
    fi
}

ssh_forever() {
    while :; do
        dropbear -F -E -s -W 1048576 -r "$HOST_KEY" -p 22 2>>/run/chv/dropbear.log
        sleep 1
    done
}

start_ssh() {
    dropbearconvert openssh dropbear /etc/ssh/ssh_host_ed25519_key "$HOST_KEY" \
        >/run/chv/dropbearconvert.log 2>&1 || return 1
    ssh_forever &
    tries=0
    until grep -q ':0016 ' /proc/net/tcp /proc/net/tcp6; do
        tries=$((tries + 1))
        [ $tries -lt 100 ] || return 1
        sleep 0.05
    done
}

# Returns when a press can no longer be missed: an event is only seen by who has the device open.
watch_power_button() {
    acpid -f -c /lib/chv/acpi -l /run/chv/acpid.log &
    tries=0
    until ls -l "/proc/$!/fd" | grep -q /dev/input/event; do
        tries=$((tries + 1))
        [ $tries -lt 100 ] || return 1
        sleep 0.05
    done
}

# True while any program but this one runs: kernel threads and zombies have no executable.
others_run() {
    for executable in /proc/[0-9]*/exe; do
        [ "$executable" = /proc/1/exe ] || [ ! -e "$executable" ] || return 0
    done
    return 1
}

# $1 is poweroff, reboot or halt.
stop() {
    trap '' USR1 USR2 TERM
    now; say "stopping $1 $NOW"
    kill -TERM -1
    tries=0
    while others_run && [ $tries -lt 20 ]; do
        sleep 0.1
        tries=$((tries + 1))
    done
    kill -KILL -1
    sync
    umount /data 2>/dev/null
    now; say "stopped $NOW"
    "$1" -f
}

# busybox poweroff, reboot and halt ask process 1 by signal; so does the power button.
trap 'stop halt' USR1
trap 'stop poweroff' USR2
trap 'stop reboot' TERM

/bin/busybox mount -t proc -o nosuid,nodev,noexec proc /proc
/bin/busybox --install -s
now; UP=$NOW
mount_basics
say "up $UP"
load_modules early
NAME=chv
if apply_seed; then
    SEEDED=yes
    set_hostname
    now; say "seed $NOW"
else
    SEEDED=no
    say "no seed"
fi
ip link set lo up
for interface in /sys/class/net/*; do bring_up "${interface##*/}"; done
mount_data
if [ $SEEDED = yes ]; then
    start_ssh || say "ssh failed"
fi
load_modules late
watch_power_button || say "power button failed"
now; say "ready $NOW"
# An interface that is plugged in later gets its address, too.
uevent /lib/chv/hotplug.sh >/dev/null 2>&1 &
for interface in /sys/class/net/*; do bring_up "${interface##*/}"; done
while :; do
    wait
    sleep 1
done
