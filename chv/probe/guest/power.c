/*
 * How the guest ends: sleep and reset registers of hardware-reduced ACPI (6.4 section 4.8.3.7, one
 * byte each) or PM1 control (4.8.3.2.1), and the ways in which a guest dies.
 */
#include "acpi.h"
#include "clock.h"
#include "options.h"
#include "panic.h"
#include "power.h"
#include "say.h"
#include "text.h"

enum { STILL_ALIVE_MS = 2000, SLEEP_ENABLE = 1 << 5, PM1_SLEEP_ENABLE = 1 << 13 };

extern _Noreturn void triple_fault(void);

static char button[8];                           /* what was typed, before what was booted with */

static void off(void) {
    if (acpi.sleep.at) reg_write(acpi.sleep, 0, 1, acpi_s5() << 2 | SLEEP_ENABLE);
    else if (acpi.pm1_control.at)
        reg_write(acpi.pm1_control, 0, 2, acpi_s5() << 10 | PM1_SLEEP_ENABLE);
}

static void reboot(void) {
    if (acpi.reset.at) reg_write(acpi.reset, 0, 1, acpi.reset_value);
}

static void spin(void) {
    for (;;) pause();
}

static void page_fault(void) { *(volatile u32 *)0x7fffffff000 = 0; }
static void stay(void) {}

static void panic(void) {
    if (panic_tell()) stop();
}

static const struct { const char *name; void (*run)(void); } ends[] = {
    {"off", off}, {"reboot", reboot}, {"halt", stop}, {"spin", spin},
    {"fault", page_fault}, {"triple", triple_fault}, {"panic", panic}, {"stay", stay},
};

bool power_known(const char *how, u32 len) {
    for (u32 i = 0; i < COUNT(ends); i++)
        if (is(how, len, ends[i].name)) return true;
    return false;
}

void power_end(const char *how, u32 len) {
    say("end how=%S", len, how);
    for (u32 i = 0; i < COUNT(ends); i++)
        if (is(how, len, ends[i].name)) ends[i].run();
    if (is(how, len, "stay")) return;
    for (u64 begun = us(); !past(begun, STILL_ALIVE_MS);) pause();
    say("end-failed how=%S", len, how);
    stop();
}

bool power_button_means(const char *how, u32 len) {
    if (!power_known(how, len)) return false;
    keep(button, sizeof button, how, len);
    say("button-set how=%S", len, how);
    return true;
}

void power_button(void) {
    const char *how = button[0] ? button : option("button");
    say("button name=power");
    if (!how) how = "off";
    power_end(how, span(how, ' ', ' '));
}
