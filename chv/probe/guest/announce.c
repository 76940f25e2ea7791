/*
 * Announcements of ACPI machines. Cloud Hypervisor: GED notification register (read clears it),
 * PCI, CPU and memory controllers in MMIO. QEMU: the power button in PM1 status, the same
 * controllers in I/O ports (its docs/specs: acpi_pci_hotplug, acpi_cpu_hotplug, acpi_mem_hotplug),
 * without a GED.
 */
#include "acpi.h"
#include "devices.h"
#include "say.h"
#include "slots.h"

enum { GED_CPUS = 1, GED_MEMORY = 2, GED_PCI = 4, GED_BUTTON = 8 };
enum { PM1_BUTTON = 0x100 };
enum { PCI_DOWN = 4, PCI_EJECT = 8, PCI_SELECT = 16, BUS_SELECTS = 16 };
enum { SELECT = 0, CPU_FLAGS = 4, MEMORY_FLAGS = 0x14, MEMORY_SLOTS = 8, CPUS_MAX = 255 };
enum { ENABLED = 1, INSERTING = 2, REMOVING = 4, EJECT = 8 };

static bool clings, leaving;

/* Eject what the selected bus is asked to give up; whether there was anything. */
static bool eject_from_bus(u32 select) {
    u32 down = reg_read(acpi.pci, PCI_DOWN, 4);
    for (u32 slot = 0; slot < 32; slot++) {
        if (!(down >> slot & 1)) continue;
        if (acpi.ged.at) devices_release(slot << 3, "requested");
        reg_write(acpi.pci, PCI_EJECT, 4, 1u << slot);
        if (!acpi.ged.at) say("slot-ejected bus_select=%u slot=%u", select, slot);
    }
    return down;
}

/* QEMU numbers its buses by a property of the DSDT; which one it was shows when we look again. */
static bool eject(void) {
    if (!acpi.pci.at) return false;
    if (acpi.ged.at) return eject_from_bus(0);
    bool any = false;
    for (u32 select = 0; select < BUS_SELECTS; select++) {
        reg_write(acpi.pci, PCI_SELECT, 4, select);
        any |= eject_from_bus(select);
    }
    return any;
}

static void look_at_cpus(void) {
    u32 enabled = 0;
    bool changed = false;
    for (u32 i = 0; acpi.cpus.at && i < acpi.cpus_max && i < CPUS_MAX; i++) {
        reg_write(acpi.cpus, SELECT, 4, i);
        u8 flags = reg_read(acpi.cpus, CPU_FLAGS, 1);
        bool in = flags & INSERTING, out = flags & REMOVING;
        if (in || out) {
            say("cpu-%s id=%u", in ? "added" : "removed", i);
            reg_write(acpi.cpus, CPU_FLAGS, 1, in ? INSERTING : REMOVING);
            if (out) reg_write(acpi.cpus, CPU_FLAGS, 1, EJECT);
            changed = true;
        }
        enabled += flags & ENABLED && !out;
    }
    if (changed) say("cpus present=%u max=%u", enabled, acpi.cpus_max);
}

static void look_at_memory(void) {
    for (u32 i = 0; acpi.memory.at && i < MEMORY_SLOTS; i++) {
        reg_write(acpi.memory, SELECT, 4, i);
        u8 flags = reg_read(acpi.memory, MEMORY_FLAGS, 1);
        if (!(flags & INSERTING)) continue;
        u64 start = reg_read(acpi.memory, 0, 4) | (u64)reg_read(acpi.memory, 4, 4) << 32;
        u64 size = reg_read(acpi.memory, 8, 4) | (u64)reg_read(acpi.memory, 12, 4) << 32;
        reg_write(acpi.memory, MEMORY_FLAGS, 1, INSERTING);
        say("memory-added slot=%u start=%lx size=%lu", i, start, size);
    }
}

static u32 qemu_announcements(void) {
    u32 seen = !clings && eject() ? EVENT_PCI : 0;
    look_at_cpus();
    look_at_memory();
    if (!acpi.pm1_event.at || !(reg_read(acpi.pm1_event, 0, 2) & PM1_BUTTON)) return seen;
    reg_write(acpi.pm1_event, 0, 2, PM1_BUTTON);
    return seen | EVENT_BUTTON;
}

void announce_cling(bool to_devices) {
    clings = to_devices;
    say("clings devices=%u", (u32)clings);
}

bool announce_clings(void) { return clings; }

/* QEMU's processor registers speak an older language until they are written to. */
void announce_init(void) {
    if (!acpi.ged.at && acpi.cpus.at) reg_write(acpi.cpus, SELECT, 4, 0);
}

u32 announcements(void) {
    if (!acpi.ged.at) return qemu_announcements();
    u32 seen = reg_read(acpi.ged, 0, 1);
    if (seen & GED_CPUS) look_at_cpus();
    if (seen & GED_MEMORY) look_at_memory();
    leaving |= seen & GED_PCI;                   /* it is said once, and read once */
    if (leaving && !clings) {
        eject();
        leaving = false;
        seen |= GED_PCI;
    }
    return (seen & GED_BUTTON ? EVENT_BUTTON : 0) | (seen & GED_PCI ? EVENT_PCI : 0);
}
