/*
 * How a guest tells that its kernel panicked: pvpanic, a device of one byte (docs/specs/pvpanic of
 * QEMU), on PCI (Cloud Hypervisor) or on an I/O port (QEMU).
 */
#include "memory.h"
#include "panic.h"
#include "pci.h"

enum { PVPANIC_PCI = 0x00111b36, PVPANIC_PORT = 0x505, NOBODY = 0xff, PANICKED = 1 };
enum { SLOTS = 32, COMMAND_MEMORY = 2 };

static volatile u8 *on_pci(void) {
    for (u32 slot = 0; slot < SLOTS; slot++) {
        u16 bdf = slot << 3;
        if (pci_read(bdf, 0) != PVPANIC_PCI) continue;
        pci_write(bdf, PCI_COMMAND, (pci_read(bdf, PCI_COMMAND) & 0xffff) | COMMAND_MEMORY);
        return map(pci_bar(bdf, 0), 2);
    }
    return NULL;
}

bool panic_tell(void) {
    volatile u8 *events = on_pci();
    u8 known = events ? *events : inb(PVPANIC_PORT);
    if (known == NOBODY || !(known & PANICKED)) return false;
    if (events) *events = PANICKED;
    else outb(PVPANIC_PORT, PANICKED);
    return true;
}
