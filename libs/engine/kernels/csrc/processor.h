/* The features of the running processor, whatever the library was compiled for. */
#pragma once

#include <stdint.h>

/* The level of x86-64 that processor and operating system support: 1 (below SSE4.2) to 4 (AVX-512); 0 elsewhere. */
int32_t ss_processor_level(void);

/* Whether it has AVX512_BF16. */
int32_t ss_processor_has_bf16(void);

/* 1 where it multiplies tiles of bf16 values (AMX_BF16), and the system lets this process do so: from this call on, with
 * its forks, until an exec. 0 where it does not, and -errno where the system refuses. */
int32_t ss_processor_use_amx(void);
