/* One translation unit, compiled once per instruction set with its own symbol suffix (TRITONE_SUFFIX). */
#include "elementwise.c"
#include "rope.c"
#include "attention.c"
#include "linear.c"
#include "linear_int.c"
#include "linear_wide.c"
