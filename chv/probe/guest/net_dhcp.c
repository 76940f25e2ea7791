/* The DHCP client (RFC 2131, RFC 2132): discover, request, bound; asked again at half time. */
#include "clock.h"
#include "net.h"
#include "say.h"

enum { CLIENT = 68, SERVER = 67, RETRY_MS = 1000, PAYLOAD_MIN = 300, COOKIE = 0x63825363 };
enum { DISCOVER = 1, OFFER = 2, REQUEST = 3, ACK = 5, NAK = 6 };
enum { OPT_MASK = 1, OPT_ROUTER = 3, OPT_DNS = 6, OPT_DOMAIN = 15, OPT_MTU = 26, OPT_ADDRESS = 50,
       OPT_LEASE = 51, OPT_TYPE = 53, OPT_SERVER = 54, OPT_END = 255 };
/* Host name "probe", and what we ask for: mask, router, DNS, domain, MTU. */
static const u8 asked[] = {12, 5, 'p', 'r', 'o', 'b', 'e', 55, 5, 1, 3, 6, 15, 26};

struct answer {
    u32 type, mask, router, dns, lease_s, mtu, server, domain_len;
    const char *domain;
};

static u8 *option_address(u8 *o, u8 code, u32 ip) {
    o[0] = code, o[1] = 4;
    put32(o + 2, ip);
    return o + 6;
}

static void send(struct nic *n) {
    u8 *f = frame(n), *d = f + L4 + 8, *o = d + 240;
    d[0] = 1, d[1] = 1, d[2] = 6;
    put32(d + 4, n->xid);
    copy(d + 28, n->mac, 6);
    put32(d + 236, COOKIE);
    o[0] = OPT_TYPE, o[1] = 1, o[2] = n->lease == LEASE_DISCOVER ? DISCOVER : REQUEST;
    o += 3;
    if (n->lease == LEASE_REQUEST) {
        o = option_address(o, OPT_ADDRESS, n->offered);
        o = option_address(o, OPT_SERVER, n->server);
    }
    copy(o, asked, sizeof asked);
    o += sizeof asked;
    *o++ = OPT_END;
    u32 len = o - d, ip = n->ip;
    n->ip = 0;                                   /* we speak from 0.0.0.0, also when renewing */
    send_udp(n, f, CLIENT, SERVER, 0xffffffff, everyone, len < PAYLOAD_MIN ? PAYLOAD_MIN : len);
    n->ip = ip;
    n->dhcp_us = us();
}

void dhcp_start(struct nic *n) {
    n->start_us = us();
    n->late = false;
    n->xid = rdtsc() ^ get32(n->mac + 2);
    n->lease = LEASE_DISCOVER;
    send(n);
}

void dhcp_poll(struct nic *n) {
    if (n->lease == LEASE_BOUND) {
        if (n->lease_s != ~0u && past(n->bound_us, n->lease_s * 500ull)) dhcp_start(n);
        return;
    }
    if (!n->late && past(n->start_us, n->lease_ms)) {
        n->late = true;
        say("lease-late nic=%u waited_us=%lu", n->index, us() - n->start_us);
    }
    if (!past(n->dhcp_us, RETRY_MS)) return;
    n->lease = LEASE_DISCOVER;
    send(n);
}

static struct answer parse(const u8 *d, u32 len) {
    struct answer a = {.domain = ""};
    const u8 *end = d + len;
    for (const u8 *o = d + 240; o + 1 < end && *o != OPT_END; o += *o ? 2 + o[1] : 1) {
        const u8 *v = o + 2;
        if (!*o) continue;
        if (v + o[1] > end) break;
        if (*o == OPT_TYPE) a.type = *v;
        if (*o == OPT_DOMAIN) a.domain = (const char *)v, a.domain_len = o[1];
        if (*o == OPT_MTU && o[1] >= 2) a.mtu = get16(v);
        if (o[1] < 4) continue;
        if (*o == OPT_MASK) a.mask = get32(v);
        if (*o == OPT_ROUTER) a.router = get32(v);
        if (*o == OPT_DNS) a.dns = get32(v);
        if (*o == OPT_LEASE) a.lease_s = get32(v);
        if (*o == OPT_SERVER) a.server = get32(v);
    }
    return a;
}

static void bind(struct nic *n, u32 ip, const struct answer *a) {
    n->lease = LEASE_BOUND;
    n->ip = ip, n->mask = a->mask, n->router = a->router, n->dns = a->dns;
    n->server = a->server, n->lease_s = a->lease_s;
    n->bound_us = us();
    say("lease nic=%u addr=%I mask=%I router=%I dns=%I server=%I domain=\"%S\" mtu=%u secs=%u "
        "us=%lu", n->index, n->ip, n->mask, n->router, n->dns, n->server, a->domain_len, a->domain,
        a->mtu, n->lease_s, n->bound_us - n->start_us);
    send_arp(n, 1, n->ip, NULL);                 /* announce (RFC 5227) */
}

void dhcp_input(struct nic *n, const u8 *d, u32 len) {
    if (len < 241 || d[0] != 2 || get32(d + 4) != n->xid || n->lease == LEASE_BOUND) return;
    struct answer a = parse(d, len);
    if (a.type == NAK) {
        say("lease-nak nic=%u server=%I", n->index, a.server);
        n->lease = LEASE_DISCOVER;
        send(n);
    }
    if (a.type == OFFER && n->lease == LEASE_DISCOVER) {
        n->lease = LEASE_REQUEST;
        n->offered = get32(d + 16), n->server = a.server;
        send(n);
    }
    if (a.type == ACK && n->lease == LEASE_REQUEST) bind(n, get32(d + 16), &a);
}
