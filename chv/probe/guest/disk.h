/*
 * Virtio-blk devices and what is asked of them. disk.c is the device: lanes of requests,
 * completions, stalls, resize. disk_plan.c says what to do next in a free lane and what a
 * completion means.
 */
#pragma once
#include "virtio.h"

enum { DISKS_MAX = 8, LANES_MAX = 32, CHUNK = 8, SECTOR = 512, SERIAL_LEN = 20 };
enum { BLK_RO = 1 << 5, BLK_FLUSH = 1 << 9, BLK_WCE = 1 << 11 };
enum op { OP_READ = 0, OP_WRITE = 1, OP_FLUSH = 4, OP_ID = 8 };

enum plan_kind { PLAN_NONE, PLAN_CHECK, PLAN_WRITE, PLAN_VERIFY, PLAN_WRITER, PLAN_RECORDS };

struct plan {
    enum plan_kind kind;
    u64 sectors, first, seed, depth, every, window, from, acked;
};

/* One request in flight. header, status and data are what the device reads and writes. */
struct lane {
    struct { u32 type, reserved; u64 sector; } header;
    u8 status;
    bool busy, stalled;
    enum op op;
    u32 sectors, epoch;
    u64 sector, seq, sent_us, begun_us, hold_us;
    u8 *data;
};

struct disk {
    bool used, started, identified, active;
    u32 index, epoch, in_flight;                 /* in_flight: of this epoch */
    struct vdev device;
    struct vqueue queue;
    char serial[SERIAL_LEN + 1];
    u64 sectors, looked_us;
    struct plan plan;
    enum op phase;
    bool flush_sent;
    u64 position, next_seq, acked, errors, bad, first_bad, phase_us, took_us[3];
    u64 valid, empty, lost, first_lost, newest;
    struct lane lane[LANES_MAX];
};

void disks_init(void);
struct disk *disk_add(const struct vdev *device);
/* True while it works on a plan that ends. */
bool disk_poll(struct disk *d);
void disk_remove(struct disk *d);
void disk_describe(const struct disk *d);
/* Start a plan on the disks that are meant (or reset them, and send again); their number. */
u32 disk_command(const char *who, u32 len, const char *plan);

void plan_start(struct disk *d, const char *text);
/* Fill the lane with the next request; false: nothing to send now. */
bool plan_next(struct disk *d, struct lane *l);
void plan_done(struct disk *d, struct lane *l);
const char *op_name(enum op op);
