# SPDX-License-Identifier: Apache-2.0
# What this processor and kernel can run: the x86-64 levels, and AMX, which Linux grants a process on request.
cdef extern from *:
    """
    #if defined __x86_64__
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
    #else
    static int supports(int level) { return 0; }
    #endif
    """
    int supports(int level)


def levels():
    """The x86-64 levels (2, 3, 4) that this machine has, lowest first; empty elsewhere."""
    return [level for level in (2, 3, 4) if supports(level)]
