#!/bin/busybox sh
# The ACPI power button was pressed: ask process 1 for a clean power-off.
kill -USR2 1
