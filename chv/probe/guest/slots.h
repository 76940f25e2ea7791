/* What comes and goes: PCI Express slots, and the registers by which an ACPI guest is told. */
#pragma once
#include "base.h"

/* Look at the slot of a bridge: power on what was put in, let go of what is to be taken out. */
void slot_poll(u16 bridge, u8 bus);

enum { EVENT_BUTTON = 1, EVENT_PCI = 2 };
void announce_init(void);
/* Look at the announcements: CPUs and memory are reported here, the rest is returned. */
u32 announcements(void);
/* Let go of no device that is asked for, until told otherwise. */
void announce_cling(bool to_devices);
bool announce_clings(void);
