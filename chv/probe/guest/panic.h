/* Telling the VMM of a panic. */
#pragma once
#include "base.h"

/* Whether there is a device that was told. */
bool panic_tell(void);
