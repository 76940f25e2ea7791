/* Identity mapping on demand: BARs and tables lie anywhere in the physical address space. */
#pragma once
#include "base.h"

void *map(u64 physical, u64 bytes);
/* Let ring 3 see what is mapped around address. */
void map_for_user(u64 address);
