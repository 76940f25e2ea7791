/*
 * The virtio-net device (virtio 1.2 section 5.1) and what comes in: ARP requests and pings for our
 * address are answered, leases and answers to checks go where they belong.
 */
#include "clock.h"
#include "net.h"
#include "options.h"
#include "say.h"
#include "text.h"

enum { NET_MTU = 1 << 3, NET_MAC = 1 << 5, NET_STATUS = 1 << 16 };
enum { CONFIG_STATUS = 6, CONFIG_MTU = 10, LOOK_MS = 200 };

static struct nic nics[NICS_MAX] UNCLEARED;
static struct vring rings[NICS_MAX][2] DMA;
static u8 buffers[NICS_MAX][RX][BUFFER] DMA;

static bool link_up(const struct nic *n) {
    return n->device.features & NET_STATUS ? n->device.config[CONFIG_STATUS] & 1 : true;
}

void nic_describe(const struct nic *n) {
    const volatile u8 *c = n->device.config;
    u32 mtu = n->device.features & NET_MTU ? c[CONFIG_MTU] | c[CONFIG_MTU + 1] << 8 : 0;
    say("nic nic=%u dev=%B mac=%M link=%u mtu=%u", n->index, (u32)n->device.bdf, n->mac, link_up(n),
        mtu);
}

static bool start(struct nic *n) {
    if (!virtio_start(&n->device, NET_MTU | NET_MAC | NET_STATUS)) return false;
    if (!virtio_queue(&n->device, &n->rx, 0, &rings[n->index][0])) return false;
    if (!virtio_queue(&n->device, &n->tx, 1, &rings[n->index][1])) return false;
    for (u32 i = 0; i < 6; i++) n->mac[i] = n->device.config[i];
    virtio_ready(&n->device);
    for (u32 i = 0; i < RX && i < n->rx.size; i++) {
        n->rx.ring->desc[i].addr = (u64)buffers[n->index][i];
        n->rx.ring->desc[i].len = BUFFER;
        n->rx.ring->desc[i].flags = DESC_WRITE;
        vq_push(&n->rx, i);
    }
    return true;
}

static void write_name(struct nic *n) {
    for (u32 i = 0; i < 17; i++)
        n->name[i] = i % 3 == 2 ? ':' : "0123456789abcdef"[n->mac[i / 3] >> (i % 3 ? 0 : 4) & 15];
}

/* A fixed address instead of a lease: address=A/BITS, router=, dns=. */
static bool take_address(struct nic *n) {
    const char *at = item(n->checks, "address"), *router = item(n->checks, "router");
    const char *dns = item(n->checks, "dns");
    if (!at) return false;
    n->ip = address(&at);
    u32 bits = *at == '/' ? (at++, number(&at)) : 24;
    n->mask = bits ? ~0u << (32 - bits) : 0;
    n->router = router ? address(&router) : 0;
    n->dns = dns ? address(&dns) : 0;
    n->lease_s = ~0u;
    n->lease = LEASE_BOUND;
    send_arp(n, 1, n->ip, NULL);
    return true;
}

void nics_init(void) {
    for (u32 i = 0; i < NICS_MAX; i++) nics[i].used = false;
}

struct nic *nic_add(const struct vdev *device) {
    u32 i = 0;
    while (i < NICS_MAX && nics[i].used) i++;
    if (i == NICS_MAX) {
        say("device-error dev=%B type=%u reason=too-many", (u32)device->bdf, (u32)device->type);
        return NULL;
    }
    struct nic *n = &nics[i];
    zero(n, sizeof *n);
    n->used = true, n->index = i, n->device = *device;
    if (!start(n)) {
        say("device-error dev=%B type=%u reason=negotiation", (u32)device->bdf, (u32)device->type);
        n->off = true;
        return n;
    }
    write_name(n);
    nic_describe(n);
    const char *checks = option_for("net", i, n->name);
    n->off = checks && starts(checks, "off");
    checks_start(n, checks && !n->off ? checks : "");
    if (!n->off && !take_address(n)) dhcp_start(n);
    return n;
}

void nic_remove(struct nic *n) { n->used = false; }

static void pong(struct nic *n, u32 from, const u8 *mac, const u8 *p, u32 len) {
    u8 *f = frame(n);
    if (len > BUFFER - L4) return;
    copy(f + L4, p, len);
    f[L4] = 0, put16(f + L4 + 2, 0);
    send_ip(n, f, IP_ICMP, from, mac, len, 2);
}

static void ip_input(struct nic *n, const u8 *h, u32 len, const u8 *mac) {
    u32 header = (h[0] & 15) * 4, total = get16(h + 2), from = get32(h + 12);
    bool fragment = get16(h + 6) & 0x3fff;
    if (h[0] >> 4 != 4 || header < 20 || total > len || total < header + 8 || fragment) return;
    const u8 *p = h + header;
    u32 body = total - header;
    if (h[9] == IP_UDP && get16(p + 2) == 68) return dhcp_input(n, p + 8, body - 8);
    if (!n->ip || get32(h + 16) != n->ip) return;
    if (h[9] == IP_ICMP && p[0] == 8) pong(n, from, mac, p, body);
    else check_input(n, h[9], from, p, body);
}

static void arp_input(struct nic *n, const u8 *a) {
    u32 from = get32(a + 14), operation = get16(a + 6);
    if (!n->ip) return;
    if (operation == 1 && get32(a + 24) == n->ip && from != n->ip) send_arp(n, 2, from, a + 8);
    if (operation == 2) check_arp(n, from, a + 8);
}

static void input(struct nic *n, const u8 *e, u32 len) {
    if (len < 14 + 28) return;
    if (get16(e + 12) == 0x0800) ip_input(n, e + 14, len - 14, e + 6);
    if (get16(e + 12) == 0x0806) arp_input(n, e + 14);
}

bool nic_poll(struct nic *n) {
    u32 id, len;
    if (n->off) return false;
    while (vq_pop(&n->rx, &id, &len)) {
        if (id < RX && len > VIRTIO_HEADER && len <= BUFFER)
            input(n, buffers[n->index][id] + VIRTIO_HEADER, len - VIRTIO_HEADER);
        vq_push(&n->rx, id);
    }
    dhcp_poll(n);
    return checks_poll(n);
}

u32 nic_command(const char *who, u32 len, const char *checks) {
    u32 found = 0;
    for (struct nic *n = nics; n < nics + NICS_MAX; n++) {
        if (!n->used || n->off || !meant(who, len, n->index, n->name)) continue;
        checks_start(n, checks);
        found++;
    }
    return found;
}
