/*
 * The probe guest: proves that a VM's CPU, disks, network, power and hot-plug work, and says so on
 * the serial port. Words of the kernel command line (docs/probe.md):
 *   cpu=LIST  disk[.N]=PLAN  net[.N]=CHECKS  end=HOW  end.after=MS  beat=MS  button=off|stay
 */
#include "acpi.h"
#include "clock.h"
#include "devices.h"
#include "fault.h"
#include "input.h"
#include "instructions.h"
#include "memory.h"
#include "options.h"
#include "power.h"
#include "say.h"
#include "slots.h"
#include "text.h"

enum { PROTOCOL = 1, PVH_MAGIC = 0x336ec578, COMMAND_LINE_MAX = 4096 };
enum { BEAT_MS = 1000, LOOK_MS = 100, SCAN_MS = 250, INPUT_MS = 5, RAM = 1, MEMORY_LINES_MAX = 32 };

/* Xen's hvm_start_info, version 1. */
struct start_info {
    u32 magic, version, flags, modules;
    u64 module_list, command_line, rsdp, memory_map;
    u32 memory_entries, reserved;
};
struct memory_entry { u64 start, size; u32 type, reserved; };

static void say_memory(const struct start_info *info) {
    u64 total = 0;
    u32 count = info->version >= 1 ? info->memory_entries : 0;
    const struct memory_entry *m = map(info->memory_map, count * sizeof *m);
    for (u32 i = 0; i < count && i < MEMORY_LINES_MAX; i++) {
        if (m[i].type != RAM) continue;
        total += m[i].size;
        say("memory start=%lx size=%lu", m[i].start, m[i].size);
    }
    say("machine memory=%lu cpus=%u cpus_max=%u", total, acpi.cpus_present, acpi.cpus_max);
}

static void announced(void) {
    u32 seen = announcements();
    if (seen & EVENT_PCI) devices_scan(true);
    if (seen & EVENT_BUTTON) power_button();
}

/* Whether the moment has come again; if so, the next one is counted from now. */
static bool due(u64 *last_us, u64 every_ms) {
    if (!past(*last_us, every_ms)) return false;
    *last_us = us();
    return true;
}

static void finished(void) {
    static bool said;
    const char *how = option("end");
    if (!said) tally_report();
    said = true;
    if (!how || us() < option_number("end.after", 0) * 1000) return;
    static bool ended;                           /* end=stay comes back */
    if (!ended) power_end(how, span(how, ' ', ' '));
    ended = true;
}

static void work(void) {
    u64 beat_ms = option_number("beat", BEAT_MS), beats = 0;
    u64 beat_us = us(), look_us = beat_us, scan_us = beat_us, input_us = beat_us;
    for (;;) {
        bool busy = devices_poll();
        if (beat_ms && due(&beat_us, beat_ms)) say("beat n=%lu", ++beats);
        if (due(&look_us, LOOK_MS)) announced();
        if (due(&scan_us, SCAN_MS)) devices_scan(true);
        if (due(&input_us, INPUT_MS)) input_poll();
        if (busy) {
            pause();
            continue;
        }
        finished();
        clock_idle();
    }
}

void main(const struct start_info *info) {
    tsc_start = rdtsc();
    say_init();
    say("boot protocol=%u", (u32)PROTOCOL);
    faults_init();
    if (info->magic != PVH_MAGIC) say("boot-error reason=not-pvh magic=%x", info->magic);
    if (info->command_line) options_init(map(info->command_line, COMMAND_LINE_MAX));
    acpi_init(info->rsdp);
    clock_init();
    say("command text=\"%s\"", options_text());
    say_memory(info);
    const char *cpu = option("cpu");
    if (cpu) instructions_try(cpu);
    devices_init();
    devices_scan(false);
    acpi_scan();
    announce_init();
    say("ready virtio=%u", devices_count());
    work();
}
