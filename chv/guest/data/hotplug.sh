#!/bin/busybox sh
# Run for each kernel event, one at a time; brings up interfaces that appear after boot, and ends
# what works for one that is gone: the next may have its name, and has another number.

export PATH=/usr/sbin:/usr/bin:/sbin:/bin
[ "$SUBSYSTEM" = net ] && [ -n "$INTERFACE" ] || exit 0
if [ "$ACTION" = remove ]; then
    read -r client <"/run/chv/udhcpc.$INTERFACE" && kill -KILL "$client"
    rm -f "/run/chv/udhcpc.$INTERFACE" "/run/chv/resolv.$INTERFACE"
    cat /run/chv/resolv.* >/etc/resolv.conf
    exit 0
fi
[ "$ACTION" = add ] && read -r index <"/sys/class/net/$INTERFACE/ifindex" || exit 0
mkdir "/run/chv/nic.$index" 2>/dev/null || exit 0
ip link set "$INTERFACE" up
read -r NAME </proc/sys/kernel/hostname
(while read -r number <"/sys/class/net/$INTERFACE/ifindex" && [ "$number" = "$index" ]; do
    udhcpc -f -i "$INTERFACE" -p "/run/chv/udhcpc.$INTERFACE" -s /lib/chv/udhcpc.sh -t 5 -T 1 -A 2 \
        -O search -O mtu -O staticroutes -x "hostname:$NAME"
    sleep 1
done) >/dev/null 2>&1 &
