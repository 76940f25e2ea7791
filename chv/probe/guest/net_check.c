/*
 * Targets tried one after the other once there is an address: ping:A, tcp:A:P (connects), echo:A:P
 * (TCP, must answer what it was sent), udp:A:P (must answer), dns:NAME. '!' in front: must fail.
 * A is an IPv4 address, or router, dns, server as the lease names them. timeout=MS and lease=MS set
 * the patience for what follows. DNS: RFC 1035; TCP: RFC 9293, as little of it as serves.
 */
#include "clock.h"
#include "net.h"
#include "options.h"
#include "say.h"
#include "text.h"

enum { TIMEOUT_MS = 3000, LEASE_MS = 10000, RESEND_MS = 500, DNS_PORT = 53, NAME_MAX = 200 };
enum { FIN = 1, SYN = 2, RST = 4, PSH = 8, ACK = 16 };
static const char *const kinds[] = {"", "ping", "tcp", "echo", "udp", "dns"};
static const char greeting[] = "probe\n";
enum { GREETING = sizeof greeting - 1 };

void checks_start(struct nic *n, const char *list) {
    keep(n->checks, sizeof n->checks, list, span(list, ' ', ' '));
    n->todo = *n->checks ? n->checks : NULL;
    n->check = CHECK_NONE;
    n->timeout_ms = TIMEOUT_MS;
    n->lease_ms = item_number(n->checks, "lease", LEASE_MS);
}

static bool good(const char *what) {
    return starts(what, "ok") || starts(what, "open") || starts(what, "echo") ||
           starts(what, "reply");
}

static void result(struct nic *n, const char *what, u32 addr) {
    if (!n->check) return;
    bool ok = good(what) != n->inverted;
    tally(ok);
    say("check nic=%u kind=%s target=%S result=%s ok=%u addr=%I us=%lu", n->index,
        kinds[n->check], n->target_len, n->target_text, what, ok, addr, us() - n->check_us);
    n->check = CHECK_NONE;
}

static u32 named(const struct nic *n, const char **at) {
    u32 len = span(*at, ':', ',');
    const char *name = *at;
    if (**at >= '0' && **at <= '9') return address(at);
    *at += len;
    if (is(name, len, "router")) return n->router;
    if (is(name, len, "server")) return n->server;
    return is(name, len, "dns") ? n->dns : 0;
}

static enum check kind_of(const char *text) {
    u32 len = span(text, ':', ',');
    for (u32 i = CHECK_PING; i < COUNT(kinds); i++)
        if (text[len] == ':' && is(text, len, kinds[i])) return i;
    return CHECK_NONE;
}

/* An item that is no check but sets something; false if it is unknown. */
static bool setting(struct nic *n, const char *text) {
    const char *value = text + span(text, '=', ',') + 1;
    if (starts(text, "timeout=")) n->timeout_ms = number(&value);
    return starts(text, "timeout=") || starts(text, "lease=") || starts(text, "dhcp") ||
           starts(text, "address=") || starts(text, "router=") || starts(text, "dns=");
}

static void next(struct nic *n) {
    const char *text = n->todo;
    u32 len = span(text, ',', ',');
    n->todo = text[len] == ',' ? text + len + 1 : NULL;
    n->inverted = *text == '!';
    text += n->inverted, len -= n->inverted;
    n->check = kind_of(text);
    if (!n->check) {
        if (setting(n, text)) return;
        say("check-unknown nic=%u text=\"%S\"", n->index, len, text);
        return tally(false);
    }
    u32 skip = span(text, ':', ':') + 1;
    n->target_text = text + skip, n->target_len = len - skip;
    const char *at = n->target_text;
    n->target = n->check == CHECK_DNS ? n->dns : named(n, &at);
    if (*at == ':') at++;
    n->port = n->check == CHECK_DNS ? DNS_PORT : number(&at);
    n->local = 0xc000 | (rdtsc() & 0x3fff);
    n->hop = n->acked = 0;
    n->answered = false;
    n->check_us = us();
    n->sent_us = 0;
    if (!n->target) result(n, "no-target", 0);
}

/* ---- what goes out ---- */

static u32 hop_of(const struct nic *n) {
    return (n->target ^ n->ip) & n->mask ? n->router : n->target;
}

static void send_tcp(struct nic *n, u32 flags, u32 seq, u32 len) {
    u8 *f = frame(n), *p = f + L4;
    put16(p, n->local), put16(p + 2, n->port);
    put32(p + 4, seq), put32(p + 8, flags & ACK ? n->acked : 0);
    put16(p + 12, 0x5000 | flags), put16(p + 14, 1024);
    copy(p + 20, greeting, len);
    send_ip(n, f, IP_TCP, n->target, n->hop_mac, 20 + len, 16);
}

