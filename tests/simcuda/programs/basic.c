/* One process: memory, kernels, streams, events, graphs. Prints what happened, without addresses. */
#include "driver.h"

#define WORDS 1024

static size_t granule;

static void show_device(void)
{
    int version = 0, count = 0, vmm = 0;
    OK(cuDriverGetVersion(&version));
    OK(cuDeviceGetCount(&count));
    OK(cuDeviceGetAttribute(&vmm, CU_ATTRIBUTE_VMM, 0));
    printf("version at least 12000: %d\n", version >= 12000);
    printf("devices: %d, vmm: %d\n", count, vmm);
}

static void plain_memory(void)
{
    CUdeviceptr data = 0, start = 0;
    size_t bytes = 0;
    unsigned type = 0;
    OK(cuMemAlloc(&data, WORDS * 4));
    OK(cuMemGetAddressRange(&start, &bytes, data + 100));
    OK(cuPointerGetAttribute(&type, CU_POINTER_MEMORY_TYPE, data));
    printf("plain: range %zu bytes, at start %d, memory type %u\n", bytes, start == data, type);
    OK(cuMemsetD8(data, 1, WORDS * 4));
    printf("plain: sum of memset %llu\n", (unsigned long long)driver_sum(data, WORDS, NULL));
    driver_fill(data, 7, WORDS, NULL);
    driver_affine(data, 3, 1, WORDS, NULL);
    printf("plain: sum of kernels %llu\n", (unsigned long long)driver_sum(data, WORDS, NULL));
    OK(cuMemFree(data));
}

static void mapped_memory(void)
{
    CUprop prop = driver_prop(), found;
    CUhandle handle = 0, again = 0;
    size_t bytes = 2 * granule, range = 0;
    CUdeviceptr start = 0;
    size_t before = driver_free_bytes();
    OK(cuMemCreate(&handle, bytes, &prop, 0));
    printf("mapped: create took %zu bytes\n", before - driver_free_bytes());
    CUdeviceptr one = driver_map(handle, bytes), two = driver_map(handle, bytes);
    OK(cuMemGetAllocationPropertiesFromHandle(&found, handle));
    printf("mapped: type %d, handle types %d\n", found.type, found.requested_handle_types);
    OK(cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)one));
    printf("mapped: retained the same handle %d\n", again == handle);
    OK(cuMemRelease(again));
    OK(cuMemGetAddressRange(&start, &range, one + granule));
    printf("mapped: range %zu bytes, at start %d\n", range, start == one);
    driver_fill(one, 5, WORDS, NULL);
    printf("mapped: sum through the second mapping %llu\n", (unsigned long long)driver_sum(two, WORDS, NULL));
    OK(cuMemRelease(handle));
    driver_unmap(two, bytes);
    printf("mapped: sum after release %llu\n", (unsigned long long)driver_sum(one, WORDS, NULL));
    driver_unmap(one, bytes);
    printf("mapped: missing afterwards %zu bytes\n", before - driver_free_bytes());
}

static void refusals(void)
{
    CUprop prop = driver_prop();
    CUhandle handle = 0, other = 0;
    CUdeviceptr address = 0;
    OK(cuMemCreate(&handle, granule, &prop, 0));
    OK(cuMemCreate(&other, granule, &prop, 0));
    address = driver_map(handle, granule);
    printf("refused: map over a mapping: %s\n", driver_error(cuMemMap(address, granule, 0, other, 0)));
    printf("refused: free while mapped: %s\n", driver_error(cuMemAddressFree(address, granule)));
    printf("refused: misaligned create: %s\n", driver_error(cuMemCreate(&handle, 1, &prop, 0)));
    driver_unmap(address, granule);
    printf("refused: unmap of nothing: %s\n", driver_error(cuMemUnmap(address, granule)));
    OK(cuMemRelease(handle));
    printf("refused: second release: %s\n", driver_error(cuMemRelease(handle)));
    OK(cuMemRelease(other));
    printf("refused: too much: %s\n", driver_error(cuMemAlloc(&address, (size_t)1 << 50)));
}

static void add_one(void *counter)
{
    *(int *)counter += 1;
}

