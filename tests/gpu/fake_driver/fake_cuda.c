// SPDX-License-Identifier: Apache-2.0
// A libcuda.so.1 without a GPU: memory is malloc's, a launch is a line in a log, and any call fails when told to.
//
//   FAKE_CUDA_LOG      file to which every call appends one line, "cuLaunchKernel 3 ...", its arguments in hex
//   FAKE_CUDA_FAIL     "cuLaunchKernel=700,cuMemAllocAsync=2": what these return from now on; "cuInit=100@2": the second time
//   FAKE_CUDA_PARAMS   "8,8,4": the bytes of a kernel's parameters, which the log of a launch then shows
//   FAKE_CUDA_LACKS    a function that this driver does not have
//   FAKE_CUDA_DEVICES, FAKE_CUDA_ARCH, FAKE_CUDA_SMEM, FAKE_CUDA_POOLS    what the devices say they are
//
// Device pointers are the host's own, so that a copy can be checked. FAKE_CUDA_OWNER is the device that all of it is on.
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Status;
typedef uint64_t Pointer;
typedef void *Handle;

enum { OK = 0, INVALID_VALUE = 1, NOT_FOUND = 500 };

static int context[64], depth;  // a stack of ordinals

static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

static void say(const char *format, ...) {
    const char *path = getenv("FAKE_CUDA_LOG");
    FILE *log = path ? fopen(path, "a") : NULL;
    if (!log) return;
    va_list args;
    va_start(args, format);
    vfprintf(log, format, args);
    va_end(args);
    fclose(log);
}

// What `name` must return: 0 unless FAKE_CUDA_FAIL says otherwise.
static Status fate(const char *name) {
    static struct { char name[64]; int calls; } seen[64];
    int i = 0;
    while (seen[i].name[0] && strcmp(seen[i].name, name)) i++;
    strcpy(seen[i].name, name);
    int call = ++seen[i].calls;
    const char *rule = getenv("FAKE_CUDA_FAIL");
    size_t length = strlen(name);
    for (; rule; rule = strchr(rule, ',') ? strchr(rule, ',') + 1 : NULL) {
        if (strncmp(rule, name, length) || rule[length] != '=') continue;
        char *end;
        Status status = (Status)strtol(rule + length + 1, &end, 10);
        if (*end != '@' || atoi(end + 1) == call) return status;
    }
    return OK;
}

#define CALL(...)                        \
    do {                                 \
        say(__VA_ARGS__);                \
        Status status = fate(__func__);  \
        if (status) return status;       \
    } while (0)

static Status cuInit(unsigned flags) {
    CALL("cuInit %u\n", flags);
    return OK;
}

static Status cuDriverGetVersion(int *version) {
    CALL("cuDriverGetVersion\n");
    *version = 13000;
    return OK;
}

static Status cuDeviceGetCount(int *count) {
    CALL("cuDeviceGetCount\n");
    *count = number("FAKE_CUDA_DEVICES", 1);
    return OK;
}

static Status cuDeviceGet(int *device, int ordinal) {
    CALL("cuDeviceGet %d\n", ordinal);
    *device = ordinal;
    return OK;
}

static Status cuDeviceGetName(char *name, int size, int device) {
    CALL("cuDeviceGetName %d\n", device);
    snprintf(name, (size_t)size, "Fake %d", device);
    return OK;
}

static Status cuDeviceTotalMem(size_t *bytes, int device) {
    CALL("cuDeviceTotalMem %d\n", device);
    *bytes = (size_t)number("FAKE_CUDA_GIB", 1) << 30;
    return OK;
}

static Status cuDeviceGetAttribute(int *value, int which, int device) {
    CALL("cuDeviceGetAttribute %d %d\n", which, device);
    int arch = number("FAKE_CUDA_ARCH", 90);
    *value = which == 75 ? arch / 10 : which == 76 ? arch % 10 : which == 97 ? number("FAKE_CUDA_SMEM", 232448)
             : which == 115 ? number("FAKE_CUDA_POOLS", 1) : which == 16 ? 132 : which == 38 ? 60 << 20 : 0;
    return OK;
}

static Status cuDevicePrimaryCtxRetain(Handle *result, int device) {
    CALL("cuDevicePrimaryCtxRetain %d\n", device);
    *result = (Handle)(uintptr_t)(0xc0 + device);
    return OK;
}

static Status cuCtxPushCurrent(Handle of) {
    CALL("cuCtxPushCurrent %p\n", of);
    context[++depth] = (int)(uintptr_t)of - 0xc0;
    return OK;
}

static Status cuCtxPopCurrent(Handle *of) {
    CALL("cuCtxPopCurrent\n");
    if (depth == 0) return 201;
    *of = (Handle)(uintptr_t)(0xc0 + context[depth--]);
    return OK;
}

static Status cuModuleLoadData(Handle *module, const void *image) {
    CALL("cuModuleLoadData %s\n", memcmp(image, "\177ELF", 4) ? "something" : "ELF");
    *module = (Handle)0x3000;
    return OK;
}

static Status cuModuleGetFunction(Handle *function, Handle module, const char *name) {
    CALL("cuModuleGetFunction %p %s\n", module, name);
    *function = strdup(name);
    return OK;
}

static Status cuFuncGetAttribute(int *value, int which, Handle function) {
    CALL("cuFuncGetAttribute %d %s\n", which, (char *)function);
    *value = which == 1 ? 512 : 0;
    return OK;
}

static Status cuFuncSetAttribute(Handle function, int which, int value) {
    CALL("cuFuncSetAttribute %s %d %d\n", (char *)function, which, value);
    return OK;
}