static void send_question(struct nic *n) {
    u8 *f = frame(n), *q = f + L4 + 8, *o = q + 12, *label = o++;
    put16(q, n->local), q[2] = 1, q[5] = 1;      /* one question, recursion desired */
    for (u32 i = 0; i < n->target_len && i < NAME_MAX; i++) {
        if (n->target_text[i] != '.') {
            *o++ = n->target_text[i];
            continue;
        }
        *label = o - label - 1;
        label = o++;
    }
    *label = o - label - 1;
    *o++ = 0;
    put32(o, 0x00010001);                        /* A, IN */
    send_udp(n, f, n->local, DNS_PORT, n->target, n->hop_mac, o + 4 - q);
}

static void send_ping(struct nic *n) {
    u8 *f = frame(n), *p = f + L4;
    p[0] = 8, put16(p + 4, n->local);
    send_ip(n, f, IP_ICMP, n->target, n->hop_mac, 16, 2);
}

static void send_greeting(struct nic *n) {
    u8 *f = frame(n);
    copy(f + L4 + 8, greeting, GREETING);
    send_udp(n, f, n->local, n->port, n->target, n->hop_mac, GREETING);
}

static void send(struct nic *n) {
    n->sent_us = us();
    if (n->hop != hop_of(n)) send_arp(n, 1, hop_of(n), NULL);
    else if (n->check == CHECK_PING) send_ping(n);
    else if (n->check == CHECK_UDP) send_greeting(n);
    else if (n->check == CHECK_DNS) send_question(n);
    else if (n->answered) send_tcp(n, PSH | ACK, n->local + 1, GREETING);
    else send_tcp(n, SYN, n->local, 0);
}

/* ---- what comes in ---- */

static void dns_input(struct nic *n, const u8 *d, u32 len) {
    if (len < 12 || get16(d) != n->local) return;
    u32 code = d[3] & 15;
    if (code) return result(n, code == 3 ? "nxdomain" : "error", 0);
    const u8 *p = d + 12, *end = d + len;
    while (p < end && *p) p += 1 + *p;
    p += 5;
    for (u32 left = get16(d + 6); left && p + 12 <= end; left--) {
        while (p < end && *p && *p < 0xc0) p += 1 + *p;
        p += p < end && *p ? 2 : 1;
        if (p + 14 <= end && get16(p) == 1 && get16(p + 8) == 4)
            return result(n, "ok", get32(p + 10));
        if (p + 10 > end) break;
        p += 10 + get16(p + 8);
    }
    result(n, "no-address", 0);
}

static bool greeted(const u8 *p, u32 len) {
    return len >= GREETING && starts((const char *)p, greeting);
}

static void tcp_input(struct nic *n, u32 from, const u8 *p, u32 len) {
    u32 flags = p[13], header = (p[12] >> 4) * 4;
    if (header < 20 || header > len) return;
    u32 body = len - header;
    if (flags & RST) return result(n, n->answered ? "reset" : "refused", from);
    if ((flags & (SYN | ACK)) == (SYN | ACK)) {
        n->acked = get32(p + 4) + 1;
        if (n->check == CHECK_ECHO) {
            n->answered = true;
            return send(n);
        }
        send_tcp(n, RST, n->local + 1, 0);       /* so that the peer forgets us */
        return result(n, "open", from);
    }
    if (n->check != CHECK_ECHO || !n->answered) return;
    if (!body && !(flags & FIN)) return;
    send_tcp(n, RST, n->local + 1 + GREETING, 0);
    result(n, greeted(p + header, body) ? "echo" : body ? "reply" : "closed", from);
}

static void udp_input(struct nic *n, u32 from, const u8 *p, u32 len) {
    if (n->check == CHECK_DNS) dns_input(n, p + 8, len - 8);
    else if (n->check == CHECK_UDP)
        result(n, greeted(p + 8, len - 8) ? "echo" : "reply", from);
}

void check_input(struct nic *n, u32 protocol, u32 from, const u8 *p, u32 len) {
    if (!n->check) return;
    bool ports = get16(p + 2) == n->local && get16(p) == n->port && from == n->target;
    bool tcp = n->check == CHECK_TCP || n->check == CHECK_ECHO;
    if (protocol == IP_ICMP && p[0] == 3) result(n, p[1] == 3 ? "refused" : "unreachable", from);
    else if (protocol == IP_ICMP && p[0] == 0 && n->check == CHECK_PING && from == n->target &&
             get16(p + 4) == n->local) result(n, "ok", from);
    else if (protocol == IP_UDP && ports && !tcp) udp_input(n, from, p, len);
    else if (protocol == IP_TCP && ports && tcp && len >= 20) tcp_input(n, from, p, len);
}

void check_arp(struct nic *n, u32 from, const u8 *mac) {
    if (!n->check || from != hop_of(n) || n->hop == from) return;
    n->hop = from;
    copy(n->hop_mac, mac, 6);
    send(n);
}

bool checks_poll(struct nic *n) {
    if (n->lease != LEASE_BOUND && !n->late) return n->todo;
    if (!n->check && n->todo) next(n);
    if (n->check && n->lease != LEASE_BOUND) result(n, "no-lease", 0);
    if (n->check && past(n->check_us, n->timeout_ms))
        result(n, n->hop ? "timeout" : "no-arp", 0);
    if (n->check && (!n->sent_us || past(n->sent_us, RESEND_MS))) send(n);
    return n->check || n->todo;
}
