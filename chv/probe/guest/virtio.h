/* Virtio 1.2 over PCI with split rings; polled, so no interrupt is ever asked for. */
#pragma once
#include "base.h"

enum { QUEUE_MAX = 128 };
enum { VIRTIO_NET = 1, VIRTIO_BLK = 2 };
enum { DESC_NEXT = 1, DESC_WRITE = 2 };
enum { STATUS_NEEDS_RESET = 64 };
#define F_VERSION_1 (1ull << 32)

struct vring {
    struct { u64 addr; u32 len; u16 flags, next; } desc[QUEUE_MAX];
    struct { u16 flags, idx, ring[QUEUE_MAX + 1]; } avail;
    struct {
        u16 flags, idx;
        struct { u32 id, len; } ring[QUEUE_MAX];
    } used __attribute__((aligned(4)));
} __attribute__((aligned(4096)));

struct vqueue {
    volatile struct vring *ring;
    volatile u16 *notify;
    u16 index, size, seen;
};

struct vdev {
    u16 bdf, type;
    u64 offered, features;
    volatile struct vcommon *common;
    volatile u8 *config, *notify;
    u32 notify_step;
};

/* Fill v from the device's capabilities; false if it cannot be used (then why was said). */
bool virtio_find(struct vdev *v, u16 bdf);
/* Reset and negotiate; then virtio_queue() for each queue, then virtio_ready(). */
bool virtio_start(struct vdev *v, u64 wanted);
bool virtio_queue(struct vdev *v, struct vqueue *q, u16 index, struct vring *ring);
void virtio_ready(struct vdev *v);
u8 virtio_status(struct vdev *v);
u64 virtio_config64(struct vdev *v, u32 offset);

void vq_push(struct vqueue *q, u16 head);
bool vq_pop(struct vqueue *q, u32 *id, u32 *len);
