/*
 * Measures one workload, on a file by io_uring with O_DIRECT or on a vhost-user-blk export, with
 * the same loop on both sides, so that the ratio of two runs says what the export costs.
 *
 *   block_bench file|vhost PATH randread|randwrite|read|write BLOCK_BYTES DEPTH SECONDS SPAN_BYTES
 *
 * Prints one line: requests, seconds, median and 99th percentile of latency in microseconds.
 * The vhost side is a master with one split ring of 128 descriptors in a memfd. It does what a
 * guest's driver does: it sleeps on the call descriptor as on an interrupt, and both sides tell each
 * other from which index on they want to be woken (EVENT_IDX). Formats: vhost-user and virtio
 * specifications.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define RING 128
#define DEPTH_MAX 32
#define SAMPLES_MAX (1 << 22)
#define MEMORY (64u << 20)
#define DATA_AT (1u << 20)

static void die(const char *what) { perror(what); exit(1); }
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

/* --- the two sides: submit request `slot`, then wait for at least one and say which are done */
struct side {
    void (*submit)(int slot, int write, uint64_t at, uint32_t bytes);
    int (*reap)(int *slots); /* blocks */
};

/* --- file: io_uring by system calls */
static int ring_fd, file_fd;
static unsigned *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask, to_submit;
static struct io_uring_sqe *sqes;
static struct io_uring_cqe *cqes;
static char *buffers;

static void file_open(const char *path) {
    struct io_uring_params p = {0};
    file_fd = open(path, O_RDWR | O_DIRECT | O_CLOEXEC);
    if (file_fd < 0) die(path);
    ring_fd = syscall(SYS_io_uring_setup, RING, &p);
    if (ring_fd < 0) die("io_uring_setup");
    char *sq = mmap(0, p.sq_off.array + p.sq_entries * 4, PROT_READ | PROT_WRITE, MAP_SHARED,
                    ring_fd, IORING_OFF_SQ_RING);
    char *cq = mmap(0, p.cq_off.cqes + p.cq_entries * sizeof *cqes, PROT_READ | PROT_WRITE,
                    MAP_SHARED, ring_fd, IORING_OFF_CQ_RING);
    sqes = mmap(0, p.sq_entries * sizeof *sqes, PROT_READ | PROT_WRITE, MAP_SHARED, ring_fd,
                IORING_OFF_SQES);
    if (sq == MAP_FAILED || cq == MAP_FAILED || (void *)sqes == MAP_FAILED) die("mmap ring");
    sq_tail = (unsigned *)(sq + p.sq_off.tail);
    sq_mask = (unsigned *)(sq + p.sq_off.ring_mask);
    sq_array = (unsigned *)(sq + p.sq_off.array);
    cq_head = (unsigned *)(cq + p.cq_off.head);
    cq_tail = (unsigned *)(cq + p.cq_off.tail);
    cq_mask = (unsigned *)(cq + p.cq_off.ring_mask);
    cqes = (struct io_uring_cqe *)(cq + p.cq_off.cqes);
    buffers = mmap(0, MEMORY, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(buffers, 0x5a, MEMORY);
}

static void file_submit(int slot, int write, uint64_t at, uint32_t bytes) {
    unsigned tail = *sq_tail, index = tail & *sq_mask;
    struct io_uring_sqe *e = &sqes[index];
    memset(e, 0, sizeof *e);
    e->opcode = write ? IORING_OP_WRITE : IORING_OP_READ;
    e->fd = file_fd;
    e->off = at;
    e->addr = (uint64_t)(uintptr_t)(buffers + (size_t)slot * (1 << 20));
    e->len = bytes;
    e->user_data = slot;
    sq_array[index] = index;
    __atomic_store_n(sq_tail, tail + 1, __ATOMIC_RELEASE);
    to_submit++;
}

static int file_reap(int *slots) {
    int count = 0;
    if (syscall(SYS_io_uring_enter, ring_fd, to_submit, 1, IORING_ENTER_GETEVENTS, 0, 0) < 0)
        die("io_uring_enter");
    to_submit = 0;
    unsigned head = *cq_head;
    while (head != __atomic_load_n(cq_tail, __ATOMIC_ACQUIRE)) {
        struct io_uring_cqe *e = &cqes[head & *cq_mask];
        if (e->res <= 0) { errno = -e->res; die("file I/O"); }
        slots[count++] = (int)e->user_data;
        head++;
    }
    __atomic_store_n(cq_head, head, __ATOMIC_RELEASE);
    return count;
}

/* --- vhost-user-blk */
struct desc { uint64_t addr; uint32_t len; uint16_t flags, next; };
struct avail { uint16_t flags, idx, ring[RING], used_event; };
struct used_elem { uint32_t id, len; };
struct used { uint16_t flags, idx; struct used_elem ring[RING]; uint16_t avail_event; };
struct blk_req { uint32_t type, reserved; uint64_t sector; };
static char *memory;
static volatile struct desc *descs;
static volatile struct avail *avail_ring;
static volatile struct used *used_ring;
static uint16_t last_used, kicked;
static int kick_fd, call_fd, sock;

static void message(uint32_t request, const void *payload, uint32_t size, int fd) {
    uint32_t head[3] = {request, 1, size};
    struct iovec io[2] = {{head, 12}, {(void *)payload, size}};
    char control[CMSG_SPACE(sizeof(int))] = {0};
    struct msghdr m = {.msg_iov = io, .msg_iovlen = size ? 2 : 1};
    if (fd >= 0) {
        m.msg_control = control;
        m.msg_controllen = sizeof control;
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(c), &fd, sizeof fd);
    }
    if (sendmsg(sock, &m, 0) < 0) die("sendmsg");
}

