/* Strings without a C library: ends are a NUL or, for one word of a command, a blank or a comma. */
#pragma once
#include "base.h"

bool starts(const char *s, const char *prefix);
/* Whether the len characters at s are exactly word. */
bool is(const char *s, u32 len, const char *word);
/* Characters up to NUL, blank or any of the two given ends. */
u32 span(const char *s, char end, char other_end);
/* The decimal number at *s, which is moved behind it. */
u64 number(const char **s);
/* Copy at most room - 1 of len characters and end them with NUL. */
void keep(char *to, u32 room, const char *from, u32 len);
/* The value of name in "name=value,name=value", or NULL. */
const char *item(const char *list, const char *name);
u64 item_number(const char *list, const char *name, u64 fallback);
/* The four parts of an IPv4 address; *s is moved behind it. */
u32 address(const char **s);
