/* Line output on COM1, a 16550 with a FIFO of 16 bytes. */
#include <stdarg.h>
#include "clock.h"
#include "say.h"

enum { DATA = 0x3f8, FIFO_CONTROL = 0x3fa, LINE_STATUS = 0x3fd };
enum { TRANSMITTER_EMPTY = 0x20, FIFO_ON_AND_CLEAR = 7, FIFO = 16 };
enum { PATIENCE = 1000000 };                     /* polls of a reader that does not read */

static char line[768] UNCLEARED;
static u32 used;

static void put(char c) {
    if (used < sizeof line - 1) line[used++] = c;
}

static void put_number(u64 value, u32 base, u32 width) {
    char digits[24];
    u32 n = 0;
    do {
        digits[n++] = "0123456789abcdef"[value % base];
        value /= base;
    } while (value || n < width);
    while (n) put(digits[--n]);
}

static void put_text(const char *s, u64 limit) {
    for (; limit-- && *s; s++) put(*s < ' ' || *s > '~' || *s == '@' || *s == '"' ? '?' : *s);
}

static void put_mac(const u8 *mac) {
    for (u32 i = 0; i < 6; i++) {
        if (i) put(':');
        put_number(mac[i], 16, 2);
    }
}

static void put_ipv4(u32 ip) {
    for (u32 i = 0; i < 4; i++) {
        if (i) put('.');
        put_number(ip >> (24 - 8 * i) & 255, 10, 1);
    }
}

static void put_bdf(u32 bdf) {
    put_number(bdf >> 8, 16, 2);
    put(':');
    put_number(bdf >> 3 & 31, 16, 2);
    put('.');
    put_number(bdf & 7, 10, 1);
}

static void put_hex(u64 value) {
    put('0');
    put('x');
    put_number(value, 16, 1);
}

/* A FIFO's worth for each wait: few exits, and nothing lost on a slow reader. */
static void flush(void) {
    const char *s = line;
    for (u64 left = used; left;) {
        u64 n = left < FIFO ? left : FIFO;
        left -= n;
        for (u32 i = 0; !(inb(LINE_STATUS) & TRANSMITTER_EMPTY) && i < PATIENCE; i++) pause();
        __asm__ volatile("rep outsb" : "+S"(s), "+c"(n) : "d"(DATA) : "memory");
    }
}

static void put_argument(const char kind, bool wide, va_list *a) {
    switch (kind) {
    case 'u': put_number(wide ? va_arg(*a, u64) : va_arg(*a, u32), 10, 1); break;
    case 'x': put_hex(wide ? va_arg(*a, u64) : va_arg(*a, u32)); break;
    case 's': put_text(va_arg(*a, const char *), ~0ull); break;
    case 'S': { u32 n = va_arg(*a, u32); put_text(va_arg(*a, const char *), n); break; }
    case 'M': put_mac(va_arg(*a, const u8 *)); break;
    case 'I': put_ipv4(va_arg(*a, u32)); break;
    case 'B': put_bdf(va_arg(*a, u32)); break;
    }
}

/* Without its FIFO QEMU's port loses bytes when the reader is slow. */
void say_init(void) { outb(FIFO_CONTROL, FIFO_ON_AND_CLEAR); }

void say(const char *f, ...) {
    va_list a;
    va_start(a, f);
    used = 0;
    put('@');
    put_number(us(), 10, 1);
    put(' ');
    for (; *f; f++) {
        if (*f != '%') { put(*f); continue; }
        bool wide = *++f == 'l';
        if (wide) f++;
        put_argument(*f, wide, &a);
    }
    va_end(a);
    line[used++] = '\n';
    flush();
}