static uint64_t ask(uint32_t request) {
    char reply[20];
    uint64_t value;
    message(request, 0, 0, -1);
    if (recv(sock, reply, 20, MSG_WAITALL) != 20) die("reply");
    memcpy(&value, reply + 12, 8);
    return value;
}

static void vhost_open(const char *path) {
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    snprintf(a.sun_path, sizeof a.sun_path, "%s", path);
    sock = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(sock, (void *)&a, sizeof a) < 0) die(path);
    int fd = memfd_create("guest", MFD_CLOEXEC);
    if (ftruncate(fd, MEMORY)) die("memfd");
    memory = mmap(0, MEMORY, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    memset(memory + DATA_AT, 0x5a, MEMORY - DATA_AT);
    message(3, 0, 0, -1);                      /* SET_OWNER */
    uint64_t features = ask(1);                /* GET_FEATURES */
    if (!(features & (1ull << 30))) die("no protocol features");
    ask(15);                                   /* GET_PROTOCOL_FEATURES */
    /* V1, protocol, EVENT_IDX, flush */
    uint64_t none = 0, wanted = (1ull << 32) | (1ull << 30) | (1ull << 29) | (1ull << 9);
    if (!(features & (1ull << 29))) die("no EVENT_IDX");
    message(16, &none, 8, -1);
    message(2, &wanted, 8, -1);                /* SET_FEATURES */
    struct { uint32_t regions, padding; uint64_t gpa, size, uva, offset; } table =
        {1, 0, 0, MEMORY, (uint64_t)(uintptr_t)memory, 0};
    message(5, &table, sizeof table, fd);      /* SET_MEM_TABLE */
    descs = (void *)memory;
    avail_ring = (void *)(memory + 0x2000);
    used_ring = (void *)(memory + 0x3000);
    kick_fd = eventfd(0, EFD_CLOEXEC);
    call_fd = eventfd(0, EFD_CLOEXEC);
    uint32_t state[2] = {0, RING}, base[2] = {0, 0}, on[2] = {0, 1};
    uint64_t index = 0, at = (uint64_t)(uintptr_t)memory;
    struct { uint32_t index, flags; uint64_t desc, used, avail, log; } ring =
        {0, 0, at, at + 0x3000, at + 0x2000, 0};
    message(8, state, 8, -1);                  /* SET_VRING_NUM */
    message(9, &ring, sizeof ring, -1);        /* SET_VRING_ADDR */
    message(10, base, 8, -1);                  /* SET_VRING_BASE */
    message(13, &index, 8, call_fd);           /* SET_VRING_CALL */
    message(12, &index, 8, kick_fd);           /* SET_VRING_KICK */
    message(18, on, 8, -1);                    /* SET_VRING_ENABLE */
}

