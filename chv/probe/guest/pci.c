/* PCI configuration space (PCI Local Bus 3.0 chapter 6, PCI-to-PCI bridge 1.2 chapter 3). */
#include "pci.h"

enum { BARS = 6, BAR_IO = 1, BAR_WIDE = 4, COMMAND_MEMORY = 2, CAPABILITIES_MAX = 48 };

u32 pci_read(u16 bdf, u8 reg) {
    outl(0xcf8, 0x80000000 | (u32)bdf << 8 | (reg & 0xfc));
    return inl(0xcfc) >> 8 * (reg & 3);
}

void pci_write(u16 bdf, u8 reg, u32 value) {
    outl(0xcf8, 0x80000000 | (u32)bdf << 8 | (reg & 0xfc));
    outl(0xcfc, value);
}

bool pci_present(u16 bdf) { return (pci_read(bdf, 0) & 0xffff) != 0xffff; }

u64 pci_bar(u16 bdf, u8 n) {
    u32 low = pci_read(bdf, PCI_BAR0 + 4 * n);
    u64 high = (low & 6) == BAR_WIDE ? pci_read(bdf, PCI_BAR0 + 4 * n + 4) : 0;
    return high << 32 | (low & ~15u);
}

u8 pci_capability(u16 bdf, u8 kind, u8 after) {
    u8 at = pci_read(bdf, after ? after + 1 : PCI_CAPABILITIES);
    for (u32 i = 0; at && i < CAPABILITIES_MAX; i++, at = pci_read(bdf, at + 1))
        if ((pci_read(bdf, at) & 0xff) == kind) return at;
    return 0;
}

bool pci_assign(u16 bdf, u16 bridge) {
    u32 window = pci_read(bridge, PCI_WINDOW);
    u64 next = (window & 0xfff0) << 16, end = (window & 0xfff00000ull) + 0x100000;
    if (next >= end || !next) return false;
    pci_write(bdf, PCI_COMMAND, pci_read(bdf, PCI_COMMAND) & 0xfffc);
    for (u8 n = 0; n < BARS; n++) {
        u8 reg = PCI_BAR0 + 4 * n;
        pci_write(bdf, reg, ~0u);
        u32 low = pci_read(bdf, reg);
        if (!low || low & BAR_IO) continue;
        u64 size = ~(low & ~15u) + 1u;
        next = (next + size - 1) & ~(size - 1);
        if (next + size > end) return false;
        pci_write(bdf, reg, next);
        next += size;
        if ((low & 6) == BAR_WIDE) pci_write(bdf, reg + 4, 0), n++;
    }
    pci_write(bridge, PCI_COMMAND, (pci_read(bridge, PCI_COMMAND) & 0xffff) | 4 | COMMAND_MEMORY);
    return true;
}
