/* How the guest ends. */
#pragma once
#include "base.h"

/* Whether the word names an end: off, reboot, halt, spin, fault, triple or stay. */
bool power_known(const char *how, u32 len);
/* Does not return, except for "stay". */
void power_end(const char *how, u32 len);
