/* The PCI devices that are there, found by looking; drivers come and go with them. */
#pragma once
#include "base.h"

void devices_init(void);
void devices_scan(bool hot);
/* Let every driver work; true while one has work that ends. */
bool devices_poll(void);
void devices_describe(void);
u32 devices_count(void);
/* The driver of what is at this address gives up before the device is ejected. */
void devices_release(u16 bdf, const char *how);
