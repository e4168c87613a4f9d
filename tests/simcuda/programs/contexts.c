/* Which calls care about the current context, and which about that of their stream: two devices, memory of each
 * mapped for itself alone, and every pairing of context and stream. */
#include "driver.h"

#include <sys/mman.h>

enum { BYTES = 4 << 20 };

static struct {
    CUcontext context;
    CUstream stream;
    CUevent event;
    CUfunction fill;
    CUdeviceptr mapped, plain;
} all[2];

static void *host;

static void make(int device)
{
    CUprop prop = driver_prop();
    CUaccess access = {{1, device}, 3};
    CUhandle handle = 0;
    CUmodule module = NULL;
    OK(cuDevicePrimaryCtxRetain(&all[device].context, device));
    OK(cuCtxSetCurrent(all[device].context));
    OK(cuStreamCreate(&all[device].stream, 1));
    OK(cuEventCreate(&all[device].event, 0));
    OK(cuModuleLoadData(&module, "image"));
    OK(cuModuleGetFunction(&all[device].fill, module, "fill_u32"));
    OK(cuMemAlloc(&all[device].plain, BYTES));
    prop.location.id = device;
    OK(cuMemCreate(&handle, BYTES, &prop, 0));
    OK(cuMemAddressReserve(&all[device].mapped, BYTES, 0, 0, 0));
    OK(cuMemMap(all[device].mapped, BYTES, 0, handle, 0));
    OK(cuMemSetAccess(all[device].mapped, BYTES, &access, 1));
    OK(cuMemRelease(handle));
}

static void say(const char *what, CUresult code)
{
    printf("  %s: %s\n", what, driver_error(code));
}

static CUresult launch(int function, int stream)
{
    uint32_t value = 7;
    uint64_t count = 16;
    void *params[] = {&all[stream].mapped, &value, &count};
    return cuLaunchKernel(all[function].fill, 1, 1, 1, 32, 1, 1, 0, all[stream].stream, params, NULL);
}

static void with_stream(int device)
{
    CUstream stream = all[device].stream;
    printf(" stream of device %d\n", device);
    say("copy in, mapped memory of its own", cuMemcpyHtoDAsync(all[device].mapped, host, BYTES, stream));
    say("copy out, mapped memory of its own", cuMemcpyDtoHAsync(host, all[device].mapped, BYTES, stream));
    say("copy in, plain memory", cuMemcpyHtoDAsync(all[1 - device].plain, host, BYTES, stream));
    say("copy between devices, plain memory",
        cuMemcpyDtoDAsync(all[0].plain, all[1].plain, BYTES, stream));
    say("fill, mapped memory of its own", cuMemsetD32Async(all[device].mapped, 7, 16, stream));
    say("fill, mapped memory of the other", cuMemsetD32Async(all[1 - device].mapped, 7, 16, stream));
    say("record of its own event", cuEventRecord(all[device].event, stream));
    say("record of the other's event", cuEventRecord(all[1 - device].event, stream));
    say("wait for the other's event", cuStreamWaitEvent(stream, all[1 - device].event, 0));
    say("launch of its own function", launch(device, device));
    say("launch of the other's function", launch(1 - device, device));
    say("wait", cuStreamSynchronize(stream));
    say("query", cuStreamQuery(stream));
}

static void without_stream(void)
{
    size_t free_bytes = 0, total_bytes = 0;
    CUdeviceptr address = 0;
    CUstream stream = NULL;
    CUevent event = NULL;
    say("wait for the device", cuCtxSynchronize());
    say("memory info", cuMemGetInfo(&free_bytes, &total_bytes));
    say("allocation", cuMemAlloc(&address, BYTES));
    say("stream", cuStreamCreate(&stream, 1));
    say("event", cuEventCreate(&event, 0));
    say("copy that waits", cuMemcpyHtoD(all[1].plain, host, BYTES));
    say("pinning", cuMemHostRegister(host, BYTES, 0));
    if (address != 0) {
        OK(cuMemFree(address));
        OK(cuStreamDestroy(stream));
        OK(cuEventDestroy(event));
    } else {
        OK(cuCtxSetCurrent(all[0].context));
        OK(cuMemHostRegister(host, BYTES, 0));
        OK(cuCtxSetCurrent(NULL));
    }
    say("unpinning", cuMemHostUnregister(host));
}

int main(void)
{
    driver_load();
    OK(cuInit(0));
    host = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    make(0);
    make(1);
    for (int current = 0; current <= 2; current++) {
        printf("current: %s\n", current == 2 ? "none" : current == 1 ? "device 1" : "device 0");
        OK(cuCtxSetCurrent(current == 2 ? NULL : all[current].context));
        with_stream(0);
        with_stream(1);
        without_stream();
    }
    OK(cuMemFree(all[0].plain));
    OK(cuStreamDestroy(all[1].stream));
    OK(cuEventDestroy(all[1].event));
    printf("given back without a context\n");
    CUstream first = NULL, second = NULL;
    OK(cuCtxSetCurrent(all[0].context));
    OK(cuStreamCreate(&first, 1));
    OK(cuStreamDestroy(first));
    OK(cuStreamCreate(&second, 1));
    printf("a stream's value comes again immediately: %d\n", first == second);
    return 0;
}
