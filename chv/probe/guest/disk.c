/*
 * The virtio-blk device (virtio 1.2 section 5.2): one queue, up to 32 lanes of three descriptors. A
 * request without an answer is waited for, as an operating system would: it is reported as stalled.
 */
#include "clock.h"
#include "disk.h"
#include "options.h"
#include "say.h"
#include "text.h"

enum { STALL_MS = 2000, LOOK_MS = 200, ERROR_PAUSE_MS = 10, ERRORS_SAID = 20 };
enum { CONFIG_CAPACITY = 0, CONFIG_WCE = 32 };

static struct disk disks[DISKS_MAX] UNCLEARED;
static struct vring rings[DISKS_MAX] DMA;
static u8 data[DISKS_MAX][LANES_MAX][CHUNK * SECTOR] DMA;

const char *op_name(enum op op) {
    return op == OP_READ ? "read" : op == OP_WRITE ? "write" : op == OP_FLUSH ? "flush" : "id";
}

void disk_describe(const struct disk *d) {
    u64 features = d->device.features;
    bool flush = features & BLK_FLUSH, settable = features & BLK_WCE;
    say("disk disk=%u dev=%B serial=\"%s\" sectors=%lu ro=%u flush=%u config_wce=%u wce=%u "
        "queue=%u", d->index, (u32)d->device.bdf, d->serial, d->sectors, !!(features & BLK_RO),
        flush, settable,
        (u32)(settable ? d->device.config[CONFIG_WCE] : flush), (u32)d->queue.size);
}

static void send(struct disk *d, struct lane *l) {
    u32 head = 3 * (u32)(l - d->lane), last = head + 2;
    volatile struct vring *r = d->queue.ring;
    u32 bytes = l->op == OP_ID ? SERIAL_LEN : l->sectors * SECTOR;
    u16 to_us = l->op == OP_READ || l->op == OP_ID ? DESC_WRITE : 0;
    if (l->op == OP_FLUSH) last = head + 1;
    l->header.type = l->op;
    l->header.sector = l->op == OP_FLUSH || l->op == OP_ID ? 0 : l->sector;
    l->status = 0xff;
    r->desc[head].addr = (u64)&l->header, r->desc[head].len = 16;
    r->desc[head].flags = DESC_NEXT, r->desc[head].next = head + 1;
    r->desc[head + 1].addr = (u64)l->data, r->desc[head + 1].len = bytes;
    r->desc[head + 1].flags = DESC_NEXT | to_us, r->desc[head + 1].next = head + 2;
    r->desc[last].addr = (u64)&l->status, r->desc[last].len = 1;
    r->desc[last].flags = DESC_WRITE;
    l->busy = true;
    l->stalled = false;
    l->epoch = d->epoch;
    l->sent_us = us();
    d->in_flight++;
    vq_push(&d->queue, head);
}

static bool start(struct disk *d) {
    d->started = virtio_start(&d->device, BLK_RO | BLK_FLUSH | BLK_WCE) &&
                 virtio_queue(&d->device, &d->queue, 0, &rings[d->index]);
    if (!d->started) return false;
    for (u32 i = 0; i < LANES_MAX; i++) d->lane[i].busy = false;
    d->in_flight = 0;
    virtio_ready(&d->device);
    d->sectors = virtio_config64(&d->device, CONFIG_CAPACITY);
    return true;
}

void disks_init(void) {
    for (u32 i = 0; i < DISKS_MAX; i++) disks[i].used = disks[i].identified = false;
}

struct disk *disk_add(const struct vdev *device) {
    u32 i = 0;
    while (i < DISKS_MAX && disks[i].used) i++;
    if (i == DISKS_MAX) {
        say("device-error dev=%B type=%u reason=too-many", (u32)device->bdf, (u32)device->type);
        return NULL;
    }
    struct disk *d = &disks[i];
    u32 epoch = d->epoch + 1;
    zero(d, sizeof *d);
    d->used = true, d->index = i, d->epoch = epoch, d->device = *device;
    for (u32 k = 0; k < LANES_MAX; k++) d->lane[k].data = data[i][k];
    if (!start(d)) {
        say("device-error dev=%B type=%u reason=negotiation", (u32)device->bdf, (u32)device->type);
        return d;
    }
    d->lane[0].op = OP_ID;
    send(d, &d->lane[0]);
    return d;
}

