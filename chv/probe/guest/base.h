/*
 * What every file of the probe guest uses: types, ports, string instructions. Nothing with state.
 *
 * Memory is moved by string instructions: where guest code is emulated each turn of a loop costs
 * several microseconds, each turn of a rep instruction one.
 */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

#define DMA __attribute__((section(".dma,\"aw\",@nobits#"), aligned(4096)))
/* Not cleared at start, as that costs time: whoever uses it makes it ready. */
#define UNCLEARED __attribute__((section(".dma,\"aw\",@nobits#"), aligned(16)))
#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* Not mfence: KVM's instruction emulator lacks its register form. */
static inline void barrier(void) { __asm__ volatile("lock; addl $0, (%%rsp)" ::: "memory", "cc"); }
static inline void pause(void) { __asm__ volatile("pause" ::: "memory"); }
static inline _Noreturn void stop(void) { for (;;) __asm__ volatile("cli; hlt"); }

static inline u64 rdtsc(void) {
    u32 low, high;
    __asm__ volatile("rdtsc" : "=a"(low), "=d"(high));
    return (u64)high << 32 | low;
}

static inline void outb(u16 port, u8 v) { __asm__ volatile("outb %0, %1" ::"a"(v), "Nd"(port)); }
static inline void outw(u16 port, u16 v) { __asm__ volatile("outw %0, %1" ::"a"(v), "Nd"(port)); }
static inline void outl(u16 port, u32 v) { __asm__ volatile("outl %0, %1" ::"a"(v), "Nd"(port)); }

static inline u8 inb(u16 port) {
    u8 v;
    __asm__ volatile("inb %1, %0" : "=a"(v) : "Nd"(port));
    return v;
}

static inline u16 inw(u16 port) {
    u16 v;
    __asm__ volatile("inw %1, %0" : "=a"(v) : "Nd"(port));
    return v;
}

static inline u32 inl(u16 port) {
    u32 v;
    __asm__ volatile("inl %1, %0" : "=a"(v) : "Nd"(port));
    return v;
}

static inline void fill64(void *to, u64 value, u64 count) {
    __asm__ volatile("rep stosq" : "+D"(to), "+c"(count) : "a"(value) : "memory");
}

/* Eight bytes a turn as far as they go: where it is emulated, each turn costs the same. */
static inline void copy(void *to, const void *from, u64 bytes) {
    u64 quads = bytes / 8, rest = bytes % 8;
    __asm__ volatile("rep movsq" : "+D"(to), "+S"(from), "+c"(quads)::"memory");
    __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(rest)::"memory");
}

static inline void zero(void *to, u64 bytes) {
    u64 quads = bytes / 8, rest = bytes % 8;
    __asm__ volatile("rep stosq" : "+D"(to), "+c"(quads) : "a"(0) : "memory");
    __asm__ volatile("rep stosb" : "+D"(to), "+c"(rest) : "a"(0) : "memory");
}

/* Whether count quads from s on all equal value. */
static inline bool all64(const void *s, u64 value, u64 count) {
    bool equal;
    __asm__ volatile("repe scasq"
                     : "+D"(s), "+c"(count), "=@ccz"(equal) : "a"(value) : "memory");
    return equal;
}
