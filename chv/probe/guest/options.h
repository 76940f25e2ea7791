/* The words of the kernel command line, and who asked for what. */
#pragma once
#include "base.h"

void options_init(const char *command_line);
const char *options_text(void);
/* The value of word "key=value", not ended by NUL but by a blank; NULL if it is not there. */
const char *option(const char *key);
u64 option_number(const char *key, u64 fallback);
/* For a device: "kind.name=", then "kind.index=", then "kind=". */
const char *option_for(const char *kind, u32 index, const char *name);
/* Whether who ("" or an index or a name) means this device. */
bool meant(const char *who, u32 len, u32 index, const char *name);

/* What was asked for and has ended; all of it is summed up in one line "done". */
void tally(bool ok);
void tally_report(void);
