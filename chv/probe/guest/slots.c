/*
 * PCI Express native hot-plug (PCI Express Base 3.0 sections 6.7 and 7.8.9 to 7.8.11), polled. A
 * slot is taken out of use without the five seconds in which a human may change his mind. One
 * without the presence bit is left alone: QEMU's ACPI hot-plug puts devices into such slots.
 */
#include "devices.h"
#include "pci.h"
#include "say.h"
#include "slots.h"

enum { SLOT_CAPABILITIES = 0x14, SLOT_CONTROL = 0x18, SLOT_STATUS = 0x1a };
enum { HOT_PLUG_CAPABLE = 1 << 6 };
enum { STATUS_BUTTON = 1 << 0, STATUS_PRESENT = 1 << 6, STATUS_EVENTS = 0x11f };
enum { CONTROL_INDICATOR = 3 << 8, INDICATOR_ON = 1 << 8, INDICATOR_OFF = 3 << 8,
       CONTROL_POWER_OFF = 1 << 10 };

void slot_poll(u16 bridge, u8 bus) {
    u8 at = pci_capability(bridge, CAP_EXPRESS, 0);
    if (!at || !(pci_read(bridge, at + SLOT_CAPABILITIES) & HOT_PLUG_CAPABLE)) return;
    u32 both = pci_read(bridge, at + SLOT_CONTROL);
    u16 control = both, status = both >> 16;
    bool on = !(control & CONTROL_POWER_OFF), button = status & STATUS_BUTTON;
    u16 kept = control & ~(CONTROL_INDICATOR | CONTROL_POWER_OFF), wanted = kept | INDICATOR_ON;
    if (!(status & STATUS_PRESENT)) return;
    if (button && announce_clings()) return;
    if (on && button && (control & CONTROL_INDICATOR) == INDICATOR_ON) {
        devices_release(bus << 8, "requested");
        wanted = kept | CONTROL_POWER_OFF | INDICATOR_OFF;
    }
    u16 seen = status & STATUS_EVENTS;           /* written back as ones: cleared */
    if (wanted != control || seen)
        pci_write(bridge, at + SLOT_CONTROL, (u32)seen << 16 | wanted);
}