static void streams(void)
{
    CUstream first = NULL, second = NULL;
    CUevent done = NULL;
    CUdeviceptr data = 0, copy = 0;
    int calls = 0;
    OK(cuStreamCreate(&first, 1));
    OK(cuStreamCreate(&second, 1));
    OK(cuEventCreate(&done, 0));
    OK(cuMemAlloc(&data, WORDS * 4));
    OK(cuMemAlloc(&copy, WORDS * 4));
    driver_fill(data, 1, WORDS, first);
    for (int i = 0; i < 10; i++) {
        driver_affine(data, 2, 0, WORDS, first);
        OK(cuLaunchHostFunc(first, add_one, &calls));
    }
    OK(cuEventRecord(done, first));
    OK(cuStreamWaitEvent(second, done, 0));
    OK(cuMemcpyDtoDAsync(copy, data, WORDS * 4, second));
    printf("streams: sum %llu\n", (unsigned long long)driver_sum(copy, WORDS, second));
    OK(cuStreamSynchronize(first));
    printf("streams: host calls %d, idle %d\n", calls, cuStreamQuery(first) == CU_OK);
    OK(cuEventSynchronize(done));
    OK(cuMemFree(data));
    OK(cuMemFree(copy));
    OK(cuEventDestroy(done));
    OK(cuStreamDestroy(first));
    OK(cuStreamDestroy(second));
}

static void graphs(void)
{
    CUstream stream = NULL, side = NULL;
    CUevent fork = NULL, join = NULL;
    CUgraph graph = NULL;
    CUgraphExec ready = NULL;
    CUdeviceptr data = 0, flags = 0;
    int status = 0;
    OK(cuStreamCreate(&stream, 1));
    OK(cuStreamCreate(&side, 1));
    OK(cuEventCreate(&fork, 0));
    OK(cuEventCreate(&join, 0));
    OK(cuMemAlloc(&data, WORDS * 4));
    OK(cuMemAlloc(&flags, WORDS * 4));
    driver_fill(data, 1, WORDS, stream);
    OK(cuStreamSynchronize(stream));
    /* An allocation is refused, and spoils the capture. */
    CUdeviceptr refused = 0;
    OK(cuStreamBeginCapture(stream, 0));
    OK(cuStreamIsCapturing(stream, &status));
    printf("graphs: capturing %d, alloc meanwhile: %s", status, driver_error(cuMemAlloc(&refused, 4)));
    printf(", then %s\n", driver_error(cuStreamEndCapture(stream, &graph)));
    OK(cuStreamBeginCapture(stream, 0));
    driver_affine(data, 3, 0, WORDS, stream);
    OK(cuEventRecord(fork, stream));
    OK(cuStreamWaitEvent(side, fork, 0));
    OK(cuMemsetD32Async(flags, 9, WORDS, side));
    OK(cuEventRecord(join, side));
    OK(cuStreamWaitEvent(stream, join, 0));
    OK(cuStreamEndCapture(stream, &graph));
    OK(cuGraphInstantiate(&ready, graph, 0));
    printf("graphs: before launch %llu\n", (unsigned long long)driver_sum(data, WORDS, stream));
    for (int i = 0; i < 3; i++)
        OK(cuGraphLaunch(ready, stream));
    printf("graphs: after three launches %llu", (unsigned long long)driver_sum(data, WORDS, stream));
    printf(" and %llu\n", (unsigned long long)driver_sum(flags, WORDS, stream));
    OK(cuGraphExecDestroy(ready));
    OK(cuGraphDestroy(graph));
    OK(cuMemFree(data));
    OK(cuMemFree(flags));
    OK(cuEventDestroy(fork));
    OK(cuEventDestroy(join));
    OK(cuStreamDestroy(stream));
    OK(cuStreamDestroy(side));
}

static void pools(void)
{
    CUstream stream = NULL;
    CUpool pool = NULL;
    CUdeviceptr data = 0;
    CUlaunch config = {{1, 1, 1}, {32, 1, 1}, 0, NULL, NULL, 0};
    OK(cuStreamCreate(&stream, 1));
    size_t before = driver_free_bytes();
    OK(cuMemAllocAsync(&data, WORDS * 4, stream));
    uint32_t value = 11;
    uint64_t count = WORDS;
    void *params[] = {&data, &value, &count};
    config.stream = stream;
    OK(cuLaunchKernelEx(&config, driver_kernel("fill_u32"), params, NULL));
    printf("pools: sum %llu\n", (unsigned long long)driver_sum(data, WORDS, stream));
    OK(cuMemFreeAsync(data, stream));
    OK(cuStreamSynchronize(stream));
    OK(cuDeviceGetDefaultMemPool(&pool, 0));
    OK(cuMemPoolTrimTo(pool, 0));
    printf("pools: missing after trim %zu bytes\n", before - driver_free_bytes());
    OK(cuStreamDestroy(stream));
}

int main(void)
{
    CUprop prop = driver_prop();
    driver_start();
    OK(cuMemGetAllocationGranularity(&granule, &prop, 0));
    size_t before = driver_free_bytes();
    show_device();
    plain_memory();
    mapped_memory();
    refusals();
    streams();
    graphs();
    pools();
    OK(cuCtxSynchronize());
    printf("missing at the end: %zu bytes\n", before - driver_free_bytes());
    OK(cuDevicePrimaryCtxRelease(0));
    return 0;
}
