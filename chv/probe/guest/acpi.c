/*
 * ACPI tables (ACPI 6.4 sections 5.2.5 to 5.2.12), and operation regions found in the DSDT by the
 * bytes of their definition (20.2.5.2, DefOpRegion): no AML interpreter.
 */
#include "acpi.h"
#include "memory.h"
#include "say.h"
#include "text.h"

struct table {
    char signature[4];
    u32 len;
    u8 revision, sum;
    char oem[6], oem_table[8];
    u32 oem_revision, creator, creator_revision;
} __attribute__((packed));

/* Offsets in the FADT, section 5.2.9. */
enum { FADT_DSDT = 40, FADT_PM1_EVENT = 56, FADT_PM1_CONTROL = 64, FADT_TIMER = 76,
       FADT_PM1_EVENT_LEN = 88, FADT_RESET = 116, FADT_RESET_VALUE = 128, FADT_X_DSDT = 140,
       FADT_X_PM1_EVENT = 148, FADT_X_PM1_CONTROL = 172, FADT_X_TIMER = 208, FADT_SLEEP = 244 };
enum { POWER_BUTTON = 0x100, OP_NAME = 0x08, OP_EXTENDED = 0x5b, OP_REGION = 0x80 };

struct acpi acpi;
static struct table *dsdt;
static u8 s5;

u32 reg_read(struct reg r, u32 offset, u32 bytes) {
    u64 at = r.at + offset;
    if (r.space == SPACE_IO) return bytes == 4 ? inl(at) : bytes == 2 ? inw(at) : inb(at);
    if (bytes == 4) return *(volatile u32 *)at;
    return bytes == 2 ? *(volatile u16 *)at : *(volatile u8 *)at;
}

void reg_write(struct reg r, u32 offset, u32 bytes, u32 value) {
    u64 at = r.at + offset;
    if (r.space == SPACE_IO) {
        if (bytes == 4) outl(at, value);
        else if (bytes == 2) outw(at, value);
        else outb(at, value);
    }
    else if (bytes == 4) *(volatile u32 *)at = value;
    else if (bytes == 2) *(volatile u16 *)at = value;
    else *(volatile u8 *)at = value;
}

static struct table *table(u64 at) {
    struct table *t = map(at, sizeof *t);
    return map(at, t->len);
}

/* A register of the FADT: the 64-bit form if there is one, else the old I/O port. */
static struct reg fadt_reg(const struct table *fadt, u32 wide, u32 legacy) {
    struct reg r = {0};
    const u8 *f = (const u8 *)fadt;
    if (fadt->len >= wide + sizeof r) r = *(const struct reg *)(f + wide);
    if (!r.at && legacy) r = (struct reg){.space = SPACE_IO, .at = *(const u32 *)(f + legacy)};
    if (r.at && r.space == SPACE_MEMORY) map(r.at, 16);
    return r;
}

static void read_fadt(struct table *fadt) {
    const u8 *f = (const u8 *)fadt;
    acpi.reset = fadt_reg(fadt, FADT_RESET, 0);
    acpi.reset_value = f[FADT_RESET_VALUE];
    acpi.sleep = fadt_reg(fadt, FADT_SLEEP, 0);
    acpi.pm1_event = fadt_reg(fadt, FADT_X_PM1_EVENT, FADT_PM1_EVENT);
    acpi.pm1_event_bytes = f[FADT_PM1_EVENT_LEN];
    acpi.pm1_control = fadt_reg(fadt, FADT_X_PM1_CONTROL, FADT_PM1_CONTROL);
    acpi.timer = fadt_reg(fadt, FADT_X_TIMER, FADT_TIMER);
    u64 wide = fadt->len >= FADT_X_DSDT + 8 ? *(const u64 *)(f + FADT_X_DSDT) : 0;
    dsdt = table(wide ? wide : *(const u32 *)(f + FADT_DSDT));
}

