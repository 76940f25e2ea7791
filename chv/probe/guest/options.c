/* The words of the kernel command line. */
#include "options.h"
#include "say.h"
#include "text.h"

static const char *command_line = "";
static u32 passed, failed;

void options_init(const char *text) { command_line = text; }
const char *options_text(void) { return command_line; }

/* The next word's start at or after p, or NULL. */
static const char *word(const char *p) {
    while (*p == ' ') p++;
    return *p ? p : NULL;
}

const char *option(const char *key) {
    for (const char *p = word(command_line); p; p = word(p + span(p, ' ', ' '))) {
        u32 len = span(p, '=', '=');
        if (p[len] == '=' && is(p, len, key)) return p + len + 1;
    }
    return NULL;
}

u64 option_number(const char *key, u64 fallback) {
    const char *value = option(key);
    return value ? number(&value) : fallback;
}

bool meant(const char *who, u32 len, u32 index, const char *name) {
    if (!len || (*name && is(who, len, name))) return true;
    const char *end = who;
    u64 wanted = number(&end);
    return end == who + len && wanted == index;
}

const char *option_for(const char *kind, u32 index, const char *name) {
    for (const char *p = word(command_line); p; p = word(p + span(p, ' ', ' '))) {
        u32 len = span(p, '=', '='), head = span(p, '=', '.');
        if (p[len] != '=' || p[head] != '.' || !is(p, head, kind)) continue;
        if (meant(p + head + 1, len - head - 1, index, name)) return p + len + 1;
    }
    return option(kind);
}

void tally(bool ok) { ok ? passed++ : failed++; }
void tally_report(void) { say("done ok=%u passed=%u failed=%u", !failed, passed, failed); }
