/*
 * The PCI devices that are there: bus 0 and what lies behind bridges, looked over again and again,
 * as not every VMM tells of a new device by an interrupt that a polling guest can see.
 */
#include "devices.h"
#include "disk.h"
#include "net.h"
#include "pci.h"
#include "say.h"
#include "slots.h"
#include "virtio.h"

enum { DEVICES_MAX = 64, DEPTH_MAX = 4, CLASS_BRIDGE = 0x0604, NO_BRIDGE = 0xffff };

struct device {
    bool used, seen;
    u16 bdf;
    struct vdev virtio;
    struct disk *disk;
    struct nic *nic;
};
static struct device devices[DEVICES_MAX] UNCLEARED;

static struct device *find(u16 bdf) {
    for (struct device *d = devices; d < devices + DEVICES_MAX; d++)
        if (d->used && d->bdf == bdf) return d;
    return NULL;
}

static void release(struct device *d, const char *how) {
    if (d->disk) disk_remove(d->disk);
    if (d->nic) nic_remove(d->nic);
    if (d->virtio.common)
        say("device-gone dev=%B type=%u how=%s", (u32)d->bdf, (u32)d->virtio.type, how);
    d->used = false;
}

static bool assigned(u16 bdf) {
    for (u8 n = 0; n < 6; n++) {
        u32 low = pci_read(bdf, PCI_BAR0 + 4 * n);
        if (low & 1) continue;
        if (low & ~15u) return true;
        if ((low & 6) == 4 && pci_read(bdf, PCI_BAR0 + 4 * n + 4)) return true;
    }
    return false;
}

static void appear(u16 bdf, u16 bridge, bool hot) {
    struct device *d = devices;
    while (d < devices + DEVICES_MAX && d->used) d++;
    if (d == devices + DEVICES_MAX) return;
    *d = (struct device){.used = true, .seen = true, .bdf = bdf};
    if (bridge != NO_BRIDGE && !assigned(bdf)) pci_assign(bdf, bridge);
    if (!virtio_find(&d->virtio, bdf)) {
        d->virtio.common = NULL;
        return;
    }
    say("device dev=%B type=%u features=%lx hot=%u", (u32)bdf, (u32)d->virtio.type,
        d->virtio.offered, hot);
    if (d->virtio.type == VIRTIO_BLK) d->disk = disk_add(&d->virtio);
    if (d->virtio.type == VIRTIO_NET) d->nic = nic_add(&d->virtio);
}

/* The status that we set is gone: another device has taken the place between two looks. */
static bool replaced(struct device *d) {
    return (d->disk || d->nic) && d->virtio.common && virtio_status(&d->virtio) == 0;
}

static void scan_bus(u8 bus, u16 bridge, u32 depth, bool hot);

static void look_at(u16 bdf, u16 bridge, u32 depth, bool hot) {
    struct device *d = find(bdf);
    if (d && replaced(d)) {
        release(d, "replaced");
        d = NULL;
    }
    if (d) d->seen = true;
    else appear(bdf, bridge, hot);
    if (pci_read(bdf, PCI_CLASS) >> 16 != CLASS_BRIDGE || depth == DEPTH_MAX) return;
    u8 secondary = pci_read(bdf, PCI_BUSES + 1);
    slot_poll(bdf, secondary);
    if (secondary) scan_bus(secondary, bdf, depth + 1, hot);
}

/* Behind a PCI Express port there is one device; asking for 31 more would cost 31 exits. */
static void scan_bus(u8 bus, u16 bridge, u32 depth, bool hot) {
    u32 slots = bridge != NO_BRIDGE && pci_capability(bridge, CAP_EXPRESS, 0) ? 1 : 32;
    for (u32 slot = 0; slot < slots; slot++) {
        u16 bdf = bus << 8 | slot << 3;
        if (!pci_present(bdf)) continue;
        u32 functions = pci_read(bdf, PCI_HEADER + 2) & 0x80 ? 8 : 1;
        for (u32 f = 0; f < functions; f++)
            if (!f || pci_present(bdf | f)) look_at(bdf | f, bridge, depth, hot);
    }
}

void devices_init(void) {
    for (struct device *d = devices; d < devices + DEVICES_MAX; d++) d->used = false;
    disks_init();
    nics_init();
}

void devices_scan(bool hot) {
    for (struct device *d = devices; d < devices + DEVICES_MAX; d++) d->seen = false;
    scan_bus(0, NO_BRIDGE, 0, hot);
    for (struct device *d = devices; d < devices + DEVICES_MAX; d++)
        if (d->used && !d->seen) release(d, "vanished");
}

bool devices_poll(void) {
    bool busy = false;
    for (struct device *d = devices; d < devices + DEVICES_MAX; d++) {
        if (!d->used) continue;
        if (d->disk) busy |= disk_poll(d->disk);
        if (d->nic) busy |= nic_poll(d->nic);
    }
    return busy;
}

u32 devices_count(void) {
    u32 count = 0;
    for (struct device *d = devices; d < devices + DEVICES_MAX; d++)
        count += d->used && d->virtio.common;
    return count;
}

void devices_describe(void) {
    for (struct device *d = devices; d < devices + DEVICES_MAX; d++) {
        if (d->used && d->disk) disk_describe(d->disk);
        if (d->used && d->nic) nic_describe(d->nic);
    }
}

void devices_release(u16 bdf, const char *how) {
    struct device *d = find(bdf);
    if (d) release(d, how);
}
