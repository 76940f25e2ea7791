/*
 * The probe's voice: one line "@<microseconds> <event> <key>=<value> ..." on COM1.
 *
 * Formats: %u %lu decimal, %x %lx hexadecimal with 0x, %s string, %S length and string, %M MAC
 * address, %I IPv4 address, %B PCI address. '@' begins a line and occurs nowhere else.
 */
#pragma once
#include "base.h"

void say_init(void);
void say(const char *format, ...);
