/*
 * What is asked of a disk:
 *   check   write a pattern, flush, read it back;  write and verify are its halves
 *   writer  checksummed records for ever: a record counts as acknowledged once its write, and a
 *           flush sent after it, have been answered
 *   records read the writer's records back
 * Record, 64 little-endian quads: "PROBEREC", seed, seq, tsc, 59 x (seq ^ seed), sum of the 63. The
 * record seq lies in sector first + seq % window.
 */
#include "clock.h"
#include "disk.h"
#include "options.h"
#include "say.h"
#include "text.h"

enum { QUADS = SECTOR / 8, FILL_FROM = 4, FILL = 59, SUM = 63 };
enum { SECTORS_DEFAULT = 64, FIRST_DEFAULT = 64, WINDOW_DEFAULT = 65536 };
#define RECORD_MAGIC 0x43455245424f5250ull       /* "PROBEREC" */

static const char *const names[] = {"none", "check", "write", "verify", "writer", "records"};

static enum plan_kind kind_of(const char *text) {
    u32 len = span(text, ',', ',');
    for (u32 i = 0; i < COUNT(names); i++)
        if (is(text, len, names[i])) return i;
    return PLAN_NONE;
}

static u64 at_most(u64 value, u64 limit) { return value < limit ? value : limit; }

static struct plan parse(const char *text, u64 disk_sectors, u32 lanes) {
    struct plan p = {.kind = kind_of(text)};
    bool records = p.kind == PLAN_WRITER || p.kind == PLAN_RECORDS;
    p.first = item_number(text, "first", FIRST_DEFAULT);
    u64 room = disk_sectors > p.first ? disk_sectors - p.first : 0;
    p.window = at_most(item_number(text, "window", WINDOW_DEFAULT), room);
    p.sectors = records ? p.window : at_most(item_number(text, "sectors", SECTORS_DEFAULT), room);
    p.seed = item_number(text, "seed", p.kind == PLAN_RECORDS ? 0 : rdtsc() | 1);
    p.depth = at_most(item_number(text, "depth", 1), lanes);
    if (!p.depth) p.depth = 1;
    if (p.kind == PLAN_WRITER && p.depth > p.window) p.depth = p.window;
    p.every = item_number(text, "every", 1);
    if (!p.every) p.every = 1;
    p.from = item_number(text, "from", 1);
    p.acked = item_number(text, "acked", 0);
    return p;
}

static void refuse(struct disk *d, const char *why) {
    say("disk-refused disk=%u plan=%s reason=%s", d->index, names[d->plan.kind], why);
    d->plan.kind = PLAN_NONE;
    d->active = false;
    tally(false);
}

void plan_start(struct disk *d, const char *text) {
    u32 lanes = at_most(LANES_MAX, d->queue.size / 3);
    d->plan = parse(text, d->sectors, lanes);
    d->epoch++;
    d->in_flight = 0;
    d->position = d->errors = d->bad = d->first_bad = 0;
    d->valid = d->empty = d->lost = d->first_lost = d->newest = 0;
    d->next_seq = d->plan.from;
    d->acked = d->plan.from - 1;
    d->flush_sent = false;
    for (u32 i = 0; i < LANES_MAX; i++) d->lane[i].seq = d->lane[i].hold_us = 0;
    zero(d->took_us, sizeof d->took_us);
    d->phase = d->plan.kind == PLAN_VERIFY || d->plan.kind == PLAN_RECORDS ? OP_READ : OP_WRITE;
    d->phase_us = us();
    d->active = d->plan.kind != PLAN_NONE;
    if (!d->active) return;
    if (!d->plan.sectors) return refuse(d, "too-small");
    if (d->phase == OP_WRITE && d->device.features & BLK_RO) return refuse(d, "read-only");
    say("disk-planned disk=%u plan=%s first=%lu sectors=%lu seed=%lu depth=%lu from=%lu", d->index,
        names[d->plan.kind], d->plan.first, d->plan.sectors, d->plan.seed, d->plan.depth,
        d->plan.from);
}

/* ---- pattern ---- */

static u64 stamp(const struct disk *d, u64 sector) {
    return d->plan.seed + sector * 0x9e3779b97f4a7c15;
}

static bool next_in_range(struct disk *d, struct lane *l) {
    if (d->phase == OP_FLUSH) {
        if (d->flush_sent) return false;
        d->flush_sent = true;
        l->op = OP_FLUSH;
        return true;
    }
    if (d->position >= d->plan.sectors) return false;
    l->op = d->phase;
    l->sector = d->plan.first + d->position;
    l->sectors = at_most(CHUNK, d->plan.sectors - d->position);
    d->position += l->sectors;
    if (l->op == OP_WRITE)
        for (u32 i = 0; i < l->sectors; i++)
            fill64(l->data + i * SECTOR, stamp(d, l->sector + i), QUADS);
    return true;
}

static void bad_sector(struct disk *d, u64 sector) {
    if (!d->bad++) d->first_bad = sector;
}

static void compare(struct disk *d, const struct lane *l) {
    for (u32 i = 0; i < l->sectors; i++)
        if (!all64(l->data + i * SECTOR, stamp(d, l->sector + i), QUADS))
            bad_sector(d, l->sector + i);
}

