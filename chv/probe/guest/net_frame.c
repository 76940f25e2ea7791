/* Frames that go out: Ethernet, ARP (RFC 826), IPv4 (RFC 791), UDP (RFC 768), their sums. */
#include "net.h"
#include "say.h"

enum { ETHERTYPE_IP = 0x0800, ETHERTYPE_ARP = 0x0806, FRAME_MIN = 60, CLEARED = 448 };

static u8 buffers[NICS_MAX][TX][BUFFER] DMA;
const u8 everyone[6] = {255, 255, 255, 255, 255, 255};

u32 get16(const u8 *p) { return p[0] << 8 | p[1]; }
u32 get32(const u8 *p) { return get16(p) << 16 | get16(p + 2); }
void put16(u8 *p, u32 value) { p[0] = value >> 8, p[1] = value; }
void put32(u8 *p, u32 value) { put16(p, value >> 16), put16(p + 2, value); }

static u32 sum(u32 s, const u8 *p, u32 n) {
    for (; n > 1; p += 2, n -= 2) s += get16(p);
    return n ? s + (*p << 8) : s;
}

static u32 fold(u32 s) {
    while (s >> 16) s = (s & 0xffff) + (s >> 16);
    return ~s & 0xffff;
}

u8 *frame(struct nic *n) {
    u32 id, len, i = 0;
    while (vq_pop(&n->tx, &id, &len)) n->tx_busy &= ~(1u << id);
    while (i < TX && n->tx_busy >> i & 1) i++;
    if (i == TX) {
        say("net-stuck nic=%u", n->index);
        n->tx_busy = 0;
        i = 0;
    }
    u8 *f = buffers[n->index][i];
    zero(f, CLEARED);
    return f;
}

static void transmit(struct nic *n, u8 *f, u32 len, const u8 *to, u32 ethertype) {
    u32 i = (u32)(f - buffers[n->index][0]) / BUFFER;
    copy(f + VIRTIO_HEADER, to, 6);
    copy(f + VIRTIO_HEADER + 6, n->mac, 6);
    put16(f + VIRTIO_HEADER + 12, ethertype);
    n->tx.ring->desc[i].addr = (u64)f;
    n->tx.ring->desc[i].len = len < VIRTIO_HEADER + FRAME_MIN ? VIRTIO_HEADER + FRAME_MIN : len;
    n->tx.ring->desc[i].flags = 0;
    n->tx_busy |= 1u << i;
    vq_push(&n->tx, i);
}

void send_arp(struct nic *n, u32 operation, u32 ip, const u8 *mac) {
    u8 *f = frame(n), *a = f + ETHERNET;
    put32(a, 0x00010800), put16(a + 4, 0x0604), put16(a + 6, operation);
    copy(a + 8, n->mac, 6), put32(a + 14, n->ip);
    if (mac) copy(a + 18, mac, 6);
    put32(a + 24, ip);
    transmit(n, f, ETHERNET + 28, mac ? mac : everyone, ETHERTYPE_ARP);
}

void send_ip(struct nic *n, u8 *f, u32 protocol, u32 to, const u8 *mac, u32 len, u32 checksum_at) {
    u8 *h = f + ETHERNET, *p = f + L4;
    h[0] = 0x45, put16(h + 2, 20 + len), h[8] = 64, h[9] = protocol;
    put32(h + 12, n->ip), put32(h + 16, to);
    put16(h + 10, fold(sum(0, h, 20)));
    u32 pseudo = protocol == IP_ICMP ? 0 : sum(protocol + len, h + 12, 8);
    if (checksum_at) put16(p + checksum_at, fold(sum(pseudo, p, len)));
    transmit(n, f, L4 + len, mac, ETHERTYPE_IP);
}

void send_udp(struct nic *n, u8 *f, u32 from_port, u32 to_port, u32 to, const u8 *mac, u32 len) {
    put16(f + L4, from_port), put16(f + L4 + 2, to_port), put16(f + L4 + 4, 8 + len);
    send_ip(n, f, IP_UDP, to, mac, 8 + len, 6);
}
