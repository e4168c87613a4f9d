/* The part of the CUDA driver interface that these programs use, declared from its documentation, and a
 * loader that fills a table of it from libcuda.so.1 at run time.
 *
 * SIMCUDA_PROGRAM_LOOKUP chooses how functions are looked up: "dlsym" takes the exported names, "table"
 * (the default) asks cuGetProcAddress. Programs behave the same either way.
 */
#ifndef SUBLET_TEST_DRIVER_H
#define SUBLET_TEST_DRIVER_H

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef uint64_t CUhandle; /* CUmemGenericAllocationHandle */
typedef void *CUcontext, *CUstream, *CUevent, *CUmodule, *CUfunction, *CUgraph, *CUgraphExec, *CUpool;

typedef struct {
    int type, id;
} CUlocation;

typedef struct {
    int type, requested_handle_types;
    CUlocation location;
    void *win32_meta;
    unsigned char compression, gpu_direct_rdma;
    unsigned short usage;
    unsigned char reserved[4];
} CUprop;

typedef struct {
    CUlocation location;
    int flags;
} CUaccess;

typedef struct {
    char bytes[64];
} CUipcMemHandle;

typedef struct {
    unsigned timeout_ms, reserved0;
    uint64_t reserved1[7];
} CUlockArgs; /* CUcheckpointLockArgs */

typedef struct {
    unsigned grid[3], block[3], shared_bytes;
    CUstream stream;
    void *attributes;
    unsigned attribute_count;
} CUlaunch;

enum {
    CU_OK = 0,
    CU_NOT_READY = 600,
    CU_FD = 1,
    CU_ATTRIBUTE_VMM = 102,
    CU_POINTER_MEMORY_TYPE = 2,
    CU_POINTER_DEVICE_ORDINAL = 9,
};