static Status take(Pointer *pointer, size_t size) {
    *pointer = (Pointer)(uintptr_t)memset(malloc(size), 0xff, size);  // what nobody wrote is NaN
    return OK;
}

static Status cuMemAlloc(Pointer *pointer, size_t size) {
    CALL("cuMemAlloc %zu\n", size);
    return take(pointer, size);
}

static Status cuMemAllocAsync(Pointer *pointer, size_t size, Handle stream) {
    CALL("cuMemAllocAsync %zu %p\n", size, stream);
    return take(pointer, size);
}

static Status cuMemFree(Pointer pointer) {
    CALL("cuMemFree\n");
    free((void *)(uintptr_t)pointer);
    return OK;
}

static Status cuMemFreeAsync(Pointer pointer, Handle stream) {
    CALL("cuMemFreeAsync %p\n", stream);
    free((void *)(uintptr_t)pointer);
    return OK;
}

static Status cuMemcpyHtoDAsync(Pointer to, const void *from, size_t size, Handle stream) {
    CALL("cuMemcpyHtoDAsync %zu %p\n", size, stream);
    memcpy((void *)(uintptr_t)to, from, size);
    return OK;
}

static Status cuMemcpyDtoHAsync(void *to, Pointer from, size_t size, Handle stream) {
    CALL("cuMemcpyDtoHAsync %zu %p\n", size, stream);
    memcpy(to, (void *)(uintptr_t)from, size);
    return OK;
}

static Status cuStreamSynchronize(Handle stream) {
    CALL("cuStreamSynchronize %p\n", stream);
    return OK;
}

static Status cuStreamWaitEvent(Handle stream, Handle event, unsigned flags) {
    CALL("cuStreamWaitEvent %p %p %u\n", stream, event, flags);
    return OK;
}

static Status cuEventCreate(Handle *event, unsigned flags) {
    CALL("cuEventCreate %u\n", flags);
    *event = (Handle)0xe0;
    return OK;
}

static Status cuEventRecord(Handle event, Handle stream) {
    CALL("cuEventRecord %p %p\n", event, stream);
    return OK;
}

static Status cuEventDestroy(Handle event) {
    CALL("cuEventDestroy %p\n", event);
    return OK;
}

static Status cuEventSynchronize(Handle event) {
    CALL("cuEventSynchronize %p\n", event);
    return OK;
}

static Status cuEventElapsedTime(float *milliseconds, Handle begin, Handle end) {
    CALL("cuEventElapsedTime %p %p\n", begin, end);
    *milliseconds = 1.5f;
    return OK;
}

static Status cuPointerGetAttribute(void *value, int which, Pointer pointer) {
    CALL("cuPointerGetAttribute %d\n", which);
    if (pointer < 4096) return INVALID_VALUE;
    *(int *)value = number("FAKE_CUDA_OWNER", 0);
    return OK;
}

static Status cuLaunchKernel(Handle function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                             unsigned bz, unsigned smem, Handle stream, void **params, void **extra) {
    char bytes[4096] = "";
    const char *width = getenv("FAKE_CUDA_PARAMS");
    for (int i = 0; width && *width; i++) {
        for (int b = 0; b < atoi(width); b++) sprintf(bytes + strlen(bytes), "%02x", ((unsigned char *)params[i])[b]);
        strcat(bytes, " ");
        width = strchr(width, ',') ? strchr(width, ',') + 1 : NULL;
    }
    CALL("cuLaunchKernel %s grid %u %u %u block %u %u %u smem %u stream %p extra %p params %s\n", (char *)function, gx,
         gy, gz, bx, by, bz, smem, stream, (void *)extra, bytes);
    return OK;
}

#define ENTRY(name) {#name, (void *)name}
static const struct { const char *name; void *function; } table[] = {
    ENTRY(cuInit), ENTRY(cuDriverGetVersion), ENTRY(cuDeviceGetCount), ENTRY(cuDeviceGet), ENTRY(cuDeviceGetName),
    ENTRY(cuDeviceTotalMem), ENTRY(cuDeviceGetAttribute), ENTRY(cuDevicePrimaryCtxRetain), ENTRY(cuCtxPushCurrent),
    ENTRY(cuCtxPopCurrent), ENTRY(cuModuleLoadData), ENTRY(cuModuleGetFunction), ENTRY(cuFuncGetAttribute),
    ENTRY(cuFuncSetAttribute), ENTRY(cuMemAlloc), ENTRY(cuMemAllocAsync), ENTRY(cuMemFree), ENTRY(cuMemFreeAsync),
    ENTRY(cuMemcpyHtoDAsync), ENTRY(cuMemcpyDtoHAsync), ENTRY(cuStreamSynchronize), ENTRY(cuStreamWaitEvent),
    ENTRY(cuEventCreate), ENTRY(cuEventRecord), ENTRY(cuEventDestroy), ENTRY(cuEventSynchronize),
    ENTRY(cuEventElapsedTime), ENTRY(cuPointerGetAttribute), ENTRY(cuLaunchKernel),
};

// The one way in: cuda.bindings asks it for every other function.
Status cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *found) {
    (void)version, (void)flags;
    *function = NULL;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (!strcmp(table[i].name, symbol) && strcmp(getenv("FAKE_CUDA_LACKS") ? getenv("FAKE_CUDA_LACKS") : "", symbol))
            *function = table[i].function;
    if (!strcmp(symbol, "cuGetProcAddress")) *function = (void *)cuGetProcAddress_v2;
    if (found) *found = *function ? 0 : 1;
    return *function ? OK : NOT_FOUND;
}

Status cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}
