/* The instructions that stock kernels need, tried one by one. */
#pragma once
#include "base.h"

/* Names separated by commas, "all", or names with '-' in front that are left out of all. */
void instructions_try(const char *list);
