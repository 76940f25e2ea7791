/* Exceptions: a report line instead of a silent reset, or a way back for code that expects one. */
#pragma once
#include "base.h"

enum { NO_FAULT = 256 };

void faults_init(void);
/* Run code; the vector of the exception that ended it, or NO_FAULT. */
u32 attempt(void (*code)(void));