static void vhost_submit(int slot, int write, uint64_t at, uint32_t bytes) {
    uint16_t d = slot * 3;
    uint32_t head = 0x8000 + slot * 64, data = DATA_AT + slot * (1 << 20);
    struct blk_req *r = (void *)(memory + head);
    *r = (struct blk_req){write, 0, at / 512};
    descs[d] = (struct desc){head, 16, 1, d + 1};
    descs[d + 1] = (struct desc){data, bytes, write ? 1 : 3, d + 2};
    descs[d + 2] = (struct desc){head + 32, 1, 2, 0};
    uint16_t index = avail_ring->idx;
    avail_ring->ring[index % RING] = d;
    __atomic_store_n(&avail_ring->idx, index + 1, __ATOMIC_RELEASE);
}

static int vhost_reap(int *slots) {
    int count = 0;
    uint64_t value = 1;
    uint16_t index = avail_ring->idx;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    uint16_t asked = used_ring->avail_event;
    if ((uint16_t)(index - asked - 1) < (uint16_t)(index - kicked) &&
        write(kick_fd, &value, 8) != 8)
        die("kick");
    kicked = index;
    avail_ring->used_event = last_used;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    while (__atomic_load_n(&used_ring->idx, __ATOMIC_ACQUIRE) == last_used) {
        /* The back end makes the shared descriptor non-blocking. */
        struct pollfd call = {call_fd, POLLIN, 0};
        if (poll(&call, 1, 10000) != 1) { errno = ETIMEDOUT; die("no interrupt in 10 s"); }
        if (read(call_fd, &value, 8) != 8 && errno != EAGAIN) die("call");
    }
    while (last_used != __atomic_load_n(&used_ring->idx, __ATOMIC_ACQUIRE)) {
        int slot = used_ring->ring[last_used % RING].id / 3;
        if (memory[0x8000 + slot * 64 + 32]) { errno = EIO; die("vhost I/O"); }
        slots[count++] = slot;
        last_used++;
    }
    return count;
}

/* --- the loop */
static float *samples;
static int by_value(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    if (argc != 8) { fprintf(stderr, "see the head of the source\n"); return 2; }
    int vhost = !strcmp(argv[1], "vhost"), random_ = !strncmp(argv[3], "rand", 4);
    int writes = !strcmp(argv[3] + (random_ ? 4 : 0), "write");
    uint32_t bytes = atoi(argv[4]);
    int depth = atoi(argv[5]);
    double seconds = atof(argv[6]);
    uint64_t blocks = strtoull(argv[7], 0, 10) / bytes, next = 0, seed = 88172645463325252ull;
    if (depth < 1 || depth > DEPTH_MAX || bytes > (1 << 20)) return 2;
    struct side side = vhost ? (struct side){vhost_submit, vhost_reap}
                             : (struct side){file_submit, file_reap};
    if (vhost) vhost_open(argv[2]); else file_open(argv[2]);
    samples = malloc(sizeof(float) * SAMPLES_MAX);
    double began[DEPTH_MAX], start = now(), end = start;
    long done = 0;
    int slots[RING], ready = depth, idle = 0;
    for (int i = 0; i < depth; i++) slots[i] = i;
    for (;;) {
        int stop = end - start >= seconds;
        for (int i = 0; i < ready; i++) {
            if (stop) { idle++; continue; }
            seed ^= seed << 13; seed ^= seed >> 7; seed ^= seed << 17;
            uint64_t block = random_ ? seed % blocks : next++ % blocks;
            began[slots[i]] = now();
            side.submit(slots[i], writes, block * bytes, bytes);
        }
        if (idle == depth) break;
        ready = side.reap(slots);
        end = now();
        for (int i = 0; i < ready; i++)
            if (done + i < SAMPLES_MAX) samples[done + i] = (end - began[slots[i]]) * 1e6;
        done += ready;
    }
    long kept = done < SAMPLES_MAX ? done : SAMPLES_MAX;
    qsort(samples, kept, sizeof(float), by_value);
    printf("%ld %.6f %.1f %.1f\n", done, end - start, samples[kept / 2], samples[kept * 99 / 100]);
    return 0;
}