void disk_remove(struct disk *d) { d->used = d->started = d->active = false; }

static void identified(struct disk *d, const struct lane *l) {
    keep(d->serial, sizeof d->serial, l->status ? "" : (const char *)l->data, SERIAL_LEN);
    d->identified = true;
    disk_describe(d);
    const char *plan = option_for("disk", d->index, d->serial);
    if (plan) plan_start(d, plan);
}

static void failed(struct disk *d, struct lane *l) {
    l->hold_us = us();
    if (d->errors++ < ERRORS_SAID || d->errors % 1000 == 0)
        say("disk-error disk=%u op=%s sector=%lu seq=%lu status=%u errors=%lu", d->index,
            op_name(l->op), l->sector, l->seq, (u32)l->status, d->errors);
}

static void complete(struct disk *d, u32 id) {
    struct lane *l = &d->lane[id / 3];
    if (id >= 3 * LANES_MAX || id % 3 || !l->busy) {
        say("disk-bogus disk=%u id=%u", d->index, id);
        return;
    }
    l->busy = false;
    if (l->stalled)
        say("disk-resumed disk=%u op=%s seq=%lu after_us=%lu", d->index, op_name(l->op), l->seq,
            us() - l->sent_us);
    if (l->op == OP_ID) d->in_flight--, identified(d, l);
    else if (l->epoch == d->epoch) {
        d->in_flight--;
        if (l->status) failed(d, l);
        plan_done(d, l);
    }
}

static void report_stalls(struct disk *d) {
    for (u32 i = 0; i < LANES_MAX; i++) {
        struct lane *l = &d->lane[i];
        if (!l->busy || l->stalled || !past(l->sent_us, STALL_MS)) continue;
        l->stalled = true;
        say("disk-stall disk=%u op=%s sector=%lu seq=%lu waited_us=%lu status=%u", d->index,
            op_name(l->op), l->sector, l->seq, us() - l->sent_us, (u32)virtio_status(&d->device));
    }
}

/* A reset forgets the requests under way: they are sent again. */
static void reset(struct disk *d) {
    u64 busy = 0;
    for (u32 i = 0; i < LANES_MAX; i++) busy |= (u64)d->lane[i].busy << i;
    bool ok = start(d);
    say("disk-reset disk=%u ok=%u", d->index, ok);
    for (u32 i = 0; ok && i < LANES_MAX; i++)
        if (busy >> i & 1 && (d->lane[i].epoch == d->epoch || d->lane[i].op == OP_ID))
            send(d, &d->lane[i]);
}

/* What the device changes by itself: its size, its health. */
static void look(struct disk *d) {
    d->looked_us = us();
    report_stalls(d);
    u8 status = virtio_status(&d->device);
    if (status != 0xff && status & STATUS_NEEDS_RESET) reset(d);
    u64 sectors = virtio_config64(&d->device, CONFIG_CAPACITY);
    if (sectors == d->sectors || sectors == ~0ull) return;
    say("disk-resize disk=%u sectors=%lu was=%lu", d->index, sectors, d->sectors);
    d->sectors = sectors;
}

bool disk_poll(struct disk *d) {
    u32 id, len;
    if (!d->started) return false;
    while (vq_pop(&d->queue, &id, &len)) complete(d, id);
    if (past(d->looked_us, LOOK_MS)) look(d);
    for (u32 i = 0; d->active && i < d->plan.depth; i++) {
        struct lane *l = &d->lane[i];
        if (l->busy || (l->hold_us && !past(l->hold_us, ERROR_PAUSE_MS))) continue;
        l->hold_us = 0;
        if (plan_next(d, l)) send(d, l);
    }
    return d->active || !d->identified;
}

u32 disk_command(const char *who, u32 len, const char *plan) {
    u32 found = 0;
    for (struct disk *d = disks; d < disks + DISKS_MAX; d++) {
        if (!d->identified || !d->used || !meant(who, len, d->index, d->serial)) continue;
        if (starts(plan, "reset")) reset(d);
        else plan_start(d, plan);
        found++;
    }
    return found;
}
