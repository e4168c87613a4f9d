/* What a pause leaves on a device, and what keeps a process from leaving it. It obeys lines on standard input and answers each with one line:
 *
 *   make          plain memory under 1 MiB, memory of a stream, memory and an event of a context of its own, host memory that is
 *                 registered and that the driver has made, and a graph that allocates
 *   check         is all of it as it was, and does the graph run? Then all is written once more
 *   host, nohost  host memory of the driver's allocator, as NCCL has it, and its end
 *   handle        the words of a handle by which another process opens a block
 *   open HANDLE   opens that
 *   close         closes it
 *   ask           from now on a thread asks all the time if work is over, and waits for it
 *   asked         its next round is over
 *   leave         ends the process, with an exit handler of before it has joined that reads device memory
 */
#include "block.h"

#include <pthread.h>
#include <stdatomic.h>

enum { SMALL = 64 << 10, LARGE = 4 << 20, HOST = 1 << 20, HOST_NUMA = 3 };

static struct {
    CUdeviceptr small, ordered, own, copied, opened, exported, host;
    CUcontext primary, context;
    CUstream own_stream;
    CUevent event;
    CUgraphExec graph;
    unsigned *registered, *allocated;
    CUhandle handle;
    unsigned seed;
    bool reads_at_end;
} all;

/* Words of device memory and of host memory, each with its own number. */
static void write_all(unsigned seed)
{
    all.seed = seed;
    OK(cuMemsetD32Async(all.small, seed, SMALL / 4, stream));
    OK(cuMemsetD32Async(all.ordered, seed + 1, LARGE / 4, stream));
    OK(cuStreamSynchronize(stream));
    OK(cuCtxSetCurrent(all.context));
    OK(cuMemsetD32Async(all.own, seed + 2, LARGE / 4, all.own_stream));
    OK(cuEventRecord(all.event, all.own_stream));
    OK(cuStreamSynchronize(all.own_stream));
    OK(cuCtxSetCurrent(all.primary));
    for (unsigned i = 0; i < HOST / 4; i++)
        all.registered[i] = seed + 3;
    for (unsigned i = 0; i < SMALL / 4; i++)
        all.allocated[i] = seed + 4;
}

static const char *wrong(void)
{
    unsigned seed = all.seed;
    if (!block_holds(all.small, SMALL, seed))
        return "plain memory under 1 MiB";
    if (!block_holds(all.ordered, LARGE, seed + 1))
        return "memory of a stream";
    OK(cuCtxSetCurrent(all.context));
    bool holds = block_holds(all.own, LARGE, seed + 2);
    OK(cuEventSynchronize(all.event));
    OK(cuCtxSetCurrent(all.primary));
    if (!holds)
        return "memory of another context";
    /* The driver copies from both on its own. */
    OK(cuMemcpyHtoDAsync(all.small, all.registered, SMALL, stream));
    OK(cuMemcpyHtoDAsync(all.ordered, all.allocated, SMALL, stream));
    OK(cuStreamSynchronize(stream));
    if (!block_holds(all.small, SMALL, seed + 3))
        return "host memory that is registered";
    if (!block_holds(all.ordered, SMALL, seed + 4))
        return "host memory of the driver";
    OK(cuMemsetD32Async(all.copied, 0, LARGE / 4, stream));
    OK(cuGraphLaunch(all.graph, stream));
    OK(cuStreamSynchronize(stream));
    return block_holds(all.copied, LARGE, 77) ? NULL : "a graph that allocates";
}

/* Fills memory of its own and copies it to a block. */
static void make_graph(void)
{
    CUdeviceptr inside = 0;
    CUgraph graph = NULL;
    OK(cuStreamBeginCapture(stream, 0));
    OK(cuMemAllocAsync(&inside, LARGE, stream));
    OK(cuMemsetD32Async(inside, 77, LARGE / 4, stream));
    OK(cuMemcpyDtoDAsync(all.copied, inside, LARGE, stream));
    OK(cuMemFreeAsync(inside, stream));
    OK(cuStreamEndCapture(stream, &graph));
    OK(cuGraphInstantiate(&all.graph, graph, 0));
}

