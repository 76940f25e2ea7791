/* Identity mapping on demand with 2 MiB pages (Intel SDM 3A chapter 4). */
#include "memory.h"
#include "say.h"

enum { PRESENT = 1, WRITE = 2, USER = 4, LARGE = 0x80, ENTRIES = 512 };

extern u64 pml4[ENTRIES];
static u64 pool[24][ENTRIES] DMA;
static u32 pool_used;

static u64 *level(u64 *table, u32 index) {
    if (!(table[index] & PRESENT)) {
        if (pool_used == COUNT(pool)) {
            say("fatal reason=page-tables");
            stop();
        }
        fill64(pool[pool_used], 0, ENTRIES);
        table[index] = (u64)pool[pool_used++] | USER | WRITE | PRESENT;
    }
    return (u64 *)(table[index] & ~0xfffull);
}

static u64 *directory(u64 address) {
    return level(level(pml4, address >> 39 & 511), address >> 30 & 511);
}

void *map(u64 physical, u64 bytes) {
    for (u64 page = physical & ~0x1fffffull; page < physical + bytes; page += 0x200000) {
        u64 *entry = &directory(page)[page >> 21 & 511];
        if (!(*entry & PRESENT)) *entry = page | LARGE | WRITE | PRESENT;
    }
    return (void *)physical;
}

void map_for_user(u64 address) {
    directory(address)[address >> 21 & 511] |= USER;
    __asm__ volatile("mov %%cr3, %%rax; mov %%rax, %%cr3" ::: "rax", "memory");
}
