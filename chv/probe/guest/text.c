/* Strings without a C library. */
#include "text.h"

bool starts(const char *s, const char *prefix) {
    while (*prefix)
        if (*s++ != *prefix++) return false;
    return true;
}

bool is(const char *s, u32 len, const char *word) {
    return starts(s, word) && !word[len] && span(word, 0, 0) == len;
}

u32 span(const char *s, char end, char other_end) {
    u32 n = 0;
    while (s[n] && s[n] != ' ' && s[n] != end && s[n] != other_end) n++;
    return n;
}

u64 number(const char **s) {
    u64 value = 0;
    for (; **s >= '0' && **s <= '9'; ++*s) value = value * 10 + (u64)(**s - '0');
    return value;
}

void keep(char *to, u32 room, const char *from, u32 len) {
    u32 n = len < room ? len : room - 1;
    copy(to, from, n);
    to[n] = 0;
}

const char *item(const char *list, const char *name) {
    for (const char *at = list; at;) {
        u32 len = span(at, ',', '=');
        if (at[len] == '=' && is(at, len, name)) return at + len + 1;
        len = span(at, ',', ',');
        at = at[len] == ',' ? at + len + 1 : NULL;
    }
    return NULL;
}

u64 item_number(const char *list, const char *name, u64 fallback) {
    const char *value = item(list, name);
    return value ? number(&value) : fallback;
}

u32 address(const char **s) {
    u32 value = 0;
    for (u32 part = 0; part < 4; part++) {
        value = value << 8 | (number(s) & 255);
        if (part < 3 && **s == '.') ++*s;
    }
    return value;
}

/* The compiler may call these for structures that it copies or clears. */
void *memcpy(void *to, const void *from, size_t bytes) {
    copy(to, from, bytes);
    return to;
}

void *memset(void *to, int value, size_t bytes) {
    void *at = to;
    __asm__ volatile("rep stosb" : "+D"(at), "+c"(bytes) : "a"(value) : "memory");
    return to;
}
