#!/bin/busybox sh
# Run for each kernel event; brings up interfaces that appear after boot.

export PATH=/usr/sbin:/usr/bin:/sbin:/bin
[ "$ACTION:$SUBSYSTEM" = add:net ] && [ -n "$INTERFACE" ] || exit 0
mkdir "/run/chv/nic.$INTERFACE" 2>/dev/null || exit 0
ip link set "$INTERFACE" up
read -r NAME </proc/sys/kernel/hostname
(while :; do
    udhcpc -f -i "$INTERFACE" -s /lib/chv/udhcpc.sh -t 5 -T 1 -A 2 \
        -O search -O mtu -O staticroutes -x "hostname:$NAME"
    [ -e "/sys/class/net/$INTERFACE" ] || break
    sleep 1
done) >/dev/null 2>&1 &
