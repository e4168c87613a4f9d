/* Contexts of the program's own next to the primary one: each costs memory, each is waited for by itself, streams and events of
 * one are not the other's, and the driver has the functions that make and end them by their first names too. */
#include "driver.h"

static CUresult (*create)(CUcontext *, unsigned, CUdevice);
static CUresult (*destroy)(CUcontext);
static CUresult (*destroy_stream)(CUstream);
static CUresult (*destroy_event)(CUevent);
static CUresult (*begin_capture)(CUstream);
static CUresult (*exchange_mode)(int *);
static CUresult (*context_of)(CUstream, CUcontext *);

static void *symbol(const char *name)
{
    void *found = dlsym(dlopen("libcuda.so.1", RTLD_NOW), name);
    if (found == NULL)
        driver_missing(name);
    return found;
}

int main(void)
{
    CUcontext primary = NULL, own = NULL, found = NULL;
    CUstream working = NULL, other = NULL;
    CUevent event = NULL;
    CUgraph graph = NULL;
    CUdeviceptr flag = 0;
    int mode = 2; /* relaxed */
    driver_start();
    *(void **)&create = symbol("cuCtxCreate");
    *(void **)&destroy = symbol("cuCtxDestroy");
    *(void **)&destroy_stream = symbol("cuStreamDestroy");
    *(void **)&destroy_event = symbol("cuEventDestroy");
    *(void **)&begin_capture = symbol("cuStreamBeginCapture");
    *(void **)&context_of = symbol("cuStreamGetCtx");
    *(void **)&exchange_mode = symbol("cuThreadExchangeStreamCaptureMode");
    OK(cuDevicePrimaryCtxRetain(&primary, 0));
    OK(cuMemAlloc(&flag, 4));
    OK(cuMemsetD8(flag, 0, 4));
    OK(cuCtxSynchronize());
    OK(cuStreamCreate(&other, 1));
    size_t before = driver_free_bytes();
    OK(create(&own, 0, 0));
    printf("a context costs %zu bytes\n", before - driver_free_bytes());
    OK(cuStreamCreate(&working, 1));
    OK(cuEventCreate(&event, 0));
    OK(context_of(working, &found));
    printf("the stream's context is its own: %d\n", found == own);
    OK(context_of(NULL, &found));
    printf("the null stream's is the current one: %d\n", found == own);
    printf("record on a stream of another context: %s\n", driver_error(cuEventRecord(event, other)));
    void *params[] = {&flag};
    driver_launch("spin_until_nonzero", working, params);
    OK(cuCtxSetCurrent(primary));
    OK(cuCtxSynchronize());
    printf("waited for the primary context, and the other has work: %d\n", cuStreamQuery(working) == CU_NOT_READY);
    OK(begin_capture(other));
    OK(cuCtxSetCurrent(own));
    OK(cuMemsetD32Async(flag, 1, 1, NULL));
    OK(exchange_mode(&mode));
    printf("wait during a capture of another context: %s\n", driver_error(cuCtxSynchronize()));
    OK(cuStreamEndCapture(other, &graph));
    OK(destroy_event(event));
    CUfunction spin = driver_kernel("spin_until_nonzero");
    OK(destroy(own));
    printf("launch of a function whose context has ended: %s\n",
        driver_error(cuLaunchKernel(spin, 1, 1, 1, 32, 1, 1, 0, other, params, NULL)));
    printf("query of a stream whose context has ended: %s\n", driver_error(cuStreamQuery(working)));
    OK(cuCtxSetCurrent(primary));
    printf("given back: %d\n", driver_free_bytes() == before);
    OK(destroy_stream(other));
    return 0;
}