static void make(void)
{
    CUresult (*create)(CUcontext *, unsigned, CUdevice) = NULL;
    *(void **)&create = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuCtxCreate_v2");
    OK(cuDevicePrimaryCtxRetain(&all.primary, 0));
    OK(create(&all.context, 0, 0));
    OK(cuStreamCreate(&all.own_stream, 1));
    OK(cuEventCreate(&all.event, 2));
    OK(cuMemAlloc(&all.own, LARGE));
    OK(cuCtxSetCurrent(all.primary));
    OK(cuMemAlloc(&all.small, SMALL));
    OK(cuMemAlloc(&all.copied, LARGE));
    OK(cuMemAllocAsync(&all.ordered, LARGE, stream));
    all.registered = aligned_alloc(4096, HOST);
    OK(cuMemHostRegister(all.registered, HOST, 0));
    OK(cuMemAllocHost((void **)&all.allocated, SMALL));
    make_graph();
    write_all(1000);
}

static void host(void)
{
    CUprop prop = driver_prop();
    prop.location.type = HOST_NUMA;
    OK(cuMemCreate(&all.handle, 2 << 20, &prop, 0));
    all.host = driver_map(all.handle, 2 << 20);
}

static void handle(void)
{
    CUipcMemHandle made;
    OK(cuMemAlloc(&all.exported, LARGE));
    OK(cuIpcGetMemHandle(&made, all.exported));
    printf("ok ");
    for (size_t i = 0; i < sizeof made; i++)
        printf("%02x", ((const unsigned char *)&made)[i]);
    printf("\n");
}

static CUresult open_handle(const char *words)
{
    CUipcMemHandle handle;
    for (size_t i = 0; i < sizeof handle; i++) {
        unsigned byte = 0;
        sscanf(words + 2 * i, "%2x", &byte);
        ((unsigned char *)&handle)[i] = (unsigned char)byte;
    }
    return cuIpcOpenMemHandle(&all.opened, handle, 1);
}

static atomic_ulong rounds;

/* Every call that asks if work is over or waits for it. */
static void *ask(void *unused)
{
    CUevent first = NULL, second = NULL;
    float milliseconds = 0;
    (void)unused;
    OK(cuCtxSetCurrent(all.primary));
    OK(cuEventCreate(&first, 0));
    OK(cuEventCreate(&second, 0));
    OK(cuEventRecord(first, stream));
    OK(cuEventRecord(second, stream));
    OK(cuEventSynchronize(second));
    for (;; rounds++) {
        CUresult code = cuStreamQuery(NULL);
        if (code != CU_NOT_READY)
            OK(code);
        OK(cuStreamSynchronize(all.own_stream));
        OK(cuEventQuery(first));
        OK(cuEventSynchronize(second));
        OK(cuEventElapsedTime(&milliseconds, first, second));
        OK(cuCtxSynchronize());
    }
    return NULL;
}

static void obey(const char *line)
{
    if (is(line, "make"))
        make();
    else if (is(line, "check")) {
        const char *what = wrong();
        if (what != NULL) {
            printf("no, it is not as it was: %s\n", what);
            return;
        }
        write_all(all.seed + 10);
    } else if (is(line, "host"))
        host();
    else if (is(line, "nohost")) {
        driver_unmap(all.host, 2 << 20);
        OK(cuMemRelease(all.handle));
    } else if (is(line, "handle")) {
        handle();
        return;
    } else if (is(line, "open ")) {
        CUresult code = open_handle(line + 5);
        if (code != CU_OK) {
            printf("no %s\n", driver_error(code));
            return;
        }
    } else if (is(line, "asked")) {
        /* One that is under way may have begun before. */
        unsigned long until = rounds + 2;
        while (rounds < until)
            sched_yield();
    } else if (is(line, "ask")) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, ask, NULL) != 0)
            exit(2);
    } else if (is(line, "close"))
        OK(cuIpcCloseMemHandle(all.opened));
    else if (is(line, "leave")) {
        all.reads_at_end = true;
        exit(0);
    } else
        exit(2);
    printf("ok\n");
}

static void at_end(void)
{
    if (!all.reads_at_end)
        return;
    OK(cuCtxSetCurrent(all.context));
    printf(block_holds(all.own, LARGE, all.seed + 2) ? "ok at the end\n" : "no\n");
}

int main(void)
{
    atexit(at_end);
    lines_begin();
    block_begin(0);
    lines_obey(obey);
    return 0;
}