/* Local APIC entries (type 0, or 9 for x2APIC): flag 1 enabled, 2 can be plugged. */
static void read_madt(const struct table *madt) {
    const u8 *end = (const u8 *)madt + madt->len;
    for (const u8 *e = (const u8 *)(madt + 1) + 8; e + 1 < end && e[1]; e += e[1]) {
        if (e[0] != 0 && e[0] != 9) continue;
        u32 flags = *(const u32 *)(e + (e[0] ? 8 : 4));
        acpi.cpus_present += flags & 1;
        acpi.cpus_max++;
    }
}

void acpi_init(u64 rsdp) {
    const u8 *r = map(rsdp, 36);
    bool wide = r[15] >= 2 && *(const u64 *)(r + 24);
    const struct table *root = table(wide ? *(const u64 *)(r + 24) : *(const u32 *)(r + 16));
    u32 step = wide ? 8 : 4;
    for (u32 i = sizeof *root; i + step <= root->len; i += step) {
        const u8 *entry = (const u8 *)root + i;
        struct table *t = table(wide ? *(const u64 *)entry : *(const u32 *)entry);
        if (starts(t->signature, "FACP")) read_fadt(t);
        if (starts(t->signature, "APIC")) read_madt(t);
    }
}

static u64 aml_integer(const u8 *p) {
    u32 bytes = *p == 0x0a ? 1 : *p == 0x0b ? 2 : *p == 0x0c ? 4 : *p == 0x0e ? 8 : 0;
    u64 value = bytes ? 0 : *p;                  /* ZeroOp, OneOp */
    for (u32 i = bytes; i; i--) value = value << 8 | p[i];
    return value;
}

/* p: address space, address, length. */
static struct reg aml_region(const u8 *p) {
    struct reg r = {.space = *p, .at = aml_integer(p + 1)};
    if (r.space == SPACE_MEMORY) map(r.at, 32);
    return r;
}

/*
 * Call seen at each place of a byte in the DSDT. By scasb, which is one instruction when emulated;
 * the bytes to look for are chosen to be rare.
 */
static void find(u8 byte, void (*seen)(const u8 *place)) {
    const u8 *p = (const u8 *)(dsdt + 1), *end = (const u8 *)dsdt + dsdt->len - 16;
    while (p < end) {
        u64 left = end - p;
        bool hit;
        __asm__ volatile("repne scasb" : "+D"(p), "+c"(left), "=@ccz"(hit) : "a"(byte) : "memory");
        if (!hit) break;
        seen(p - 1);
    }
}

static void seen_operator(const u8 *p) {
    if (p[1] != OP_REGION) return;
    const char *name = (const char *)p + 2;
    if (starts(name, "PCST")) acpi.pci = aml_region(p + 6);
    if (starts(name, "GDST")) acpi.ged = aml_region(p + 6);
    if (starts(name, "PRST")) acpi.cpus = aml_region(p + 6);
    if (starts(name, "MHPR") || starts(name, "HPMR")) acpi.memory = aml_region(p + 6);
}

/* NameOp "_S5_", PackageOp, length, count, first element (section 7.4.2). */
static void seen_five(const u8 *p) {
    if (p[-3] == OP_NAME && starts((const char *)p - 2, "_S5_")) s5 = aml_integer(p + 5);
}

void acpi_scan(void) {
    if (!dsdt) {
        say("acpi dsdt_bytes=0");
        return;
    }
    find(OP_EXTENDED, seen_operator);
    if (acpi.pm1_event.at && !acpi.ged.at)
        reg_write(acpi.pm1_event, acpi.pm1_event_bytes / 2, 2, POWER_BUTTON);
    say("acpi sleep=%lx pm1=%lx reset=%lx ged=%lx pci=%lx cpus=%lx memory=%lx dsdt_bytes=%u",
        acpi.sleep.at, acpi.pm1_control.at, acpi.reset.at, acpi.ged.at, acpi.pci.at, acpi.cpus.at,
        acpi.memory.at, dsdt->len);
}

u8 acpi_s5(void) {
    if (dsdt) find('5', seen_five);
    return s5;
}

u32 pm_timer(void) { return acpi.timer.at ? reg_read(acpi.timer, 0, 4) : 0; }