/* The phase after this one; false: the plan is done. */
static bool next_phase(struct disk *d) {
    u64 now = us();
    d->took_us[d->phase == OP_WRITE ? 0 : d->phase == OP_FLUSH ? 1 : 2] = now - d->phase_us;
    d->phase_us = now;
    d->position = 0;
    if (d->phase == OP_WRITE && d->device.features & BLK_FLUSH) d->phase = OP_FLUSH;
    else if (d->phase != OP_READ && d->plan.kind == PLAN_CHECK) d->phase = OP_READ;
    else return false;
    return true;
}

static void finish(struct disk *d) {
    bool ok = !d->bad && !d->errors && !d->lost;
    d->active = false;
    tally(ok);
    if (d->plan.kind == PLAN_RECORDS)
        say("records disk=%u ok=%u valid=%lu empty=%lu bad=%lu first_bad=%lu lost=%lu "
            "first_lost=%lu newest=%lu errors=%lu", d->index, ok, d->valid, d->empty, d->bad,
            d->first_bad, d->lost, d->first_lost, d->newest, d->errors);
    else
        say("disk-done disk=%u plan=%s ok=%u sectors=%lu bad=%lu first_bad=%lu errors=%lu "
            "write_us=%lu flush_us=%lu read_us=%lu", d->index, names[d->plan.kind], ok,
            d->plan.sectors, d->bad, d->first_bad, d->errors, d->took_us[0], d->took_us[1],
            d->took_us[2]);
}

/* ---- records ---- */

static void make_record(const struct disk *d, const struct lane *l) {
    u64 *p = (u64 *)l->data, fill = l->seq ^ d->plan.seed;
    p[0] = RECORD_MAGIC, p[1] = d->plan.seed, p[2] = l->seq, p[3] = rdtsc();
    fill64(p + FILL_FROM, fill, FILL);
    p[SUM] = p[0] + p[1] + p[2] + p[3] + FILL * fill;
}

static bool sound(const struct disk *d, const u64 *p) {
    u64 fill = p[2] ^ p[1];
    return p[0] == RECORD_MAGIC && all64(p + FILL_FROM, fill, FILL) &&
           p[SUM] == p[0] + p[1] + p[2] + p[3] + FILL * fill &&
           (!d->plan.seed || d->plan.seed == p[1]);
}

/* The newest acknowledged record whose place is this one, or 0. */
static u64 owed(const struct plan *p, u64 place) {
    u64 back = (p->acked % p->window + p->window - place) % p->window;
    return p->acked > back && p->acked - back >= p->from ? p->acked - back : 0;
}

static void inspect(struct disk *d, u64 sector, const u64 *p) {
    u64 expected = owed(&d->plan, sector - d->plan.first), found = 0;
    if (sound(d, p)) {
        d->valid++;
        found = p[2];
        if (found > d->newest) d->newest = found;
    }
    else if (all64(p, 0, QUADS)) d->empty++;
    else bad_sector(d, sector);
    if (found < expected && !d->lost++) d->first_lost = expected;
}

static bool next_record(struct disk *d, struct lane *l) {
    if (!l->seq) {
        l->seq = d->next_seq++;
        l->op = OP_WRITE;
        l->begun_us = us();
    }
    l->sector = d->plan.first + l->seq % d->plan.window;
    l->sectors = 1;
    if (l->op == OP_WRITE) make_record(d, l);
    return true;
}

/* All records before the oldest that is under way are acknowledged. */
static void acknowledge(struct disk *d, u64 began_us) {
    u64 low = d->next_seq;
    for (u32 i = 0; i < d->plan.depth; i++)
        if (d->lane[i].seq && d->lane[i].seq < low) low = d->lane[i].seq;
    low--;
    if (low / d->plan.every > d->acked / d->plan.every)
        say("acked disk=%u seq=%lu us=%lu", d->index, low, us() - began_us);
    d->acked = low;
}

static void record_done(struct disk *d, struct lane *l) {
    if (l->status) return;                       /* the same again */
    if (l->op == OP_WRITE && d->device.features & BLK_FLUSH) {
        l->op = OP_FLUSH;
        return;
    }
    l->seq = 0;
    acknowledge(d, l->begun_us);
}

/* ---- the engine's two questions ---- */

bool plan_next(struct disk *d, struct lane *l) {
    return d->plan.kind == PLAN_WRITER ? next_record(d, l) : next_in_range(d, l);
}

void plan_done(struct disk *d, struct lane *l) {
    if (d->plan.kind == PLAN_WRITER) return record_done(d, l);
    if (l->op == OP_READ && !l->status) {
        if (d->plan.kind != PLAN_RECORDS) compare(d, l);
        for (u32 i = 0; d->plan.kind == PLAN_RECORDS && i < l->sectors; i++)
            inspect(d, l->sector + i, (const u64 *)(l->data + i * SECTOR));
    }
    bool all_sent = d->phase == OP_FLUSH ? d->flush_sent : d->position >= d->plan.sectors;
    if (all_sent && !d->in_flight && !next_phase(d)) finish(d);
}
