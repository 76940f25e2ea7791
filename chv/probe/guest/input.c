/*
 * Commands typed on the serial port, one line each, its words those of the command line:
 * disk=check, disk.0=reset, net.0=ping:router, cpu=popcnt, end=off, button=stay; or bare: an end
 * (off, reboot, ...), ping, status, cling, let_go. A NUL is nothing: some VMMs type one when a
 * viewer leaves.
 */
#include "devices.h"
#include "disk.h"
#include "input.h"
#include "instructions.h"
#include "net.h"
#include "power.h"
#include "say.h"
#include "slots.h"
#include "text.h"

enum { DATA = 0x3f8, LINE_STATUS = 0x3fd, DATA_READY = 1, BURST_MAX = 256 };

static char line[1024] UNCLEARED;
static u32 used;

/* word is "key[.who]=value"; whether it was understood. */
static bool assign(const char *word, u32 len) {
    u32 head = span(word, '=', '.'), key = span(word, '=', '=');
    const char *who = word[head] == '.' ? word + head + 1 : "", *value = word + key + 1;
    u32 who_len = word[head] == '.' ? key - head - 1 : 0, value_len = len - key - 1;
    if (is(word, head, "disk")) return disk_command(who, who_len, value);
    if (is(word, head, "net")) return nic_command(who, who_len, value);
    if (is(word, head, "ping")) {
        say("pong token=\"%S\"", value_len, value);
        return true;
    }
    if (is(word, head, "cpu")) {
        instructions_try(value);
        return true;
    }
    if (is(word, head, "button")) return power_button_means(value, value_len);
    if (!is(word, head, "end") || !power_known(value, value_len)) return false;
    power_end(value, value_len);
    return true;
}

static bool obey(const char *word, u32 len) {
    if (word[span(word, '=', '=')] == '=') return assign(word, len);
    if (power_known(word, len)) power_end(word, len);
    else if (is(word, len, "ping")) say("pong token=\"\"");
    else if (is(word, len, "status")) devices_describe();
    else if (is(word, len, "cling")) announce_cling(true);
    else if (is(word, len, "let_go")) announce_cling(false);
    else return false;
    return true;
}

static void line_complete(void) {
    line[used] = 0;
    for (const char *p = line; *p; p++) {
        u32 len = span(p, ' ', ' ');
        if (len && !obey(p, len)) say("input-refused text=\"%S\"", len, p);
        p += len;
        if (!*p) break;
    }
    used = 0;
}

void input_poll(void) {
    for (u32 i = 0; i < BURST_MAX && inb(LINE_STATUS) & DATA_READY; i++) {
        char c = inb(DATA);
        if (c == '\n' || c == '\r') line_complete();
        else if (c && used < sizeof line - 1) line[used++] = c;
    }
}
