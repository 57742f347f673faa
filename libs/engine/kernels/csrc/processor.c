#define _GNU_SOURCE
#include "processor.h"

#if defined(__linux__) && defined(__x86_64__)
#include <cpuid.h>
#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>
#define ASK_FOR_STATE 0x1023 /* ARCH_REQ_XCOMP_PERM */
#define TILE_DATA 18         /* the state of the tiles' contents */
#define AMX_BF16_BIT (1u << 22)
#define AMX_TILE_BIT (1u << 24)
#endif

int32_t ss_processor_level(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("sse4.2") || !__builtin_cpu_supports("popcnt")) return 1;
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("bmi2")) return 2;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512cd") || !__builtin_cpu_supports("avx512dq") ||
        !__builtin_cpu_supports("avx512vl"))
        return 3;
    return 4;
#else
    return 0;
#endif
}

int32_t ss_processor_has_bf16(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512bf16") != 0;
#else
    return 0;
#endif
}

int32_t ss_processor_use_amx(void) {
#if defined(__linux__) && defined(__x86_64__)
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return 0;
    if (!(edx & AMX_BF16_BIT) || !(edx & AMX_TILE_BIT)) return 0;
    return syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA) == 0 ? 1 : -errno;
#else
    return 0;
#endif
}
