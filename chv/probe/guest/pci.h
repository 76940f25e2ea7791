/* PCI configuration space by ports 0xcf8 and 0xcfc; bdf = bus << 8 | device << 3 | function. */
#pragma once
#include "base.h"

enum { PCI_COMMAND = 0x04, PCI_CLASS = 0x08, PCI_HEADER = 0x0c, PCI_BAR0 = 0x10, PCI_BUSES = 0x18,
       PCI_WINDOW = 0x20, PCI_CAPABILITIES = 0x34 };
enum { CAP_VENDOR = 9, CAP_EXPRESS = 16 };

u32 pci_read(u16 bdf, u8 reg);
void pci_write(u16 bdf, u8 reg, u32 value);
bool pci_present(u16 bdf);
u64 pci_bar(u16 bdf, u8 n);
/* The next capability of this kind after `after` (0: the first), or 0. */
u8 pci_capability(u16 bdf, u8 kind, u8 after);
/* Give a device that firmware has never seen its memory, out of the window of its bridge. */
bool pci_assign(u16 bdf, u16 bridge);
