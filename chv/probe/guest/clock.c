/*
 * Time from the TSC, calibrated against the ACPI PM timer (ACPI 6.4 section 4.8.3.3: 3.579545 MHz,
 * 24 bits); sleep by the local APIC's timer (Intel SDM 3A chapter 11). Without a PM timer a TSC of
 * 1 GHz is assumed and said so.
 */
#include "acpi.h"
#include "clock.h"
#include "memory.h"
#include "say.h"

enum { PM_TICKS_PER_MS = 3580, CALIBRATION_MS = 4, SPINS_MAX = 1000000, IDLE_MS = 5 };
enum { EOI = 0xb0 / 4, SPURIOUS = 0xf0 / 4, LVT_TIMER = 0x320 / 4, INITIAL = 0x380 / 4,
       CURRENT = 0x390 / 4, DIVIDE = 0x3e0 / 4 };

extern void wait_tick(void);
u64 tsc_start, tsc_per_ms;
static volatile u32 *apic;
static u32 ticks_per_ms;

u64 us(void) { return tsc_per_ms ? (rdtsc() - tsc_start) * 1000 / tsc_per_ms : 0; }

/* A clock that went backwards (restore on another host) has passed everything. */
bool past(u64 since_us, u64 ms) {
    u64 gone = us() - since_us;
    return (int64_t)gone < 0 || gone >= ms * 1000;
}

void clock_init(void) {
    apic = map(0xfee00000, 4096);
    outb(0x21, 0xff);                            /* firmware may have left the legacy PIC open */
    outb(0xa1, 0xff);
    apic[SPURIOUS] = 0x12f;                      /* enable; spurious vector 47 */
    apic[LVT_TIMER] = 0x10000;                   /* masked, one-shot */
    apic[DIVIDE] = 3;                            /* by 16 */
    apic[INITIAL] = ~0u;
    u64 tsc = rdtsc();
    u32 begun = pm_timer(), gone = 0, spins = 0;
    while (gone < PM_TICKS_PER_MS * CALIBRATION_MS && spins++ < SPINS_MAX)
        gone = (pm_timer() - begun) & 0xffffff;
    tsc = rdtsc() - tsc;
    u32 ticks = ~0u - apic[CURRENT];
    if (spins >= SPINS_MAX || !gone) {
        tsc_per_ms = 1000000;
        say("clock source=none tsc_khz=1000000 apic_khz=0");
        return;
    }
    tsc_per_ms = tsc * PM_TICKS_PER_MS / gone;
    ticks_per_ms = (u64)ticks * PM_TICKS_PER_MS / gone;
    say("clock source=pmtimer tsc_khz=%lu apic_khz=%u", tsc_per_ms, ticks_per_ms);
}

void clock_idle(void) {
    if (!ticks_per_ms) { pause(); return; }
    apic[LVT_TIMER] = 32;                        /* one-shot, vector 32 */
    apic[INITIAL] = ticks_per_ms * IDLE_MS;
    wait_tick();
    apic[EOI] = 0;
}
