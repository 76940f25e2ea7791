/*
 * Virtio over PCI (virtio 1.2 sections 2.7, 3.1.1 and 4.1). QEMU's devices on q35 may be
 * transitional: their type is then the subsystem id (4.1.2.1).
 */
#include "clock.h"
#include "memory.h"
#include "pci.h"
#include "say.h"
#include "virtio.h"

/* Common configuration, section 4.1.4.3. */
struct vcommon {
    u32 device_select, device_features, driver_select, driver_features;
    u16 config_vector, queues;
    u8 status, generation;
    u16 queue_select, queue_size, queue_vector, queue_enable, queue_notify;
    u32 desc[2], avail[2], used[2];
};
enum { ACKNOWLEDGE = 1, DRIVER = 2, DRIVER_OK = 4, FEATURES_OK = 8, FAILED = 128 };
enum { RESET_MS = 1000, VENDOR = 0x1af4, NO_VECTOR = 0xffff };
enum { CAP_COMMON = 1, CAP_NOTIFY = 2, CAP_DEVICE = 4 };

/*
 * Reset the device and read its features. Only after ACKNOWLEDGE: while the status is zero Cloud
 * Hypervisor clears the select registers on every write.
 */
static bool greet(struct vdev *v) {
    v->common->status = 0;
    for (u64 begun = us(); v->common->status;)
        if (past(begun, RESET_MS)) return false;
    v->common->status = ACKNOWLEDGE;
    v->common->status = ACKNOWLEDGE | DRIVER;
    v->offered = 0;
    for (u32 half = 0; half < 2; half++) {
        v->common->device_select = half;
        v->offered |= (u64)v->common->device_features << 32 * half;
    }
    return v->offered & F_VERSION_1;
}

/* One vendor capability, section 4.1.4; false if its BAR has no address. */
static bool take_capability(struct vdev *v, u8 at) {
    u8 kind = pci_read(v->bdf, at + 3), bar = pci_read(v->bdf, at + 4);
    if (kind != CAP_COMMON && kind != CAP_NOTIFY && kind != CAP_DEVICE) return true;
    u64 base = pci_bar(v->bdf, bar);
    if (!base) return false;
    volatile u8 *p = map(base + pci_read(v->bdf, at + 8), pci_read(v->bdf, at + 12));
    if (kind == CAP_COMMON) v->common = (volatile struct vcommon *)p;
    if (kind == CAP_DEVICE) v->config = p;
    if (kind == CAP_NOTIFY) {
        v->notify = p;
        v->notify_step = pci_read(v->bdf, at + 16);
    }
    return true;
}

static bool refuse(const struct vdev *v, const char *why) {
    say("device-error dev=%B type=%u reason=%s", (u32)v->bdf, (u32)v->type, why);
    return false;
}

bool virtio_find(struct vdev *v, u16 bdf) {
    u32 id = pci_read(bdf, 0);
    if ((id & 0xffff) != VENDOR) return false;
    u16 type = id >> 16 >= 0x1040 ? (id >> 16) - 0x1040 : pci_read(bdf, 0x2e);
    *v = (struct vdev){.bdf = bdf, .type = type};
    pci_write(bdf, PCI_COMMAND, (pci_read(bdf, PCI_COMMAND) & 0xffff) | 0x406);
    for (u8 at = 0; (at = pci_capability(bdf, CAP_VENDOR, at));)
        if (!take_capability(v, at)) return refuse(v, "bar-unassigned");
    if (!v->common || !v->notify) return refuse(v, "no-modern-interface");
    return greet(v) || refuse(v, "no-version-1");
}

bool virtio_start(struct vdev *v, u64 wanted) {
    if (!greet(v)) return false;
    v->features = v->offered & (wanted | F_VERSION_1);
    for (u32 half = 0; half < 2; half++) {
        v->common->driver_select = half;
        v->common->driver_features = v->features >> 32 * half;
    }
    v->common->status = ACKNOWLEDGE | DRIVER | FEATURES_OK;
    if (v->common->status & FEATURES_OK) return true;
    v->common->status = FAILED;
    return false;
}

bool virtio_queue(struct vdev *v, struct vqueue *q, u16 index, struct vring *ring) {
    volatile struct vcommon *c = v->common;
    c->queue_select = index;
    u16 size = c->queue_size;
    if (!size) return false;
    if (size > QUEUE_MAX) c->queue_size = size = QUEUE_MAX;
    volatile u16 *notify = (volatile u16 *)(v->notify + c->queue_notify * v->notify_step);
    *q = (struct vqueue){ring, notify, index, size, 0};
    fill64(ring, 0, sizeof *ring / 8);
    ring->avail.flags = 1;                       /* no interrupts */
    c->queue_vector = NO_VECTOR;
    c->desc[0] = (u64)ring->desc, c->desc[1] = 0;
    c->avail[0] = (u64)&ring->avail, c->avail[1] = 0;
    c->used[0] = (u64)&ring->used, c->used[1] = 0;
    c->queue_enable = 1;
    return true;
}

void virtio_ready(struct vdev *v) {
    v->common->status = ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK;
}

u8 virtio_status(struct vdev *v) { return v->common->status; }

/* Read until the generation stands still: the device may change the value meanwhile (2.5.1). */
u64 virtio_config64(struct vdev *v, u32 offset) {
    u8 before;
    u64 value;
    do {
        before = v->common->generation;
        value = *(volatile u32 *)(v->config + offset);
        value |= (u64)*(volatile u32 *)(v->config + offset + 4) << 32;
    } while (before != v->common->generation);
    return value;
}

void vq_push(struct vqueue *q, u16 head) {
    q->ring->avail.ring[q->ring->avail.idx % q->size] = head;
    barrier();
    q->ring->avail.idx++;
    barrier();
    *q->notify = q->index;
}

bool vq_pop(struct vqueue *q, u32 *id, u32 *len) {
    if (q->ring->used.idx == q->seen) return false;
    barrier();
    *id = q->ring->used.ring[q->seen % q->size].id;
    *len = q->ring->used.ring[q->seen % q->size].len;
    q->seen++;
    return true;
}
