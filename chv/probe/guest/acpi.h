/* Just enough ACPI: power, timer, and the registers by which a VMM announces what came or goes. */
#pragma once
#include "base.h"

enum space { SPACE_MEMORY = 0, SPACE_IO = 1 };
/* Generic address structure, ACPI 6.4 section 5.2.3.2. */
struct reg { u8 space, bits, offset, access; u64 at; } __attribute__((packed));

u32 reg_read(struct reg r, u32 offset, u32 bytes);
void reg_write(struct reg r, u32 offset, u32 bytes, u32 value);

/* What the DSDT and the FADT name; an address of zero: not there. */
struct acpi {
    struct reg reset, sleep, pm1_event, pm1_control, timer;
    struct reg ged, pci, cpus, memory;           /* operation regions GDST, PCST, PRST, MHPR/HPMR */
    u8 reset_value, pm1_event_bytes;
    u32 cpus_present, cpus_max;
};
extern struct acpi acpi;

u32 pm_timer(void);
void acpi_init(u64 rsdp);                        /* tables: enough for pm_timer() */
void acpi_scan(void);                            /* DSDT: the rest, but for what off needs */
u8 acpi_s5(void);                                /* the sleep type that turns the machine off */
