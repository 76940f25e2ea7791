/* Time since the first instruction, and sleep until the next tick. */
#pragma once
#include "base.h"

extern u64 tsc_start, tsc_per_ms;
u64 us(void);
/* Whether ms milliseconds have gone by since since_us. */
bool past(u64 since_us, u64 ms);
void clock_init(void);
void clock_idle(void);
