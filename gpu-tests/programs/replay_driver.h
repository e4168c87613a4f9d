// The part of the CUDA driver's interface that replay.c uses, declared from its documentation, and its two kernels.
#ifndef REPLAY_DRIVER_H
#define REPLAY_DRIVER_H

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

enum { NON_BLOCKING = 1, PINNED = 1, ON_DEVICE = 1, ON_HOST_NUMA = 3, FILE_DESCRIPTOR = 1, READ_WRITE = 3 };

struct location {
    int type, id;
};

// CUmemAllocationProp
struct properties {
    int type, handle_types;
    struct location location;
    void *win32;
    unsigned char compression, gpu_direct_rdma;
    unsigned short usage;
    unsigned char reserved[4];
};

// CUmemAccessDesc
struct access {
    struct location location;
    int flags;
};

#define FUNCTIONS(_)                                                                                                   \
    _(cuInit, (unsigned))                                                                                              \
    _(cuDevicePrimaryCtxRetain, (void **, int))                                                                        \
    _(cuCtxSetCurrent, (void *))                                                                                       \
    _(cuModuleLoadData, (void **, const void *))                                                                       \
    _(cuModuleGetFunction, (void **, void *, const char *))                                                            \
    _(cuStreamCreate, (void **, unsigned))                                                                             \
    _(cuStreamSynchronize, (void *))                                                                                   \
    _(cuMemAlloc, (uint64_t *, size_t))                                                                                \
    _(cuMemFree, (uint64_t))                                                                                           \
    _(cuMemHostAlloc, (void **, size_t, unsigned))                                                                     \
    _(cuMemFreeHost, (void *))                                                                                         \
    _(cuMemCreate, (uint64_t *, size_t, const struct properties *, unsigned long long))                                \
    _(cuMemRelease, (uint64_t))                                                                                        \
    _(cuMemAddressReserve, (uint64_t *, size_t, size_t, uint64_t, unsigned long long))                                 \
    _(cuMemAddressFree, (uint64_t, size_t))                                                                            \
    _(cuMemMap, (uint64_t, size_t, size_t, uint64_t, unsigned long long))                                              \
    _(cuMemUnmap, (uint64_t, size_t))                                                                                  \
    _(cuMemSetAccess, (uint64_t, size_t, const struct access *, size_t))                                               \
    _(cuMemExportToShareableHandle, (void *, uint64_t, int, unsigned long long))                                       \
    _(cuMemImportFromShareableHandle, (uint64_t *, void *, int))                                                       \
    _(cuMemRetainAllocationHandle, (uint64_t *, void *))                                                               \
    _(cuMemGetAddressRange, (uint64_t *, size_t *, uint64_t))                                                          \
    _(cuMemsetD32Async, (uint64_t, unsigned, size_t, void *))                                                          \
    _(cuMemcpyHtoD, (uint64_t, const void *, size_t))                                                                  \
    _(cuMemcpyDtoH, (void *, uint64_t, size_t))                                                                        \
    _(cuLaunchKernel, (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **))

#define DECLARE(name, arguments) static int(*name) arguments;
FUNCTIONS(DECLARE)

// Takes all functions as NCCL does. Null, or the name of the first that the driver lacks.
static const char *find_functions(void) {
    int (*find)(const char *, void **, int, unsigned long long, void *);
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (driver == NULL) return "libcuda.so.1";
    *(void **)&find = dlsym(driver, "cuGetProcAddress_v2");
    if (find == NULL) return "cuGetProcAddress_v2";
#define FIND(name, arguments)                                                                                          \
    if (find(#name, (void **)&name, 12010, 0, NULL) != 0 || name == NULL) return #name;
    FUNCTIONS(FIND)
    return NULL;
}

// count_up_u32 makes word i of `data` first + i * step; differs_u32 adds to `out` how many words are not so.
static const char PTX[] =
    ".version 7.0\n.target sm_50\n.address_size 64\n"
#define AT_EACH_WORD                                                                                                   \
    "mov.u32 %r2, %ctaid.x;\nmov.u32 %r3, %ntid.x;\nmov.u32 %r4, %tid.x;\nmad.lo.u32 %r2, %r2, %r3, %r4;\n"            \
    "cvt.u64.u32 %d2, %r2;\nmov.u32 %r4, %nctaid.x;\nmul.wide.u32 %d3, %r4, %r3;\n"                                    \
    "again:\nsetp.ge.u64 %p, %d2, %d1;\n@%p bra done;\n"                                                               \
    "cvt.u32.u64 %r5, %d2;\nmad.lo.u32 %r5, %r5, %r1, %r0;\nshl.b64 %d4, %d2, 2;\nadd.u64 %d4, %d0, %d4;\n"
#define NEXT_WORD "add.u64 %d2, %d2, %d3;\nbra again;\ndone:\nret;\n}\n"
#define REGISTERS ".reg .pred %p;\n.reg .b32 %r<7>;\n.reg .b64 %d<7>;\n"
    ".visible .entry count_up_u32(.param .u64 p_data, .param .u32 p_first, .param .u32 p_step, .param .u64 p_count)\n{\n"
    REGISTERS "ld.param.u64 %d0, [p_data];\nld.param.u32 %r0, [p_first];\nld.param.u32 %r1, [p_step];\n"
    "ld.param.u64 %d1, [p_count];\n" AT_EACH_WORD "st.global.u32 [%d4], %r5;\n" NEXT_WORD
    ".visible .entry differs_u32(.param .u64 p_out, .param .u64 p_data, .param .u32 p_first, .param .u32 p_step, "
    ".param .u64 p_count)\n{\n.reg .pred %q;\n"
    REGISTERS "ld.param.u64 %d0, [p_data];\nld.param.u32 %r0, [p_first];\nld.param.u32 %r1, [p_step];\n"
    "ld.param.u64 %d1, [p_count];\nld.param.u64 %d5, [p_out];\nmov.u64 %d6, 1;\n" AT_EACH_WORD
    "ld.global.u32 %r6, [%d4];\nsetp.ne.u32 %q, %r6, %r5;\n@%q red.global.add.u64 [%d5], %d6;\n" NEXT_WORD;

#endif
