/* Stream-ordered memory of GPU 1, by its pool and by its stream, while GPU 0 is current, and plain memory of GPU 1 after
 * that: which budget says no? */
#include "driver.h"
#include "inside.h"

enum { BYTES = 64 << 20, PLAIN_BYTES = 12 << 20 };

int main(void)
{
    CUcontext contexts[2];
    CUstream stream = NULL;
    CUpool pool = NULL;
    CUdeviceptr data = 0;
    CUresult (*allocate)(CUdeviceptr *, size_t, CUpool, CUstream);
    inside_deadline(120);
    driver_load();
    OK(cuInit(0));
    *(void **)&allocate = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuMemAllocFromPoolAsync");
    for (int device = 0; device < 2; device++)
        OK(cuDevicePrimaryCtxRetain(&contexts[device], device));
    OK(cuCtxSetCurrent(contexts[1]));
    OK(cuStreamCreate(&stream, 1));
    OK(cuDeviceGetDefaultMemPool(&pool, 1));
    OK(cuCtxSetCurrent(contexts[0]));
    printf("of the pool: %s\n", driver_error(allocate(&data, BYTES, pool, stream)));
    printf("of the stream: %s\n", driver_error(cuMemAllocAsync(&data, BYTES, stream)));
    OK(cuCtxSetCurrent(contexts[1]));
    printf("plain: %s\n", driver_error(cuMemAlloc(&data, PLAIN_BYTES)));
    return 0;
}
