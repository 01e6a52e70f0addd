# SPDX-License-Identifier: Apache-2.0
# What this processor and kernel can run: the x86-64 levels, and AMX, which Linux grants a process on request.
cdef extern from *:
    """
    #if defined __x86_64__
    #include <cpuid.h>
    #include <unistd.h>
    #include <sys/syscall.h>
    static int supports(int level)
    {
        __builtin_cpu_init();
        switch (level) {
        case 2: return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("popcnt");
        case 3: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")
                       && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
        case 4: return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
                       && __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq")
                       && __builtin_cpu_supports("avx512vl");
        }
        return 0;
    }
    /* Cpuid leaf 7: amx-bf16 and amx-tile. The kernel saves tiles (state 18) only for who asks, once. */
    static int grants_tiles(void)
    {
    #ifdef SYS_arch_prctl
        unsigned a, b, c, d;
        return __get_cpuid_count(7, 0, &a, &b, &c, &d) && d >> 22 & 1 && d >> 24 & 1
               && syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18) == 0;
    #else
        return 0;
    #endif
    }
    #else
    static int supports(int level) { return 0; }
    static int grants_tiles(void) { return 0; }
    #endif
    """
    int supports(int level)
    int grants_tiles()


def levels():
    """The x86-64 levels (2, 3, 4) that this machine has, lowest first; empty elsewhere."""
    return [level for level in (2, 3, 4) if supports(level)]


def amx():
    """Whether this process may use AMX tiles of bf16 from now on: asks the kernel, for all its threads."""
    return bool(supports(4) and grants_tiles())