/* name, name of the exported symbol, arguments */
#define DRIVER_FUNCTIONS(X) \
    X(cuInit, cuInit, (unsigned)) \
    X(cuDriverGetVersion, cuDriverGetVersion, (int *)) \
    X(cuDeviceGet, cuDeviceGet, (CUdevice *, int)) \
    X(cuDeviceGetCount, cuDeviceGetCount, (int *)) \
    X(cuDeviceGetAttribute, cuDeviceGetAttribute, (int *, int, CUdevice)) \
    X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, (CUcontext *, CUdevice)) \
    X(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, (CUdevice)) \
    X(cuCtxSetCurrent, cuCtxSetCurrent, (CUcontext)) \
    X(cuCtxGetDevice, cuCtxGetDevice, (CUdevice *)) \
    X(cuCtxSynchronize, cuCtxSynchronize, (void)) \
    X(cuMemGetInfo, cuMemGetInfo_v2, (size_t *, size_t *)) \
    X(cuMemAlloc, cuMemAlloc_v2, (CUdeviceptr *, size_t)) \
    X(cuMemFree, cuMemFree_v2, (CUdeviceptr)) \
    X(cuMemAllocAsync, cuMemAllocAsync, (CUdeviceptr *, size_t, CUstream)) \
    X(cuMemFreeAsync, cuMemFreeAsync, (CUdeviceptr, CUstream)) \
    X(cuDeviceGetDefaultMemPool, cuDeviceGetDefaultMemPool, (CUpool *, CUdevice)) \
    X(cuMemPoolTrimTo, cuMemPoolTrimTo, (CUpool, size_t)) \
    X(cuMemGetAddressRange, cuMemGetAddressRange_v2, (CUdeviceptr *, size_t *, CUdeviceptr)) \
    X(cuPointerGetAttribute, cuPointerGetAttribute, (void *, int, CUdeviceptr)) \
    X(cuPointerGetAttributes, cuPointerGetAttributes, (unsigned, int *, void **, CUdeviceptr)) \
    X(cuMemAllocHost, cuMemAllocHost_v2, (void **, size_t)) \
    X(cuMemFreeHost, cuMemFreeHost, (void *)) \
    X(cuMemGetAccess, cuMemGetAccess, (uint64_t *, const CUlocation *, CUdeviceptr)) \
    X(cuMemGetAllocationGranularity, cuMemGetAllocationGranularity, (size_t *, const CUprop *, int)) \
    X(cuMemAddressReserve, cuMemAddressReserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, uint64_t)) \
    X(cuMemAddressFree, cuMemAddressFree, (CUdeviceptr, size_t)) \
    X(cuMemCreate, cuMemCreate, (CUhandle *, size_t, const CUprop *, uint64_t)) \
    X(cuMemRelease, cuMemRelease, (CUhandle)) \
    X(cuMemMap, cuMemMap, (CUdeviceptr, size_t, size_t, CUhandle, uint64_t)) \
    X(cuMemUnmap, cuMemUnmap, (CUdeviceptr, size_t)) \
    X(cuMemSetAccess, cuMemSetAccess, (CUdeviceptr, size_t, const CUaccess *, size_t)) \
    X(cuMemExportToShareableHandle, cuMemExportToShareableHandle, (void *, CUhandle, int, uint64_t)) \
    X(cuMemImportFromShareableHandle, cuMemImportFromShareableHandle, (CUhandle *, void *, int)) \
    X(cuMemRetainAllocationHandle, cuMemRetainAllocationHandle, (CUhandle *, void *)) \
    X(cuMemGetAllocationPropertiesFromHandle, cuMemGetAllocationPropertiesFromHandle, (CUprop *, CUhandle)) \
    X(cuMemHostRegister, cuMemHostRegister_v2, (void *, size_t, unsigned)) \
    X(cuMemHostUnregister, cuMemHostUnregister, (void *)) \
    X(cuCtxEnablePeerAccess, cuCtxEnablePeerAccess, (CUcontext, unsigned)) \
    X(cuIpcGetMemHandle, cuIpcGetMemHandle, (CUipcMemHandle *, CUdeviceptr)) \
    X(cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2, (CUdeviceptr *, CUipcMemHandle, unsigned)) \
    X(cuIpcCloseMemHandle, cuIpcCloseMemHandle, (CUdeviceptr)) \
    X(cuMemcpyHtoD, cuMemcpyHtoD_v2, (CUdeviceptr, const void *, size_t)) \
    X(cuMemcpyDtoH, cuMemcpyDtoH_v2, (void *, CUdeviceptr, size_t)) \
    X(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2, (CUdeviceptr, const void *, size_t, CUstream)) \
    X(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2, (void *, CUdeviceptr, size_t, CUstream)) \
    X(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2, (CUdeviceptr, CUdeviceptr, size_t, CUstream)) \
    X(cuMemsetD8, cuMemsetD8_v2, (CUdeviceptr, unsigned char, size_t)) \
    X(cuMemsetD32Async, cuMemsetD32Async, (CUdeviceptr, unsigned, size_t, CUstream)) \
    X(cuStreamCreate, cuStreamCreate, (CUstream *, unsigned)) \
    X(cuStreamDestroy, cuStreamDestroy_v2, (CUstream)) \
    X(cuStreamSynchronize, cuStreamSynchronize, (CUstream)) \
    X(cuStreamQuery, cuStreamQuery, (CUstream)) \
    X(cuStreamWaitEvent, cuStreamWaitEvent, (CUstream, CUevent, unsigned)) \
    X(cuStreamBeginCapture, cuStreamBeginCapture_v2, (CUstream, int)) \
    X(cuStreamEndCapture, cuStreamEndCapture, (CUstream, CUgraph *)) \
    X(cuStreamIsCapturing, cuStreamIsCapturing, (CUstream, int *)) \
    X(cuLaunchHostFunc, cuLaunchHostFunc, (CUstream, void (*)(void *), void *)) \
    X(cuEventCreate, cuEventCreate, (CUevent *, unsigned)) \
    X(cuEventRecord, cuEventRecord, (CUevent, CUstream)) \
    X(cuEventSynchronize, cuEventSynchronize, (CUevent)) \
    X(cuEventQuery, cuEventQuery, (CUevent)) \
    X(cuEventElapsedTime, cuEventElapsedTime, (float *, CUevent, CUevent)) \
    X(cuEventDestroy, cuEventDestroy_v2, (CUevent)) \
    X(cuGraphInstantiate, cuGraphInstantiateWithFlags, (CUgraphExec *, CUgraph, uint64_t)) \
    X(cuGraphLaunch, cuGraphLaunch, (CUgraphExec, CUstream)) \
    X(cuGraphDestroy, cuGraphDestroy, (CUgraph)) \
    X(cuGraphExecDestroy, cuGraphExecDestroy, (CUgraphExec)) \
    X(cuModuleLoadData, cuModuleLoadData, (CUmodule *, const void *)) \
    X(cuModuleGetFunction, cuModuleGetFunction, (CUfunction *, CUmodule, const char *)) \
    X(cuModuleUnload, cuModuleUnload, (CUmodule)) \
    X(cuLaunchKernel, cuLaunchKernel, \
      (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **)) \
    X(cuLaunchKernelEx, cuLaunchKernelEx, (const CUlaunch *, CUfunction, void **, void **)) \
    X(cuGetErrorName, cuGetErrorName, (CUresult, const char **))

#define DECLARE(name, symbol, arguments) static CUresult(*name) arguments;
DRIVER_FUNCTIONS(DECLARE)
#undef DECLARE

