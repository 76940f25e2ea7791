/*
 * Virtio-net devices. net.c: the device, what comes in. net_frame.c: what goes out. net_dhcp.c: the
 * lease. net_check.c: the list of targets, one after the other.
 */
#pragma once
#include "virtio.h"

enum { NICS_MAX = 8, RX = 32, TX = 8, BUFFER = 2048, CHECKS_LEN = 512 };
/* Offsets in a frame: virtio header, Ethernet header, IP header without options. */
enum { VIRTIO_HEADER = 12, ETHERNET = VIRTIO_HEADER + 14, L4 = ETHERNET + 20 };
enum { IP_ICMP = 1, IP_TCP = 6, IP_UDP = 17 };
enum check { CHECK_NONE, CHECK_PING, CHECK_TCP, CHECK_ECHO, CHECK_UDP, CHECK_DNS };
enum lease { LEASE_DISCOVER, LEASE_REQUEST, LEASE_BOUND };

struct nic {
    bool used, off;
    u32 index;
    struct vdev device;
    struct vqueue rx, tx;
    u32 tx_busy;                                 /* a bit for each transmit buffer */
    u8 mac[6];
    char name[18];                               /* the MAC as text */

    enum lease lease;
    u32 ip, mask, router, dns, server, offered, lease_s, xid;
    u64 dhcp_us, start_us, bound_us;
    bool late;

    char checks[CHECKS_LEN];
    const char *todo;                            /* what is left of checks */
    enum check check;
    bool inverted, answered;
    const char *target_text;
    u32 target_len, target, port, local, acked;
    u32 hop;                                     /* whose MAC hop_mac is */
    u8 hop_mac[6];
    u64 check_us, sent_us, timeout_ms, lease_ms;
};

void nics_init(void);
struct nic *nic_add(const struct vdev *device);
/* True while checks are left. */
bool nic_poll(struct nic *n);
void nic_remove(struct nic *n);
void nic_describe(const struct nic *n);
/* Give the NICs that are meant a new list of checks; their number. */
u32 nic_command(const char *who, u32 len, const char *checks);

/* net_frame.c */
extern const u8 everyone[6];
u32 get16(const u8 *p);
u32 get32(const u8 *p);
void put16(u8 *p, u32 value);
void put32(u8 *p, u32 value);
u8 *frame(struct nic *n);                        /* an empty frame */
void send_arp(struct nic *n, u32 operation, u32 ip, const u8 *mac);
/* The payload, len bytes with its own header, is at f + L4; checksum_at 0: none. */
void send_ip(struct nic *n, u8 *f, u32 protocol, u32 to, const u8 *mac, u32 len, u32 checksum_at);
void send_udp(struct nic *n, u8 *f, u32 from_port, u32 to_port, u32 to, const u8 *mac, u32 len);

/* net_dhcp.c */
void dhcp_start(struct nic *n);
void dhcp_poll(struct nic *n);
void dhcp_input(struct nic *n, const u8 *d, u32 len);

/* net_check.c */
void checks_start(struct nic *n, const char *list);
bool checks_poll(struct nic *n);
void check_arp(struct nic *n, u32 from, const u8 *mac);
/* A packet for us: p, len bytes, is what follows the IP header. */
void check_input(struct nic *n, u32 protocol, u32 from, const u8 *p, u32 len);
