/* Commands typed on the serial port: the words of the command line, in effect at once. */
#pragma once
#include "base.h"

void input_poll(void);