typedef CUresult (*driver_lookup)(const char *, void **, int, uint64_t, int *);

static const char *driver_error(CUresult code)
{
    const char *name = "an unknown code";
    if (cuGetErrorName != NULL)
        cuGetErrorName(code, &name);
    return name;
}

/* Ends the program when a call that must succeed does not. */
#define OK(call) \
    do { \
        CUresult code_ = (call); \
        if (code_ != CU_OK) { \
            printf("line %d: %s: %s\n", __LINE__, #call, driver_error(code_)); \
            exit(1); \
        } \
    } while (0)

static void driver_missing(const char *name)
{
    printf("libcuda.so.1 lacks %s\n", name);
    exit(1);
}

static void driver_load(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        printf("no libcuda.so.1: %s\n", dlerror());
        exit(1);
    }
    const char *how = getenv("SIMCUDA_PROGRAM_LOOKUP");
    int by_dlsym = how != NULL && strcmp(how, "dlsym") == 0;
    driver_lookup lookup = (driver_lookup)dlsym(library, "cuGetProcAddress_v2");
    if (lookup == NULL)
        driver_missing("cuGetProcAddress_v2");
#define LOAD(name, symbol, arguments) \
    { \
        void *found = NULL; \
        int status = 0; \
        if (by_dlsym) \
            found = dlsym(library, #symbol); \
        else \
            lookup(#name, &found, 12000, 0, &status); \
        if (found == NULL) \
            driver_missing(#name); \
        name = (CUresult(*) arguments)found; \
    }
    DRIVER_FUNCTIONS(LOAD)
#undef LOAD
}

/* Pinned memory of device 0 that can be exported as a file descriptor. */
static inline CUprop driver_prop(void)
{
    CUprop prop;
    memset(&prop, 0, sizeof prop);
    prop.type = 1;
    prop.requested_handle_types = CU_FD;
    prop.location.type = 1;
    return prop;
}

static inline CUdeviceptr driver_map(CUhandle handle, size_t bytes)
{
    CUdeviceptr address = 0;
    CUaccess access = {{1, 0}, 3};
    OK(cuMemAddressReserve(&address, bytes, 0, 0, 0));
    OK(cuMemMap(address, bytes, 0, handle, 0));
    OK(cuMemSetAccess(address, bytes, &access, 1));
    return address;
}

static inline void driver_unmap(CUdeviceptr address, size_t bytes)
{
    OK(cuMemUnmap(address, bytes));
    OK(cuMemAddressFree(address, bytes));
}

static inline size_t driver_free_bytes(void)
{
    size_t free_bytes = 0, total_bytes = 0;
    OK(cuMemGetInfo(&free_bytes, &total_bytes));
    return free_bytes;
}

/* Makes the primary context of device 0 current. */
static inline void driver_start(void)
{
    CUcontext context = NULL;
    CUdevice device = 0;
    driver_load();
    OK(cuInit(0));
    OK(cuDeviceGet(&device, 0));
    OK(cuDevicePrimaryCtxRetain(&context, device));
    OK(cuCtxSetCurrent(context));
}

static inline CUfunction driver_kernel(const char *name)
{
    static CUmodule module;
    CUfunction function = NULL;
    if (module == NULL)
        OK(cuModuleLoadData(&module, "image"));
    OK(cuModuleGetFunction(&function, module, name));
    return function;
}

static inline void driver_launch(const char *kernel, CUstream stream, void **params)
{
    OK(cuLaunchKernel(driver_kernel(kernel), 1, 1, 1, 32, 1, 1, 0, stream, params, NULL));
}

static inline void driver_fill(CUdeviceptr target, uint32_t value, uint64_t count, CUstream stream)
{
    void *params[] = {&target, &value, &count};
    driver_launch("fill_u32", stream, params);
}

static inline void driver_affine(CUdeviceptr data, uint32_t mul, uint32_t add, uint64_t count, CUstream stream)
{
    void *params[] = {&data, &mul, &add, &count};
    driver_launch("affine_u32", stream, params);
}

/* The sum of `count` words at `data`, after all earlier work of `stream`. */
static inline uint64_t driver_sum(CUdeviceptr data, uint64_t count, CUstream stream)
{
    CUdeviceptr out = 0;
    uint64_t sum = 0;
    OK(cuMemAlloc(&out, sizeof sum));
    void *params[] = {&out, &data, &count};
    driver_launch("sum_u32", stream, params);
    OK(cuMemcpyDtoHAsync(&sum, out, sizeof sum, stream));
    OK(cuStreamSynchronize(stream));
    OK(cuMemFree(out));
    return sum;
}

#endif
