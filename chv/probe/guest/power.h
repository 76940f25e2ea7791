/* How the guest ends. */
#pragma once
#include "base.h"

/* Whether the word names an end: off, reboot, halt, spin, fault, triple, panic or stay. */
bool power_known(const char *how, u32 len);
/* Does not return, except for "stay". */
void power_end(const char *how, u32 len);
/* What the button does from now on; whether the word names an end. */
bool power_button_means(const char *how, u32 len);
/* The button was pressed. Returns where that means "stay". */
void power_button(void);
